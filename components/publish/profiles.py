"""What an engine honours of a drafter, and why it could not serve one: said before anything is trained.

A profile is data (engine_table.py) and this module the few questions it answers, without importing torch: `draftsmith
check` asks them of every pipeline that names engines, the dry run asks those that need the target's config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from components.drafts.storage import Storage

Engine = Literal["vllm", "sglang", "llama.cpp", "mnn", "tensorrt-llm", "transformers", "openvino", "speculators"]
Format = Literal["eagle1", "eagle3", "speculators", "medusa", "mtp", "mimo", "stitched", "causal-lm", "gguf"]
TapsAt = Literal["top", "inner", "inner as inputs"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

OWN_MTP, GIVEN_MODEL = "mtp-own", "draft-model-given"
"""What methods mtp and draft-model are called here with `start: own` and with a given `model`: other files, or none."""


@dataclass(frozen=True)
class Need:
    """A setting of the method that must have one of these values for the engine; `why` is one clause."""

    setting: str
    allowed: tuple[Any, ...]
    why: str


@dataclass(frozen=True)
class Served:
    """How an engine takes one method.

    formats: what it reads, the one to write first; () where it needs no file. tried: the engine's version that was run
    with our own checkpoint, "" where its source or manual was read only. needs: what it asks of the method's settings.
    max_depth: guesses a round that it serves exactly as trained; None: as many as the drafter makes. architectures:
    targets that it serves so; () where it takes any. rope_of_target: it rotates positions as the target's config says,
    scaling and all, where ours are always rotated plainly.
    """

    formats: tuple[Format, ...] = ()
    tried: str = ""
    needs: tuple[Need, ...] = ()
    max_depth: int | None = None
    architectures: tuple[str, ...] = ()
    rope_of_target: bool = False


@dataclass(frozen=True)
class FewBits:
    """How an engine takes weights that drafts.quantise_draft packed.

    methods: whose drafters. groups: weights -> group sizes it has kernels for, 0 for one scale an output channel.
    kept: method -> layers that it never takes quantised. keepable: layers beside those that may stay in bfloat16; it
    takes every other linear layer quantised. remarks: weights -> what was found when ours was tried, or that none was.
    """

    methods: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]
    kept: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keepable: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """What an engine's limits depend on in the target's config. head_dim: its own. architecture: UNKNOWN if unsaid."""

    architecture: str
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: str = ""  # targets/rope_scaling.py


@dataclass(frozen=True)
class Profile:
    """One engine.

    title:         its name as people write it.
    version:       the version that the facts were read from.
    methods:       method (or OWN_MTP, GIVEN_MODEL) -> how it is taken. A method that is not here is not served.
    instead:       method -> why not, for those that are worth a word.
    norm_flags:    of EAGLE-3's norms (NORM_FLAGS) those it honours; the others it drops without a word, or refuses.
    taps_at:       where it looks for EAGLE-3's tapped layers in a config, the first that is there counts: at top level,
                   in eagle_config, or there too but with the meaning of the top level; then the defaults. None: nobody
                   has looked.
    whole_d2t:     whether it takes d2t and t2d of a drafter that guesses among all tokens.
    fixed_rope_theta: the rope_theta that it uses whatever a config says; None: the config's.
    heads_from:    whose config gives the number of attention heads.
    max_layers:    decoder layers of a drafter of the EAGLE family.
    dtypes:        of the drafter's weights.
    few_bits:      how it takes weights in few bits that were quantised here; None: not at all.
    architectures: targets whose layers it can tap for EAGLE-3 (TAPPED); () where it does not ask, or nobody has looked.
    """

    title: str
    version: str
    methods: Mapping[str, Served]
    instead: Mapping[str, str] = field(default_factory=dict)
    norm_flags: frozenset[str] = frozenset()
    taps_at: tuple[TapsAt, ...] | None = None
    whole_d2t: bool = True
    fixed_rope_theta: float | None = None
    heads_from: Literal["draft", "target"] = "draft"
    max_layers: int | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    few_bits: FewBits | None = None
    architectures: tuple[str, ...] = ()


UNKNOWN = "unknown"
SAID = {OWN_MTP: "mtp with start: own", GIVEN_MODEL: "a given draft model"}
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
"""What a config says of EAGLE-3's norms, each off where it says nothing; the first two are EAGLE-3.1's, and ours."""
EAGLES = ("eagle1", "hass", "eagle3", "p-eagle")
TAPPED = ("eagle3", "p-eagle")
"""Those that read several layers of the target; the others read its last state, which every model gives."""
DEFAULT_FORMATS: dict[str, tuple[Format, ...]] = {
    "eagle1": ("eagle1",),
    "hass": ("eagle1",),
    "eagle3": ("eagle3",),
    "p-eagle": ("speculators",),
    "medusa": ("medusa",),
    "mtp": ("mtp",),
    OWN_MTP: ("stitched",),
    "draft-model": ("causal-lm",),
}
"""What is written where no engine is named."""
GGUF_BASES: dict[str, Format] = {"eagle3": "eagle3", "draft-model": "causal-lm"}
"""What llama.cpp's converter reads of a method."""
NOT_PACKED: dict[Format, tuple[str, ...] | None] = {
    "eagle1": ("fc",),  # the embedding's norm is multiplied into it
    "causal-lm": ("lm_head",),  # it gets a row for every token
    "medusa": None,
    "stitched": None,
}
"""Layers that a format holds otherwise than they were measured, so not in few bits; None: it holds none in few bits."""


