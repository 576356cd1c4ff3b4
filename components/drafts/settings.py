"""The settings of each drafting method, without importing any of them.

`train_draft` takes `settings: {eagle3: {ttt_steps: 5}, medusa: {num_heads: 4}}`: so a matrix over methods is
one step. Only the entry of the trained method reaches the step's key and the network; every entry is checked, and an
unknown setting is refused when pipelines.yaml is checked. One class a method; METHODS names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from components.contract import UserError
from components.methods import AUTO, METHODS, load_object
from components.text import did_you_mean
from components.weight_format import DEFAULT_GROUP

Place = tuple[str | int, ...]
MOST_DEPTH = 16  # draft tokens of one round
Depth = Annotated[int, Field(ge=1, le=MOST_DEPTH)]
LossName = Literal["soft_ce", "kl", "reverse_kl", "js", "tv", "lk", "lk_alpha", "top_k", "hard_ce"]


class Settings(BaseModel):
    """The settings of one method. Unknown names are faults, and so is a number in quotes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @property
    def trained(self) -> bool:
        """Whether the method is trained with these settings; if not, no features are read."""
        return True

    @property
    def starts_trained(self) -> bool:
        """Whether the drafter begins with weights that somebody has trained already."""
        return False


class Trained(Settings):
    """A method that trains weights."""

    init_seed: int | None = None
    """Seed of the new weights; null: the seed of the run."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Drafting step k weighs step_decay^k in the loss, divided by the sum of the weights."""
    normaliser: Literal["token", "sequence", "position"] = "token"
    """What a step's loss is averaged over: its trained tokens, its sequences, or all positions of the batch."""


class WithBlock(Trained):
    """A method that trains decoder blocks."""

    intermediate_size: Annotated[int, Field(ge=0)] = 0
    """Width of the blocks' MLP; 0: the target's."""


class Distilled(Trained):
    """A method whose draft tokens are compared with the target's own distribution."""

    loss: LossName = "soft_ce"
    """The distance between both, row by row; losses.py has the equations."""


class DistilledBlock(Distilled, WithBlock):
    """Both."""


class EagleBlock(DistilledBlock):
    """A method whose engines build its block from the drafter's own config; what is 0 or {} here is the target's."""

    num_attention_heads: Annotated[int, Field(ge=0)] = 0
    """Attention heads of the block; 0: the target's."""
    num_key_value_heads: Annotated[int, Field(ge=0)] = 0
    """Key/value heads of the block; 0: the target's."""
    head_dim: Annotated[int, Field(ge=0, multiple_of=2)] = 0
    """Width of a head; 0: the target's."""
    rms_norm_eps: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Epsilon of its norms; 0: the target's."""
    rope_theta: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Base of its rotary positions; 0: the target's."""
    rope_scaling: dict[str, bool | int | float | str] = {}
    """Scaling of its rotary positions, as Hugging Face's configs have it: of rope_type linear, llama3 or yarn."""
    qk_norm: bool = False
    """Every head's query and key have an RMSNorm before they are rotated, as in Qwen3's blocks."""
    own_embedding: bool = False
    """It reads a token embedding of its own, which training leaves as it is, instead of the target's."""

    @model_validator(mode="after")
    def _block_can_be_built(self) -> Self:
        if self.num_attention_heads and self.num_attention_heads % (self.num_key_value_heads or 1):
            raise ValueError(
                f"{self.num_attention_heads} attention heads do not share {self.num_key_value_heads} key/value heads"
            )
        if fault := rope_scaling_fault(self.rope_scaling):
            raise ValueError(fault)
        return self

    @property
    def own_block(self) -> dict[str, Any]:
        """The fields of its block that are not the target's."""
        sizes = {name: getattr(self, name) for name in OWN_SIZES if getattr(self, name)}
        scaling = {"rope_scaling": tuple(sorted(self.rope_scaling.items()))} if self.rope_scaling else {}
        return sizes | scaling | ({"qk_norm": True} if self.qk_norm else {})


EXTRA_DEPTH = 4
"""A chain of the EAGLE family may exceed the trained depth by this."""


class WindowedBlock(EagleBlock):
    """A method whose blocks may attend to the last positions only."""

    window: Annotated[int, Field(ge=0)] = 0
    """Positions that the drafter's own attention sees, trained and decoded alike; 0: all. A draft token's own and those
    before it, in a block drafter the last committed ones beside the block. The target's hidden states that it reads
    have seen everything in any case."""

    @property
    def own_block(self) -> dict[str, Any]:
        return super().own_block | ({"window": self.window} if self.window else {})

    def _check_room(self, depth: int) -> None:
        """Raise ValueError where a window does not hold the longest chain after a trained depth."""
        if 0 < self.window < depth + EXTRA_DEPTH:
            raise ValueError(f"window {self.window} has no room for chains of {depth + EXTRA_DEPTH} tokens")


