"""Engine profiles: which drafters an engine serves, and why not the others; known before anything is trained.

PROFILES holds the facts about each engine, with the version that they hold for. The functions before it turn them into
formats to write and reasons to refuse. `draftsmith check` calls them for every pipeline that names engines, so nothing
here imports torch; the dry run adds the refusals that depend on the target's config.

The facts were read in November 2026: vLLM 0.32.0, llama.cpp of llama-cpp-python 0.3.36 and speculators 0.9.0 in their
own sources, SGLang's models of the same month, TensorRT-LLM 1.3, OpenVINO GenAI 2026.4 and MNN 3.6.1 in their manuals
and exporters, transformers 5.23. "tried" means that the engine ran one of our checkpoints and gave the tokens of our
own loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from components.methods import METHODS
from components.methods import Format as Format
from components.weight_format import Storage

Engine = Literal["vllm", "sglang", "llama.cpp", "mnn", "tensorrt-llm", "transformers", "openvino", "speculators"]
Settings = Mapping[str, Any]
"""The settings of a drafting method as draft.json keeps them, with names and values of the method's own."""
TapsAt = Literal["top", "inner", "inner as inputs"]
ENGINES: tuple[Engine, ...] = get_args(Engine)

OWN_MTP, GIVEN_MODEL = "mtp-own", "draft-model-given"
"""Names for method mtp with `start: own` and draft-model with a given `model`, which need other files, or none."""


@dataclass(frozen=True)
class Need:
    """A setting of the method that must have one of these values for the engine. reason: one clause."""

    setting: str
    allowed: tuple[Any, ...]
    reason: str


@dataclass(frozen=True)
class Served:
    """How an engine serves one method.

    formats:        those it reads, the preferred one first; () where it needs no file.
    tried:          the version that ran one of our checkpoints; "" where only its source or manual was read.
    needs:          values that it requires of the method's settings.
    max_depth:      draft tokens a round that it serves exactly as trained; None: as many as the drafter proposes.
    architectures:  the targets it supports for this method; () for any.
    rope_of_target: it applies the target's RoPE scaling to the drafter, which is trained without scaling.
    whole_vocabulary: it drafts from the target's whole LM head, whatever part of it the drafter was trained on.
    """

    formats: tuple[Format, ...] = ()
    tried: str = ""
    needs: tuple[Need, ...] = ()
    max_depth: int | None = None
    architectures: tuple[str, ...] = ()
    rope_of_target: bool = False
    whole_vocabulary: bool = False


@dataclass(frozen=True)
class FewBits:
    """How an engine loads weights that drafts.quantise_draft packed.

    methods: those whose drafters it loads. groups: weights -> group sizes that it has kernels for, 0 for one scale an
    output channel. unquantised: method -> layers that must stay in bfloat16. may_keep: further layers that may stay so;
    all other linear layers must be quantised. remarks: weights -> result of the trial, or that there was none.
    """

    methods: tuple[str, ...]
    groups: Mapping[str, tuple[int, ...]]
    unquantised: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    may_keep: tuple[str, ...] = ()
    remarks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetFacts:
    """The fields of the target's config that engines' limits depend on. architecture: UNKNOWN where it has none."""

    architecture: str
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rope_scaling: str = ""  # targets/shape.py