def kind_of(method: str, settings: Mapping[str, Any]) -> str:
    """The name under which profiles know a drafter. settings: the method's own."""
    if method == "mtp" and settings.get("start") == "own":
        return OWN_MTP
    return GIVEN_MODEL if method == "draft-model" and settings.get("model") else method


def profile_of(engine: str) -> Profile:
    """The profile of one of ENGINES."""
    from components.publish.engine_table import PROFILES

    return PROFILES[engine]


def formats_for(method: str, settings: Mapping[str, Any], engines: Sequence[str]) -> tuple[Format, ...]:
    """The formats to write for a drafter: one for each engine, each once; without engines the method's own."""
    kind = kind_of(method, settings)
    if not engines:
        return DEFAULT_FORMATS.get(kind, ())
    taken = [profile_of(engine).methods[kind].formats for engine in engines if kind in profile_of(engine).methods]
    return tuple(dict.fromkeys(formats[0] for formats in taken if formats))


def refusals(
    engine: str,
    method: str,
    settings: Mapping[str, Any],
    target: TargetFacts | None = None,
    storage: Storage | None = None,
) -> Iterator[str]:
    """Why an engine could not serve a drafter, one clause with its remedy each; nothing where it could.

    settings: the method's own, defaults filled in. target: None says only what needs no target. storage: of a drafter
    whose weights were rounded.
    """
    profile, kind = profile_of(engine), kind_of(method, settings)
    served = profile.methods.get(kind)
    if served is None:
        named = SAID.get(kind, kind)
        why = f" ({profile.instead[kind]})" if kind in profile.instead else ""
        able = ", ".join(sorted(SAID.get(one, one) for one in profile.methods))
        yield f"{profile.title} does not serve {named}{why}: leave {engine} out of engines, or take one of {able}"
        return
    for need in served.needs:
        if (value := settings.get(need.setting)) not in need.allowed:
            wanted = " or ".join(_yaml(one) for one in need.allowed)
            yield (
                f"{profile.title} {need.why}, and {need.setting} is {_yaml(value)}: say settings: {{{method}:"
                f" {{{need.setting}: {wanted}}}}}, or leave {engine} out of engines"
            )
    known = target is not None and target.architecture != UNKNOWN
    if target is not None and known and served.architectures and target.architecture not in served.architectures:
        yield (
            f"{profile.title} {profile.version} serves {SAID.get(kind, kind)} for {_some(served.architectures)} only,"
            f" and the target is {target.architecture}: leave {engine} out of engines"
        )
    if target is not None and served.rope_of_target and target.rope_scaling:
        yield (
            f"{profile.title} {profile.version} rotates {SAID.get(kind, kind)} by the target's own RoPE, which is"
            f" scaled ({target.rope_scaling}), and ours are trained with plain positions: leave {engine} out of"
            " engines, or take a target whose RoPE is not scaled"
        )
    if storage is not None and storage.bits is not None:
        yield from _few_bits_refusals(engine, profile, kind, storage)
    if method in EAGLES:
        yield from _eagle_refusals(engine, profile, method, settings)
        if target is not None:
            yield from _target_refusals(engine, profile, method, target)