OWN_SIZES = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
"""Settings of EagleBlock that replace a field of the same name of the target's shape."""
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Kinds of rotary scaling that drafters here can have, and the numbers that each needs."""
YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
"""Numbers that a yarn scaling may have; it may also say `truncate`."""


def read_window(config: Mapping[str, Any]) -> tuple[int, str]:
    """The window that a block's config asks for, positions, 0 for none; and why a drafter cannot have it, one clause.

    As Hugging Face's configs and engines say it: every entry of layer_types is sliding_attention, and sliding_window
    counts the position itself. Qwen3's configs have a switch beside it.
    """
    kinds, size = config.get("layer_types") or [], config.get("sliding_window")
    if not isinstance(kinds, list):
        return 0, f"layer_types is {kinds!r:.40}, no list"
    windowed, on = bool(kinds) and set(map(str, kinds)) == {"sliding_attention"}, bool(config.get("use_sliding_window"))
    if not windowed:
        mixed = on or any(kind != "full_attention" for kind in kinds)
        return 0, "layer_types or use_sliding_window asks for a window, but not for one in all layers" if mixed else ""
    if config.get("model_type") == "qwen3" and not on:
        return 0, "layer_types asks for a window that use_sliding_window turns off"
    if type(size) is not int or size < 1:
        return 0, f"sliding_window is {size!r:.40}, must be a number of positions"
    return size, ""


def causal_block_fault(config: Mapping[str, Any]) -> str:
    """Why the window in a block drafter's own config is another network's than here, in one clause; "" if it is not.

    With sliding_window_non_causal every slot of a block sees its whole block; without, as speculators has it by
    default, only the slots up to its own.
    """
    if config.get("sliding_window_non_causal"):
        return ""
    return "layer_types asks for a window without sliding_window_non_causal: its blocks are masked, those here are not"


def rope_scaling_fault(scaling: Mapping[str, Any]) -> str:
    """What is wrong with a rotary scaling, in one clause; "" where a drafter here can have it, or there is none."""
    if not scaling:
        return ""
    kind = str(scaling.get("rope_type"))
    if kind not in ROPE_NUMBERS:
        return f"rope_scaling is of rope_type {kind:.40}; drafters here have {' or '.join(ROPE_NUMBERS)}"
    optional = [name for name in YARN_NUMBERS if kind == "yarn" and scaling.get(name) is not None]
    for name in (*ROPE_NUMBERS[kind], *optional):
        value = scaling.get(name)
        least = 0 if name in ("mscale", "mscale_all_dim") else 1e-9
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value < float("inf"):
            return f"rope_scaling: {name} is {value!r:.40}, must be a positive number"
    known = {"rope_type", *ROPE_NUMBERS[kind], *((*YARN_NUMBERS, "truncate") if kind == "yarn" else ())}
    if unknown := sorted(scaling.keys() - known):
        return f"rope_scaling: {unknown[0]!r:.40} means nothing for {kind}"
    if not isinstance(scaling.get("truncate", True), bool):
        return f"rope_scaling: truncate is {scaling['truncate']!r:.40}, must be true or false"
    if kind == "llama3" and scaling["low_freq_factor"] == scaling["high_freq_factor"]:
        return "rope_scaling: low_freq_factor and high_freq_factor are equal"
    return ""


class Untrained(Settings):
    """A method without training."""

    @property
    def trained(self) -> bool:
        return False


class NgramSettings(Untrained):
    """Prompt lookup."""

    max_ngram: Annotated[int, Field(ge=1, le=16)] = 3
    """The longest suffix that is looked up, tokens."""
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 1
    """The shortest suffix that is trusted, tokens."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram {self.min_ngram} is larger than max_ngram {self.max_ngram}")
        return self


class SuffixSettings(Untrained):
    """Suffix decoding."""

    max_draft_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """The most tokens of one draft."""
    max_tree_depth: Annotated[int, Field(ge=2, le=256)] = 64
    """The longest string that is counted, tokens: a match and its draft together."""
    max_spec_factor: Annotated[float, Field(gt=0, le=16)] = 4.0
    """Draft tokens per matched token, at most."""
    min_token_prob: Annotated[float, Field(ge=0, le=1)] = 0.1
    """A draft ends where the estimated probability that all of it is right falls below this."""
    min_score: Annotated[float, Field(ge=0, le=64)] = 1.0
    """Nothing is drafted where fewer right tokens than this are expected: a pass over several rows costs more."""
    cached_tokens: Annotated[int, Field(ge=0, le=4_000_000)] = 0
    """Tokens of earlier answers (those of the features) that are searched beside the request's own text; 0: none."""

    @model_validator(mode="after")
    def _room_for_a_match(self) -> Self:
        if self.max_draft_tokens >= self.max_tree_depth:
            raise ValueError(
                f"max_tree_depth {self.max_tree_depth} leaves no room for a match beside max_draft_tokens"
                f" {self.max_draft_tokens}"
            )
        return self