@dataclass(frozen=True)
class Profile:
    """One engine.

    title:         its name as people write it.
    version:       the version that the facts were read from.
    methods:       method (or OWN_MTP, GIVEN_MODEL) -> how it is served. Other methods are not served.
    unsupported:   method -> why it is not served, where that needs an explanation.
    norm_flags:    those of EAGLE-3's norms (NORM_FLAGS) that it applies; it ignores or refuses the others.
    taps_at:       where it reads EAGLE-3's tapped layers in a config; the first place that has them counts: top level,
                   eagle_config, or eagle_config with the top level's meaning; else the defaults. None: not known.
    num_taps:      how many layers it taps; None: as many as the config names.
    whole_d2t:     whether it accepts d2t and t2d of a drafter whose vocabulary is whole.
    fixed_rope_theta: the rope_theta that it uses whatever a config says; None: the config's.
    heads_from:    whose config gives the number of attention heads.
    max_layers:    decoder layers that a drafter of the EAGLE family may have.
    dtypes:        those of a drafter's weights that it loads.
    few_bits:      how it loads weights that were quantised here; None: not at all.
    architectures: targets whose layers it can tap for EAGLE-3 (reads_taps); () for any, or where it is not known.
    own_parts:     what only some drafters have (OWN_PARTS) that it reads; it passes over the others.
    """

    title: str
    version: str
    methods: Mapping[str, Served]
    unsupported: Mapping[str, str] = field(default_factory=dict)
    norm_flags: frozenset[str] = frozenset()
    taps_at: tuple[TapsAt, ...] | None = None
    num_taps: int | None = 3
    whole_d2t: bool = True
    fixed_rope_theta: float | None = None
    heads_from: Literal["draft", "target"] = "draft"
    max_layers: int | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    few_bits: FewBits | None = None
    architectures: tuple[str, ...] = ()
    own_parts: frozenset[str] = frozenset()


UNKNOWN = "unknown"
SAID = {OWN_MTP: "mtp with start: own", GIVEN_MODEL: "a given draft model"}
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
"""Config flags of EAGLE-3's norms, off by default. The first two are EAGLE-3.1's."""
OWN_PARTS = {
    "own_embedding": "gives every drafter the target's embedding, and this one has its own",
    "qk_norm": "has no norms of queries and keys in a drafter's block",
    "window": "lets a drafter attend to everything, and this one sees a window",
}
"""Setting of a drafter -> why an engine does not serve it that does not read it, one clause."""
NOT_PACKED: dict[Format, tuple[str, ...] | None] = {
    "eagle1": ("fc",),  # the embedding's norm is multiplied into it
    "causal-lm": ("lm_head",),  # it gets a row for every token
    "dflash": None,
    "z-lab": None,
    "medusa": None,
    "stitched": None,
}
"""Format -> layers that it stores changed, so not quantised as measured; None: it stores no quantised layer."""


CUT_VOCABULARY = "cut_vocabulary"
"""Not a setting of a method, but told with them to `refusals`: whether the drafter guesses a part of the vocabulary."""


def kind_of(method: str, settings: Settings) -> str:
    """The key of `Profile.methods` for a drafter. settings: the method's own."""
    if method == "mtp" and settings.get("start") == "own":
        return OWN_MTP
    return GIVEN_MODEL if method == "draft-model" and settings.get("model") else method


def profile_of(engine: str) -> Profile:
    """The profile of one of ENGINES."""
    return PROFILES[engine]


def formats_for(method: str, settings: Settings, engines: Sequence[str]) -> tuple[Format, ...]:
    """The formats to write for a drafter: the preferred one of each engine; without engines the method's own."""
    kind = kind_of(method, settings)
    if not engines:
        if kind == OWN_MTP:
            return ("stitched",)
        return METHODS[kind].default_formats if kind in METHODS else ()
    by_engine = [profile_of(engine).methods[kind].formats for engine in engines if kind in profile_of(engine).methods]
    return tuple(dict.fromkeys(formats[0] for formats in by_engine if formats))


