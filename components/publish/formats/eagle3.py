"""The EAGLE-3 checkpoint that llama.cpp, vLLM, SGLang, MNN, speculators and SpecForge load.

Names and config keys are those of the first public EAGLE-3 release (`midlayer.*`, `d2t` as offsets). The tapped layers
are left out of the config where they are Hugging Face hidden_states[2, n//2, n-3], every engine's default, because
explicit ids mean different layers in different engines (`tap_ids`); others, and those of shallow targets, are named at
both places, by which vLLM also knows their number.
EAGLE-3.1's two norms have the names and flags that vLLM reads; an engine's profile says whether it honours them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from components.contract import UserError
from components.engines.profiles import NORM_FLAGS, Profile
from components.publish.formats.checkpoint import Checkpoint, Config, Spec, check_vocabulary
from components.publish.formats.interface import DrafterState, Source, own_embedding
from components.publish.formats.llama_block import (
    COUNT,
    AbstractLlamaLayout,
    Fact,
    block_config,
    block_specs,
    check_facts,
    own_block,
    refuse_qk_norm,
    scaling_field,
    window_fields,
)
from components.targets.shape import TargetShape

TAPS = "eagle_aux_hidden_state_layer_ids"
FLAG = Fact(bool, optional=True)
FLAGS = dict.fromkeys(NORM_FLAGS, FLAG)
USUAL_TAPS = 3
"""Tapped layers of a drafter whose config names none."""


@final
class Eagle3Layout(AbstractLlamaLayout):
    """EAGLE-3 under the names of its first release: `midlayer.*`, `d2t` and `t2d`."""

    format = "eagle3"
    methods = ("eagle3",)
    architectures = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        """The drafter's tensor names already are the format's; only the config is made here."""
        shape, settings = source.shape, drafter.settings
        refuse_qk_norm(drafter, self.format)
        config = {
            **self.names(),
            "target_hidden_size": shape.hidden_size,
            "draft_vocab_size": draft_vocab_size(drafter, shape.vocab_size),
            **block_config(drafter, shape),
            **scaling_field(drafter),
            **window_fields(drafter),
            **{name: True for name in NORM_FLAGS if settings.get(name)},
        }
        taps = drafter.tap_layers or shape.tap_layers
        if taps != shape.tap_layers or not shape.has_usual_taps:
            config |= {TAPS: list(taps), "eagle_config": {TAPS: [one - 1 for one in taps]}}
        return Checkpoint(config, drop_whole_vocabulary(drafter.tensors, shape.vocab_size))

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return any(name.startswith("midlayer.") for name in names) or (
            "Eagle3" in str(config.get("architectures")) and "speculators_model_type" not in config
        )

    def check_config(self, config: Config, location: str) -> None:
        super().check_config(config, location)
        check_eagle3(config, config, location)

    def expected(self, config: Config) -> dict[str, Spec]:
        return eagle3_specs(config, config, "midlayer.")

    def check_values(self, checkpoint: Checkpoint, location: str) -> None:
        check_vocabulary_pair(checkpoint, location)
        check_embedding(checkpoint, checkpoint.config, location)

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        super().check_target(config, shape, location)
        check_taps(config, shape.num_layers, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config = checkpoint.config
        settings = {"intermediate_size": config["intermediate_size"], **eagle3_flags(config)}
        settings |= own_block(config, source.shape, self.format)
        tensors = dict(checkpoint.tensors)
        settings |= own_embedding(tensors, source)
        return DrafterState("eagle3", settings, tensors, tap_layers=tuple(tap_ids(config) or ()))


def drop_whole_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Leave out d2t and t2d where the drafter covers the whole vocabulary: vLLM refuses a file that has them then."""
    d2t = tensors.get("d2t")
    whole = d2t is not None and d2t.shape == (vocab_size,) and not bool(d2t.count_nonzero())
    return {name: tensor for name, tensor in tensors.items() if not (whole and name in ("d2t", "t2d"))}