class SuffixBeside(Settings):
    """Suffix decoding beside a trained drafter: the entry "with_suffix" of its draft.json."""

    settings: SuffixSettings
    """Those of the copies."""
    depth: Depth
    """The most tokens of the trained drafter's own chains."""
    drafter: str
    """The key of the drafter as it is without copies."""


class DraftModelSettings(DistilledBlock):
    """A small language model, trained here or given."""

    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Decoder layers."""
    hidden_size: Annotated[int, Field(ge=0)] = 0
    """Width of its residual stream, a multiple of the target's head size; 0: the target's width, and then its embedding
    and LM head start as the target's."""
    chain_depth: Depth = 5
    """Draft tokens of a chain in held-out evaluation; decoding may go deeper."""
    model: str = ""
    """A pretrained draft model: a folder in Hugging Face format or a hub id, with the target's own tokenizer. It
    is used as it is; of the settings above only chain_depth means anything."""
    model_files: dict[str, str] = {}
    """sha256 of the given model's files; filled in when it is written down, compared when it is opened."""
    first_token: int | None = None
    """The token that a given model expects before all others; filled in."""

    @property
    def trained(self) -> bool:
        return not self.model


class LookaheadSettings(Untrained):
    """Lookahead decoding."""

    window: Annotated[int, Field(ge=1, le=64)] = 5
    """W: columns of the Jacobi window."""
    ngram_size: Annotated[int, Field(ge=2, le=16)] = 4
    """N: tokens of an n-gram, the first of which is known; N-1 can be drafted."""
    max_guesses: Annotated[int, Field(ge=1, le=64)] = 5
    """G: n-grams verified in a pass, and kept for one first token."""
    pool_from_text: bool = False
    """Also pool the n-grams of prompt and output."""

    def positions_ahead(self, depth: int) -> int:
        """Positions that a run at this depth needs past its answer: for its draft tokens, or its window."""
        return max(depth + 1, self.window + self.ngram_size)


class Eagle3Settings(WindowedBlock):
    """EAGLE-3."""

    ttt_steps: Depth = 7
    """Drafting steps unrolled in training (training-time test)."""
    fc_norm: bool = False
    """EAGLE-3.1: each auxiliary hidden state has an RMSNorm of its own before fc."""
    norm_output: bool = False
    """EAGLE-3.1: the next step is given the block's output after the last norm."""
    norm_before_fc: bool = False
    """The auxiliary hidden states together have one RMSNorm before fc; not with fc_norm."""
    norm_before_residual: bool = False
    """The block's residual is the hidden state after its norm, as in many drafters of the speculators library."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc are both on; a drafter has one of them")
        self._check_room(self.ttt_steps)
        return self


class Eagle1Settings(EagleBlock):
    """EAGLE-1."""

    chain_depth: Depth = 7
    """Draft tokens of a chain in held-out evaluation; decoding may go deeper."""
    fc_bias: bool = True
    """Whether the layer that joins token and feature has a bias, as in the paper; vLLM serves drafters without one."""
    feature_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the SmoothL1 distance between the predicted and the true feature."""
    token_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of `loss`, which compares token distributions."""
    feature_noise: Annotated[float, Field(ge=0)] = 0.1
    """While training, features are moved by up to so much either way."""


class HassSettings(Eagle1Settings):
    """HASS: EAGLE-1 in the context it will meet."""

    step_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Pass j weighs step_decay^j in the loss, divided by the sum of the weights."""
    passes: Annotated[int, Field(ge=1, le=8)] = 3
    """Passes trained; the later ones on the drafter's own features."""
    top_k: Annotated[int, Field(ge=1)] = 10
    """Tokens that the top-K loss looks at, the target's most likely."""
    top_k_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the top-K loss; 0 leaves it out."""


class MedusaSettings(Distilled):
    """Medusa."""

    num_heads: Annotated[int, Field(ge=1, le=8)] = 5
    """Number of heads, and of draft tokens."""
    num_layers: Annotated[int, Field(ge=1, le=4)] = 1
    """Residual layers of a head."""
    head: Literal["own", "tied"] = "own"
    """own: every head has an LM head, which starts as the target's; tied: all use the target's, frozen."""


class MtpParallelSettings(DistilledBlock):
    """Parallel multi-token prediction."""

    num_heads: Annotated[int, Field(ge=1, le=8)] = 3
    """Number of heads beside the target's own, and of draft tokens."""