def refusals(
    engine: str,
    method: str,
    settings: Settings,
    target: TargetFacts | None = None,
    storage: Storage | None = None,
    taps: Sequence[int] = (),
) -> Iterator[str]:
    """The reasons why an engine could not serve a drafter, each one clause with its remedy.

    settings: the method's own, with defaults. target: None skips the checks that need one. storage: how the drafter's
    weights were rounded, None as trained. taps: the layers that it reads, where they are not the target's usual ones.
    """
    profile, kind = profile_of(engine), kind_of(method, settings)
    served = profile.methods.get(kind)
    if served is None:
        named = SAID.get(kind, kind)
        reason = f" ({profile.unsupported[kind]})" if kind in profile.unsupported else ""
        able = ", ".join(sorted(SAID.get(one, one) for one in profile.methods))
        yield f"{profile.title} does not serve {named}{reason}: leave {engine} out of engines, or take one of {able}"
        return
    for need in served.needs:
        if (value := settings.get(need.setting)) not in need.allowed:
            allowed = " or ".join(_yaml_value(one) for one in need.allowed)
            yield (
                f"{profile.title} {need.reason}, and {need.setting} is {_yaml_value(value)}: say settings: {{{method}:"
                f" {{{need.setting}: {allowed}}}}}, or leave {engine} out of engines"
            )
    named_architecture = target is not None and target.architecture != UNKNOWN
    if (
        target is not None
        and named_architecture
        and served.architectures
        and target.architecture not in served.architectures
    ):
        yield (
            f"{profile.title} {profile.version} serves {SAID.get(kind, kind)} for"
            f" {_first_names(served.architectures)} only,"
            f" and the target is {target.architecture}: leave {engine} out of engines"
        )
    if target is not None and served.rope_of_target and target.rope_scaling:
        yield (
            f"{profile.title} {profile.version} rotates {SAID.get(kind, kind)} by the target's own RoPE, which is"
            f" scaled ({target.rope_scaling}), and ours are trained with plain positions: leave {engine} out of"
            " engines, or take a target whose RoPE is not scaled"
        )
    if served.whole_vocabulary and settings.get(CUT_VOCABULARY):
        yield (
            f"{profile.title} drafts from the target's whole LM head, and this drafter from a part of the vocabulary:"
            f" say draft_vocab_size: (the target's) in drafts.train_draft, or leave {engine} out of engines"
        )
    if storage is not None and storage.bits is not None:
        yield from _few_bits_refusals(engine, profile, kind, storage)
    reads_taps = method in METHODS and METHODS[method].reads_taps
    tappable = profile.architectures
    if target is not None and reads_taps and named_architecture and tappable and target.architecture not in tappable:
        yield (
            f"{profile.title} {profile.version} has no EAGLE taps for {target.architecture}: leave {engine} out of"
            f" engines, or take a target of {_first_names(tappable)}"
        )
    if method in METHODS and METHODS[method].llama_block == "eagle":
        yield from _eagle_refusals(engine, profile, method, settings)
        if taps and METHODS[method].reads_taps:
            yield from _tap_refusals(engine, profile, taps)
        if target is not None:
            yield from _target_refusals(engine, profile, settings, target)


def _eagle_refusals(engine: str, profile: Profile, method: str, settings: Settings) -> Iterator[str]:
    trained_norms = NORM_FLAGS[:2]
    dropped = sorted(name for name in NORM_FLAGS if settings.get(name) and name not in profile.norm_flags)
    if dropped and set(dropped) <= set(trained_norms):
        yield (
            f"{profile.title} drops {' and '.join(dropped)} (EAGLE-3.1) without a word: say settings: {{{method}:"
            f" {{{', '.join(f'{name}: false' for name in dropped)}}}}}, or leave {engine} out of engines"
        )
    elif dropped:
        yield f"{profile.title} drops {' and '.join(dropped)} without a word: leave {engine} out of engines"
    for name, reason in OWN_PARTS.items():
        if settings.get(name) and name not in profile.own_parts:
            yield f"{profile.title} {reason}: leave {engine} out of engines"
    layers = settings.get("num_layers", 1)
    if profile.max_layers is not None and layers > profile.max_layers:
        yield (
            f"{profile.title} serves drafters of {profile.max_layers} layer, and num_layers is {layers}: say settings:"
            f" {{{method}: {{num_layers: {profile.max_layers}}}}}, or leave {engine} out of engines"
        )


def _tap_refusals(engine: str, profile: Profile, taps: Sequence[int]) -> Iterator[str]:
    remedy = f"record its features without tap_layers, or leave {engine} out of engines"
    if profile.num_taps not in (None, len(taps)):
        yield f"{profile.title} taps {profile.num_taps} layers, and tap_layers names {list(taps)}: {remedy}"
    elif not profile.taps_at:
        known = "is not known to read" if profile.taps_at is None else "does not read"
        yield f"{profile.title} {known} which layers a drafter taps, and tap_layers names {list(taps)}: {remedy}"