def check_vocabulary_pair(checkpoint: Checkpoint, location: str) -> None:
    """Check that d2t and t2d are both there or both absent, and agree. Raises UserError, one line."""
    present = [name for name in ("d2t", "t2d") if name in checkpoint.tensors]
    if len(present) == 1:
        raise UserError(f"{location}: {present[0]} without the other of d2t and t2d; write both, or neither")
    if present:
        check_vocabulary(checkpoint.tensors["d2t"], checkpoint.tensors["t2d"], location)


def check_embedding(checkpoint: Checkpoint, block: Config, location: str) -> None:
    """Check that a drafter of another width than its target has its own embedding. Raises UserError, one line."""
    hidden, tapped = block["hidden_size"], checkpoint.config.get("target_hidden_size")
    if tapped not in (None, hidden) and "embed_tokens.weight" not in checkpoint.tensors:
        raise UserError(
            f"{location}: embed_tokens.weight is missing: engines share the target's, which is {tapped} wide, and"
            f" hidden_size is {hidden}; write the drafter's own"
        )


def draft_vocab_size(drafter: DrafterState, vocab_size: int) -> int:
    """Draft vocabulary size: rows of the drafter's LM head, or vocab_size where it shares the target's."""
    rows = drafter.tensors.get("lm_head.weight", drafter.tensors.get("d2t"))
    return vocab_size if rows is None else int(rows.shape[0])


def eagle3_flags(config: Config) -> dict[str, bool]:
    """The norms that are on, as settings of method eagle3."""
    return {name: bool(config.get(name)) for name in NORM_FLAGS}


def check_eagle3(config: Config, block: Config, location: str, *, one_layer: bool = True) -> None:
    """Check the fields that EAGLE-3 adds to a block: draft vocabulary, width of the taps, norm flags, tapped layers.

    block: its Llama fields. one_layer: whether the layout has a single one.
    """
    if one_layer and block["num_hidden_layers"] != 1:
        raise UserError(
            f"{location}/config.json: num_hidden_layers is {block['num_hidden_layers']}, this layout has one layer"
        )
    if block.get("tie_word_embeddings"):
        raise UserError(f"{location}/config.json: tie_word_embeddings is true: engines would use no lm_head; say false")
    facts = {"draft_vocab_size": COUNT, "target_hidden_size": Fact(int, least=1, optional=True), **FLAGS}
    check_facts(config, facts, location)
    if config["draft_vocab_size"] > block["vocab_size"]:
        raise UserError(
            f"{location}/config.json: draft_vocab_size {config['draft_vocab_size']} is larger than vocab_size"
            f" {block['vocab_size']}"
        )
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise UserError(f"{location}/config.json: fc_norm and norm_before_fc are both on; engines take one of them")
    check_taps(config, None, location)


def tap_ids(config: Config) -> list[int] | None:
    """The tapped layers as Hugging Face hidden_states indices; None where the config names none.

    At top level id i is the input of layer i, hidden_states[i] (vLLM, llama.cpp, speculators); in `eagle_config` it is
    the output of layer i, hidden_states[i + 1] (SGLang, which reads it there alone).
    """
    if config.get(TAPS) is not None:
        return list(config[TAPS])
    inner = (config.get("eagle_config") or {}).get(TAPS)
    return None if inner is None else [one + 1 for one in inner]


def num_taps(config: Config) -> int:
    """The number of hidden states that fc reads."""
    ids = tap_ids(config)
    return USUAL_TAPS if ids is None else len(ids)