class PEagleSettings(WindowedBlock):
    """P-EAGLE: all draft tokens from one forward."""

    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Depth d weighs step_decay^d in the loss, divided by the sum of the weights; 0.7: all rows weigh alike."""
    parallel_depth: Depth = 7
    """Number of tokens that one forward drafts."""
    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Decoder layers; the paper has 4, which hit a little more often for twice the time."""
    kept_share: Annotated[float, Field(gt=0, le=1)] = 0.7
    """Depth d is trained at a share kept_share^d of the columns; 1: at all."""
    least_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    """The smallest such share."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        self._check_room(self.parallel_depth)
        return self


class DFlashSettings(WindowedBlock):
    """DFlash: a block of draft tokens denoised in one forward."""

    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.7788
    """Draft token k weighs step_decay^k in the loss, divided by the sum of the weights; exp(-1 / gamma) with the
    field's gamma of 4."""
    block_size: Annotated[int, Field(ge=2, le=17)] = 8
    """Rows of a block: the newest token and the masks after it. It is denoised at this width only."""
    sample_from_anchor: bool = False
    """Whether the newest token's own row drafts too, as in DeepSpec: block_size draft tokens instead of one less."""
    num_layers: Annotated[int, Field(ge=1, le=16)] = 2
    """Decoder layers; the paper has 5."""
    qk_norm: bool = True
    """Every head's query and key have an RMSNorm before they are rotated, as in Qwen3's blocks."""
    max_anchors: Annotated[int, Field(ge=1)] = 64
    """Positions of a row of the batch that a block is trained from, at most, drawn at random in every step."""
    mask_token_id: Annotated[int, Field(ge=0)] | None = None
    """The token whose embedding stands for a mask; null: the last of the vocabulary, which texts hardly have."""
    slot_weights: Literal["decay", "dpace"] = "decay"
    """How draft tokens weigh in the loss. decay: by step_decay; dpace: by how likely the chain reaches them."""
    dpace_alpha: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """slot_weights dpace: how far the drafter's own confidence is smoothed towards 1."""

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens of a block."""
        return self.block_size - (not self.sample_from_anchor)

    @model_validator(mode="after")
    def _depth_can_be_drafted(self) -> Self:
        if self.num_draft_tokens > MOST_DEPTH:
            raise ValueError(f"block_size {self.block_size} drafts {self.num_draft_tokens} tokens, most {MOST_DEPTH}")
        return self


class DSparkSettings(DFlashSettings):
    """DSpark: DFlash with draft tokens that see the one before, and a confidence for each."""

    block_size: Annotated[int, Field(ge=2, le=17)] = 7
    """Rows of a block: the newest token and the masks after it. It is denoised at this width only."""
    sample_from_anchor: bool = True
    """Whether the newest token's own row drafts too, as in DeepSpec: block_size draft tokens instead of one less."""
    markov_rank: Annotated[int, Field(ge=1, le=4096)] = 256
    """Rank of the bias that a token has on the logits of the next."""
    ce_weight: Annotated[float, Field(ge=0)] = 0.1
    """Weight of `loss`, which compares token distributions."""
    tv_weight: Annotated[float, Field(ge=0)] = 0.9
    """Weight of the total variation between them: the probability of a rejection."""
    confidence_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of the confidence's cross-entropy against the probability that the target keeps the token."""

    @model_validator(mode="after")
    def _weighs_by_decay(self) -> Self:
        if self.slot_weights != "decay":
            raise ValueError("slot_weights dpace weighs a cross-entropy alone: take method dflash, or decay")
        return self


class MtpSettings(DistilledBlock):
    """DeepSeek-V3's sequential modules, or the model's own module used again and again."""

    start: Literal["new", "own"] = "new"
    """new: new modules; own: the MTP weights of the target's own checkpoint, fine-tuned (mtp_native.py)."""
    recursive_steps: Depth = 3
    """start own: number of draft tokens the one module is trained for."""
    train_experts: bool = True
    """start own: whether the module's routed experts are trained as well. They are 11.3 of DeepSeek-V3's 11.5 billion
    numbers; left as they are, each takes 4 bytes of memory instead of 16."""
    mtp_modules: Annotated[int, Field(ge=1, le=8)] = 3
    """Number of modules, and of draft tokens."""
    first_hidden: Literal["post_norm", "pre_norm"] = "post_norm"
    """Whether module 1 reads the target's last state after or before the final norm."""

    @property
    def starts_trained(self) -> bool:
        """Yes, with the checkpoint's own module."""
        return self.start == "own"

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        """Compares values with defaults, since saved settings name every setting."""
        for name in {"own": ("mtp_modules", "intermediate_size"), "new": ("recursive_steps", "train_experts")}[
            self.start
        ]:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} means nothing with start: {self.start}")
        return self