def remark_on(engine: str, storage: Storage | None) -> str:
    """The result of trying quantised weights in an engine, one sentence; "" where there is none."""
    few = profile_of(engine).few_bits
    return "" if few is None or storage is None else few.remarks.get(storage.weights, "")


def packing_refusals(method: str, settings: Settings, storage: Storage | None) -> Iterator[str]:
    """Why the method's own formats cannot hold quantised weights, each reason one clause with its remedy."""
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
    few, weights = profile.few_bits, storage.weights
    remedy = f"leave {engine} out of engines"
    if few is None or kind not in few.methods or weights not in few.groups:
        of = "drafters" if few is None or kind in few.methods else f"{SAID.get(kind, kind)} drafters"
        able = " or ".join([*(few.groups if few is not None and kind in few.methods else ()), "bf16"])
        yield f"{profile.title} takes no {of} quantised here to {weights}: say weights: {able}, or {remedy}"
        return
    sizes = few.groups[weights]
    if storage.group_size not in sizes:
        able = " or ".join(map(str, sizes))
        yield f"{profile.title} takes {weights} with group_size {able}, not {storage.group_size}: say so, or {remedy}"
    missing = sorted(set(few.unquantised.get(kind, ())) - set(storage.keep))
    other = sorted(set(storage.keep) - {*few.may_keep, *(name for names in few.unquantised.values() for name in names)})
    if missing or other:
        keep = [*storage.keep, *missing] if missing else [name for name in storage.keep if name not in other]
        what = f"takes no quantised {', '.join(missing)}" if missing else f"quantises {', '.join(other)} as well"
        yield f"{profile.title} {what}: say keep: [{', '.join(sorted(set(keep)))}], or {remedy}"


def _target_refusals(engine: str, profile: Profile, settings: Settings, target: TargetFacts) -> Iterator[str]:
    fixed = profile.fixed_rope_theta
    own = [name for name in ("rope_theta", "rope_scaling") if settings.get(name)] if fixed is not None else []
    if profile.heads_from == "target":
        own += [name for name in ("num_attention_heads", "num_key_value_heads", "head_dim") if settings.get(name)]
    if own:
        yield (
            f"{profile.title} does not read a drafter's own {own[0]}, and this one has it from where it was trained:"
            f" leave {engine} out of engines"
        )
    elif fixed is not None and target.rope_theta != fixed:
        yield (
            f"{profile.title} rotates every drafter by rope_theta {fixed:g}, and the target's is {target.rope_theta:g},"
            f" by which ours are trained: leave {engine} out of engines, or take a target with {fixed:g}"
        )
    if profile.heads_from == "target" and (target.head_dim <= 0 or target.head_dim % 2):
        yield (
            f"{profile.title} gives a drafter the target's heads, and heads of size {target.head_dim} cannot be rotated"
            f" in pairs: leave {engine} out of engines"
        )


def _first_names(names: Sequence[str]) -> str:
    return ", ".join([*names[:4], *(["..."] if len(names) > 4 else [])])


def _yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