def misread(profile: Profile, checkpoint: Checkpoint, shape: TargetShape) -> str:
    """Why an engine would misread a sound EAGLE-3 checkpoint, in one clause; "" where it reads it as intended."""
    config = checkpoint.config
    places = profile.taps_at
    if places is not None and "transformer_layer_config" in config:
        places = tuple(at for at in places if at == "top")  # speculators' own layout: nothing else is carried over
    meant, top, inner = tap_ids(config), config.get(TAPS), (config.get("eagle_config") or {}).get(TAPS)
    if profile.num_taps not in (None, num_taps(config)):
        return f"{profile.title} taps {profile.num_taps} layers, and this one was trained on {meant}"
    if places is None and meant not in (None, list(shape.tap_layers)):
        return f"{profile.title} is not known to read which layers to tap, and this one was trained on {meant}"
    if meant is not None and places is not None:
        by_place = {"top": top, "inner": inner and [one + 1 for one in inner], "inner as inputs": inner}
        read = next((by_place[at] for at in places if by_place[at] is not None), list(shape.tap_layers))
        if read != meant:
            return (
                f"{profile.title} would tap hidden_states{read}, and this one was trained on {meant}: name them"
                f" {meant} at top level and {[one - 1 for one in meant]} in eagle_config"
            )
    if not profile.whole_d2t and config["draft_vocab_size"] == shape.vocab_size and "d2t" in checkpoint.tensors:
        return f"{profile.title} refuses d2t of a whole vocabulary: leave d2t and t2d out"
    return ""


def check_taps(config: Config, num_layers: int | None, location: str) -> None:
    """Check the tapped layers: ascending, the same at both places of the config, and never the last layer's output.

    num_layers: of the target; None skips the last of these checks. Raises UserError, one line.
    """
    inner = config.get("eagle_config")
    if inner is not None and not isinstance(inner, dict):
        raise UserError(f"{location}/config.json: eagle_config is {inner!r:.60}, must be a mapping")
    for layers, least in ((config.get(TAPS), 1), ((inner or {}).get(TAPS), 0)):
        if layers is None:
            continue
        numbers = isinstance(layers, list) and layers and all(type(one) is int and one >= least for one in layers)
        if not numbers or sorted(set(layers)) != layers:
            raise UserError(f"{location}/config.json: {TAPS} is {layers!r:.60}, must be ascending layer numbers")
    ids, inner_ids = tap_ids(config), (inner or {}).get(TAPS)
    if ids is not None and inner_ids is not None and [one - 1 for one in ids] != inner_ids:
        raise UserError(
            f"{location}/config.json: {TAPS} is {ids} at top level and {inner_ids} in eagle_config, where SGLang counts"
            f" outputs: the same layers there are {[one - 1 for one in ids]}"
        )
    if ids is not None and num_layers is not None and ids[-1] >= num_layers:
        raise UserError(
            f"{location}/config.json: {TAPS} taps hidden_states[{ids[-1]}] of {num_layers} layers; the last layer's"
            " output is normed in some engines and raw in others: tap an earlier one"
        )


def eagle3_specs(config: Config, block: Config, first: str) -> dict[str, Spec]:
    """Expected tensors of an EAGLE-3 network. block: its Llama fields; first: prefix of its first layer's names."""
    hidden, vocab_size, drafted = int(block["hidden_size"]), int(block["vocab_size"]), int(config["draft_vocab_size"])
    tapped, taps = int(config.get("target_hidden_size") or hidden), num_taps(config)
    specs = {
        "fc.weight": Spec((hidden, taps * tapped)),
        **block_specs(block, first, in_features=2 * hidden),
        f"{first}hidden_norm.weight": Spec((hidden,)),
        "norm.weight": Spec((hidden,)),
        "lm_head.weight": Spec((drafted, hidden)),
        "d2t": Spec((drafted,), torch.int64, optional=drafted == vocab_size),
        "t2d": Spec((vocab_size,), torch.bool, optional=drafted == vocab_size),
        # Engines share the target's embedding; a copy is allowed, and needed where it does not fit (check_embedding).
        "embed_tokens.weight": Spec((vocab_size, hidden), optional=True),
    }
    if config.get("fc_norm"):
        specs |= {f"fc_norm.{i}.weight": Spec((tapped,)) for i in range(taps)}
    if config.get("norm_before_fc"):
        specs["input_norm.weight"] = Spec((taps * tapped,))
    return specs