def _eagle_refusals(engine: str, profile: Profile, method: str, settings: Mapping[str, Any]) -> Iterator[str]:
    ours = NORM_FLAGS[:2]
    dropped = sorted(name for name in NORM_FLAGS if settings.get(name) and name not in profile.norm_flags)
    if dropped and set(dropped) <= set(ours):
        yield (
            f"{profile.title} drops {' and '.join(dropped)} (EAGLE-3.1) without a word: say settings: {{{method}:"
            f" {{{', '.join(f'{name}: false' for name in dropped)}}}}}, or leave {engine} out of engines"
        )
    elif dropped:
        yield f"{profile.title} drops {' and '.join(dropped)} without a word: leave {engine} out of engines"
    layers = settings.get("num_layers", 1)
    if profile.max_layers is not None and layers > profile.max_layers:
        yield (
            f"{profile.title} serves drafters of {profile.max_layers} layer, and num_layers is {layers}: say settings:"
            f" {{{method}: {{num_layers: {profile.max_layers}}}}}, or leave {engine} out of engines"
        )


def remark_on(engine: str, storage: Storage | None) -> str:
    """What is known of weights in few bits in an engine that takes them, one sentence; "" where there is nothing."""
    few = profile_of(engine).few_bits
    return "" if few is None or storage is None else few.remarks.get(storage.weights, "")


def unpackable(method: str, settings: Mapping[str, Any], storage: Storage | None) -> Iterator[str]:
    """Why what is written where no engine is named could not hold weights in few bits, one clause with its remedy."""
    if storage is None or storage.bits is None:
        return
    for format in formats_for(method, settings, ()):
        layers = NOT_PACKED.get(format, ())
        if layers is None:
            yield f"a {format} checkpoint holds no weights in {storage.weights}: leave drafts.quantise_draft out"
        elif missing := sorted(set(layers) - set(storage.keep)):
            yield (
                f"a {format} checkpoint holds {', '.join(missing)} changed, so not in {storage.weights}: say keep:"
                f" [{', '.join(sorted({*storage.keep, *missing}))}] in drafts.quantise_draft"
            )


def _few_bits_refusals(engine: str, profile: Profile, kind: str, storage: Storage) -> Iterator[str]:
    few, asked = profile.few_bits, storage.weights
    remedy = f"leave {engine} out of engines"
    if few is None or kind not in few.methods or asked not in few.groups:
        of = "drafters" if few is None or kind in few.methods else f"{SAID.get(kind, kind)} drafters"
        able = " or ".join([*(few.groups if few is not None and kind in few.methods else ()), "bf16"])
        yield f"{profile.title} takes no {of} quantised here to {asked}: say weights: {able}, or {remedy}"
        return
    sizes = few.groups[asked]
    if storage.group_size not in sizes:
        able = " or ".join(map(str, sizes))
        yield f"{profile.title} takes {asked} with group_size {able}, not {storage.group_size}: say so, or {remedy}"
    missing = sorted(set(few.kept.get(kind, ())) - set(storage.keep))
    other = sorted(set(storage.keep) - {*few.keepable, *(name for names in few.kept.values() for name in names)})
    if missing or other:
        keep = [*storage.keep, *missing] if missing else [name for name in storage.keep if name not in other]
        what = f"takes no quantised {', '.join(missing)}" if missing else f"quantises {', '.join(other)} as well"
        yield f"{profile.title} {what}: say keep: [{', '.join(sorted(set(keep)))}], or {remedy}"


def _target_refusals(engine: str, profile: Profile, method: str, target: TargetFacts) -> Iterator[str]:
    fixed = profile.fixed_rope_theta
    if fixed is not None and target.rope_theta != fixed:
        yield (
            f"{profile.title} rotates every drafter by rope_theta {fixed:g}, and the target's is {target.rope_theta:g},"
            f" by which ours are trained: leave {engine} out of engines, or take a target with {fixed:g}"
        )
    if profile.heads_from == "target" and (target.head_dim <= 0 or target.head_dim % 2):
        yield (
            f"{profile.title} gives a drafter the target's heads, and heads of size {target.head_dim} cannot be rotated"
            f" in pairs: leave {engine} out of engines"
        )
    asked = method in TAPPED and target.architecture != UNKNOWN
    if asked and profile.architectures and target.architecture not in profile.architectures:
        yield (
            f"{profile.title} {profile.version} has no EAGLE taps for {target.architecture}: leave {engine} out of"
            f" engines, or take a target of {_some(profile.architectures)}"
        )


def _some(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)