NO_TREE_OF_OURS = "its heads are transformer layers on the target's last state, which no engine has a reader for"
NO_SUFFIX_DECODING = "it has no suffix decoding; prompt lookup, our ngram, is the nearest"
IN_OUR_LOOP = "no public engine takes its n-grams from a Jacobi window in the verifying pass"
OWN_MODULE_ONLY = "it reads modules of the target's own architecture: say settings: {mtp: {start: own}}"
NEEDS_NO_FILE = Served()
COMMON_METHODS = {"draft-model": Served(("causal-lm",)), GIVEN_MODEL: NEEDS_NO_FILE, "ngram": NEEDS_NO_FILE}
"""Most engines serve an ordinary draft model, their own or ours, and prompt lookup."""
NO_BLOCKS = dict.fromkeys(("dflash", "dspark"), "it has no block drafters")
NOWHERE = {"mtp-parallel": NO_TREE_OF_OURS, "lookahead": IN_OUR_LOOP}
MASK_FIRST = Need("sample_from_anchor", (False,), "drafts DFlash's first token from the mask after the newest one")
ANCHOR_FIRST = Need("sample_from_anchor", (True,), "drafts DSpark's first token from the newest one's own row")
NO_SCALING = Need("rope_scaling", (None,), "rotates by rope_theta alone")
NO_WINDOW = Need("window", (0,), "was not looked at for windows of block drafters")
TARGETS_EMBEDDING = Need("own_embedding", (False,), "gives every block drafter the target's embedding")
MARLIN = (0, 32, 64, 128)
"""Group sizes of the kernels for NVIDIA GPUs that vLLM and SGLang share."""

VLLM_TAPPABLE = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM",
    "MistralForCausalLM", "GptOssForCausalLM", "GraniteForCausalLM", "MiniMaxM2ForCausalLM", "MiniCPMForCausalLM",
    "ApertusForCausalLM", "Phi3ForCausalLM", "LLaMAForCausalLM", "InternLM3ForCausalLM", "Ministral3ForCausalLM",
    "Ernie4_5ForCausalLM", "Gemma4ForCausalLM", "NemotronHForCausalLM", "MiniCPM3ForCausalLM", "Step1ForCausalLM",
    "GraniteSWAForCausalLM", "Plamo3ForCausalLM", "AfmoeForCausalLM", "DeepseekForCausalLM", "Llama4ForCausalLM",
)  # fmt: skip
"""Not MiMoForCausalLM: it says that it can be tapped, and its own forward pass collects nothing."""

VLLM = Profile(
    title="vLLM",
    version="0.32.0",
    methods={
        "eagle3": Served(("eagle3", "speculators"), tried="0.32.0"),
        "p-eagle": Served(("speculators",), tried="0.32.0"),
        "eagle1": Served(
            ("eagle1",),
            needs=(Need("fc_bias", (False,), "has no bias in fc and passes over ours without a word"),),
            tried="0.32.0",
        ),
        "hass": Served(
            ("eagle1",), needs=(Need("fc_bias", (False,), "has no bias in fc and passes over ours without a word"),)
        ),
        "medusa": Served(("medusa",), tried="0.32.0"),
        "mtp": Served(
            ("mimo",),
            needs=(
                Need("mtp_modules", (1,), "serves one new module, in the shape of MiMo's"),
                Need("first_hidden", ("post_norm",), "feeds modules the state after the final norm"),
                Need("intermediate_size", (0,), "reads every size of the module in the target's config"),
            ),
            tried="0.32.0",
            max_depth=1,
            # mimo_mtp.py builds a Qwen2DecoderLayer of the target's config; qwen2.py hands its rope_parameters on.
            rope_of_target=True,
        ),
        "dflash": Served(("dflash", "z-lab"), needs=(MASK_FIRST, NO_WINDOW), tried="0.32.0"),
        "dspark": Served(("dflash", "z-lab"), needs=(NO_WINDOW,)),  # on GPUs: its CPU build has none
        OWN_MTP: Served(("stitched",), tried="0.32.0"),
        "draft-model": Served(("causal-lm",), tried="0.32.0"),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": Served(tried="0.32.0"),
        "suffix": NEEDS_NO_FILE,  # with the package arctic-inference beside it
    },
    unsupported=NOWHERE,
    norm_flags=frozenset(NORM_FLAGS),
    taps_at=("top", "inner as inputs"),
    num_taps=None,
    whole_d2t=False,
    few_bits=FewBits(
        ("eagle3", "draft-model"),
        {"int8": MARLIN, "int4": MARLIN},
        unquantised={
            "draft-model": ("lm_head",)
        },  # its format has a row for every token, which are others than were measured
        may_keep=("fc", "lm_head"),
        remarks={
            "int4": "vLLM takes int4 by its source on GPUs; on a CPU in --dtype bfloat16 or float16, not in float32",
            "int8": "vLLM takes int8 by its source on GPUs; its CPU build refused ours, with kernels for 4 bits alone",
        },
    ),
    architectures=VLLM_TAPPABLE,
    # llm_base_proposer.py shares the target's embedding where the copy is equal; llama.py gives a layer its window.
    own_parts=frozenset({"own_embedding", "window"}),
)