def settings_class(method: str) -> type[Settings]:
    """The class of a method's settings; raises UserError for a name that is not in METHODS."""
    require_method(method)
    cls: type[Settings] = load_object(METHODS[method].settings_class)
    return cls


def require_method(method: str) -> None:
    """Raise UserError for a name that is not in METHODS."""
    if method not in METHODS:
        methods = ", ".join(sorted(METHODS))
        raise UserError(
            f"drafting method '{method}' is unknown{did_you_mean(method, METHODS, most_named=0)}; known are {methods}"
        )


def settings_of_method(method: str, settings_by_method: Mapping[str, Mapping[str, Any]]) -> Settings:
    """The settings of one method, with defaults; raises UserError for the first fault of any method's."""
    settings, faults = check_settings(method, settings_by_method)
    if settings is None or faults:
        place, message = faults[0]
        raise UserError(f"train_draft: {'.'.join(map(str, place))}: {message}")
    return settings


def check_settings(
    method: str, settings_by_method: Mapping[str, Mapping[str, Any]]
) -> tuple[Settings | None, list[tuple[Place, str]]]:
    """Check the settings of all methods: (settings of `method`, [(place in the step's settings, fault)]).

    method: AUTO has none of its own.
    """
    faults: list[tuple[Place, str]] = []
    settings: Settings | None = None
    for name in dict.fromkeys([*([method] if method != AUTO else []), *settings_by_method]):
        if name not in METHODS:
            faults.append(
                (("settings", name), f"unknown drafting method '{name}'{did_you_mean(name, METHODS, most_named=0)}")
            )
            continue
        try:
            parsed = settings_class(name).model_validate(dict(settings_by_method.get(name, {})))
        except ValidationError as error:
            faults += [_describe_fault(name, fault) for fault in error.errors(include_url=False)]
        else:
            settings = parsed if name == method else settings
    return settings, faults


def _describe_fault(method: str, fault: Any) -> tuple[Place, str]:
    place: Place = ("settings", method, *fault["loc"])
    if fault["type"] == "extra_forbidden":
        names = sorted(settings_class(method).model_fields)
        name = str(fault["loc"][-1])
        hint = did_you_mean(name, names, most_named=0)
        return place, f"method {method} knows no setting '{name}'{hint}; it knows {', '.join(names)}"
    if not fault["loc"]:  # two settings that do not go together
        return place, f"settings of method {method}: {fault['msg'].removeprefix('Value error, ')}"
    message = fault["msg"].replace("Input should be", "must be", 1)
    return place, f"setting '{place[-1]}' of method {method}: {message}, not {fault['input']!r}"


def resolve_settings(settings: Settings, seed: int) -> Settings:
    """The settings passed to `build`: with init_seed filled in where the method draws weights."""
    if isinstance(settings, Trained) and settings.init_seed is None:
        return settings.model_copy(update={"init_seed": seed})
    return settings


def train_draft_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings as they enter the step's key: of `settings` only the method's own, defaults filled in; and faults.

    Those of method AUTO stay as they are: which method it is, start_from says when the step runs.

    flows/planning/step_signature.py asks for this when it reads pipelines.yaml.
    """
    method = settings["method"]
    method_settings, faults = check_settings(method, settings["settings"])
    if method == AUTO:
        return settings, faults
    return {
        **settings,
        "settings": {} if method_settings is None else {method: method_settings.model_dump(mode="json")},
    }, faults


def quantise_draft_settings(settings: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[Place, str]]]:
    """The settings as they enter the step's key, the group size filled in; and faults."""
    weights, size = settings["weights"], settings["group_size"]
    faults: list[tuple[Place, str]] = []
    if size and weights == "bf16":
        faults.append((("group_size",), "bf16 has no groups: leave group_size out"))
    elif size and size % 8:
        faults.append((("group_size",), f"{size} is no multiple of 8: whole 32-bit words are packed; engines take 32"))
    resolved = DEFAULT_GROUP[weights] if size is None else size
    keep = [] if weights == "bf16" else sorted(set(settings["keep"]))
    return {**settings, "group_size": resolved, "keep": keep}, faults