SGLANG = Profile(
    title="SGLang",
    version="read November 2026",
    methods={
        "eagle3": Served(("eagle3",)),
        "eagle1": Served(("eagle1",)),
        "hass": Served(("eagle1",)),
        "dflash": Served(("z-lab",), needs=(MASK_FIRST, NO_WINDOW, TARGETS_EMBEDDING), whole_vocabulary=True),
        "dspark": Served(("z-lab",), needs=(ANCHOR_FIRST, NO_WINDOW, TARGETS_EMBEDDING), whole_vocabulary=True),
        OWN_MTP: Served(("stitched",)),
        **COMMON_METHODS,
    },
    unsupported={
        **NOWHERE,
        "suffix": "its NGRAM search has a trie and settings of its own; it is the nearest",
        "p-eagle": "its further layers have other names, and it drafts a token at a time",
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
    },
    taps_at=("inner",),
    max_layers=1,
    few_bits=FewBits(
        ("eagle3", "draft-model"),
        {"int8": MARLIN, "int4": MARLIN},
        unquantised={"eagle3": ("fc", "lm_head"), "draft-model": ("lm_head",)},
        remarks=dict.fromkeys(("int8", "int4"), "SGLang takes compressed-tensors by its source; it was not run"),
    ),
)

LLAMA_CPP_TAPPABLE = (
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "Gemma4ForCausalLM",
    "MiniMaxM2ForCausalLM", "NemotronHForCausalLM",
)  # fmt: skip
"""Its graphs that keep each layer's input (t_layer_inp); those of Qwen2, Granite and Phi-3 do not."""

LLAMA_CPP = Profile(
    title="llama.cpp",
    version="of llama-cpp-python 0.3.36",
    methods={
        "eagle3": Served(("gguf",), tried="0.3.36"),
        "dflash": Served(("gguf",), needs=(MASK_FIRST, NO_WINDOW), tried="0.3.36"),
        "dspark": Served(("gguf",), needs=(NO_WINDOW,), tried="0.3.36"),
        OWN_MTP: Served(("stitched",)),
        "draft-model": Served(("gguf",)),
        GIVEN_MODEL: NEEDS_NO_FILE,
        "ngram": NEEDS_NO_FILE,
    },
    unsupported={
        **NOWHERE,
        "suffix": NO_SUFFIX_DECODING,
        "p-eagle": "its converter takes EAGLE drafters of one layer and three taps",
        **dict.fromkeys(("eagle1", "hass"), "it reads EAGLE-3 only"),
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "lookahead": "its example program has one of its own; the server has none",
    },
    norm_flags=frozenset({"norm_before_fc", "norm_before_residual"}),
    taps_at=("top",),
    max_layers=1,
    # Its converter makes Q8_0 of every matrix; 4-bit files come of llama-quantize, which no release calls.
    few_bits=FewBits(
        ("eagle3",),
        {"int8": (32,)},
        remarks={"int8": "llama.cpp holds int8 as Q8_0, bit for bit; it rounds activations too: some rounds differ"},
    ),
    architectures=LLAMA_CPP_TAPPABLE,
    own_parts=frozenset({"own_embedding"}),  # its graph prefers the drafter's tok_embd
)

MNN = Profile(
    title="MNN",
    version="3.6.1",
    methods={
        "eagle3": Served(("eagle3",)),
        "dflash": Served(
            ("z-lab",), needs=(MASK_FIRST, NO_WINDOW, TARGETS_EMBEDDING, NO_SCALING), whole_vocabulary=True
        ),
        **COMMON_METHODS,
    },
    unsupported={
        **NOWHERE,
        "suffix": NO_SUFFIX_DECODING,
        "p-eagle": "its exporter takes EAGLE drafters of one layer",
        **dict.fromkeys(("eagle1", "hass"), "it reads EAGLE-3 only"),
        "dspark": "it has no DSpark",
        "medusa": "it has no Medusa",
        **dict.fromkeys(("mtp", OWN_MTP), "it reads MiMo's own modules only"),
        "lookahead": "what it calls lookahead is prompt lookup, our ngram",
    },
    taps_at=(),
    fixed_rope_theta=10000.0,  # and no scaling
    heads_from="target",
    max_layers=1,
)

TENSORRT_LLM = Profile(
    title="TensorRT-LLM",
    version="1.3, PyTorch backend",
    methods={
        "eagle3": Served(("eagle3",)),
        "dflash": Served(("z-lab",), needs=(MASK_FIRST, NO_WINDOW, TARGETS_EMBEDDING), whole_vocabulary=True),
        OWN_MTP: Served(("stitched",)),
        **COMMON_METHODS,
    },
    unsupported={
        **NOWHERE,
        "suffix": NO_SUFFIX_DECODING,
        **dict.fromkeys(("eagle1", "hass"), "its PyTorch backend has EAGLE-3 only"),
        **dict.fromkeys(("medusa", "lookahead"), "its PyTorch backend has none, engines built ahead only"),
        "mtp": OWN_MODULE_ONLY,
        "dspark": "which checkpoints its DSpark reads was not looked at",
    },
    max_layers=1,
)

TRANSFORMERS = Profile(
    title="transformers",
    version="5.23",
    methods={
        OWN_MTP: Served(
            ("stitched",), tried="5.23.0", max_depth=1, architectures=("Glm4MoeForCausalLM", "DeepseekV3ForCausalLM")
        ),
        **COMMON_METHODS,
    },
    unsupported={
        **NOWHERE,
        **NO_BLOCKS,
        "suffix": NO_SUFFIX_DECODING,
        **dict.fromkeys(("eagle3", "eagle1", "hass", "p-eagle"), "its generate has no EAGLE"),
        "medusa": "its generate has no Medusa",
        "mtp": OWN_MODULE_ONLY,
    },
)

OPENVINO = Profile(
    title="OpenVINO GenAI",
    version="2026.4.1",
    methods={
        "eagle3": Served(("eagle3",)),
        **COMMON_METHODS,
    },
    unsupported={
        **NOWHERE,
        **NO_BLOCKS,
        "suffix": NO_SUFFIX_DECODING,
        **dict.fromkeys(("eagle1", "hass"), "it reads EAGLE-3 only"),
        "p-eagle": "it drafts a token at a time",
        "medusa": "it has no Medusa",
        **dict.fromkeys(("mtp", OWN_MTP), "it reads no MTP modules"),
    },
    max_layers=1,
)

SPECULATORS = Profile(
    title="speculators",
    version="0.9.0",
    methods={
        # Its converter also takes midlayer.*, and leaves the embedding random where the file brings none.
        "eagle3": Served(("speculators",), tried="0.9.0"),
        "p-eagle": Served(("speculators",)),
        "dflash": Served(("dflash",)),
        "dspark": Served(("dflash",)),
    },
    unsupported={
        **NOWHERE,
        "suffix": NO_SUFFIX_DECODING,
        **dict.fromkeys(("eagle1", "hass"), "it reads EAGLE-3, P-EAGLE and block drafters"),
        "medusa": "it has no Medusa",
        "mtp": OWN_MODULE_ONLY,
        "draft-model": "any engine serves a draft model as it is",
    },
    norm_flags=frozenset(NORM_FLAGS),
    taps_at=("top",),
    num_taps=None,
    own_parts=frozenset(OWN_PARTS),
)

PROFILES: dict[str, Profile] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "mnn": MNN,
    "tensorrt-llm": TENSORRT_LLM,
    "transformers": TRANSFORMERS,
    "openvino": OPENVINO,
    "speculators": SPECULATORS,
}
