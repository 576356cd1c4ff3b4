"""The EAGLE-3 checkpoint that llama.cpp, vLLM, SGLang, MNN, speculators and SpecForge load.

Names and config keys are those of the first public EAGLE-3 release (`midlayer.*`, `d2t` as offsets). The tapped layers
are left out of the config: every engine defaults to Hugging Face hidden_states[2, n//2, n-3], which is what we train
on, while explicit ids mean different layers in different engines (`tap_ids`). EAGLE-3.1's two norms have the names
and flags that vLLM reads; whether an engine honours them is its profile's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from components.contract import UserError
from components.publish.exact_check import LaidOut, Spec, check_vocabulary
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size
from components.publish.llama_block import (
    COUNT,
    IS_LLAMA,
    Fact,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    check_width,
)
from components.publish.profiles import NORM_FLAGS, Profile
from components.targets.model import TargetShape

TAPS = "eagle_aux_hidden_state_layer_ids"
FLAG = Fact(bool, optional=True)
FLAGS = dict.fromkeys(NORM_FLAGS, FLAG)
NUM_TAPS = 3


@final
class Eagle3Layout(AbstractLayout):
    """See the module docstring."""

    format = "eagle3"
    methods = ("eagle3",)

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout. Our own names are the format's."""
        shape, settings = source.shape, own.settings
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": shape.hidden_size,
            "draft_vocab_size": drafted_tokens(own, shape.vocab_size),
            **block_config(shape, intermediate_size=inner_size(own, shape), num_layers=1, dtype=dtype_of(own)),
            **{name: True for name in ("fc_norm", "norm_output") if settings.get(name)},
        }
        return LaidOut(config, cut_vocabulary(own.tensors, shape.vocab_size))

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return any(name.startswith("midlayer.") for name in names) or (
            "Eagle3" in str(config.get("architectures")) and "speculators_model_type" not in config
        )

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_architecture(config, ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"), where)
        check_facts(config, IS_LLAMA, where)
        check_block(config, where)
        if config["num_hidden_layers"] != 1:
            raise UserError(
                f"{where}/config.json: num_hidden_layers is {config['num_hidden_layers']}, this layout has one layer"
            )
        if config.get("tie_word_embeddings"):
            raise UserError(
                f"{where}/config.json: tie_word_embeddings is true: engines would use no lm_head; say false"
            )
        check_eagle3(config, where)

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        return eagle3_specs(config, config, "midlayer.")

    def check_values(self, laid_out: LaidOut, where: str) -> None:
        """See AbstractLayout."""
        check_cut(laid_out, where)
        check_embedding(laid_out, laid_out.config, where)

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout."""
        check_positions(config, shape, where)
        check_width(config, shape, where)
        check_taps(config, shape.num_layers, where)

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        config = laid_out.config
        settings = {"intermediate_size": config["intermediate_size"], **eagle3_flags(config, self.format)}
        tensors = {name: tensor for name, tensor in laid_out.tensors.items() if name != "embed_tokens.weight"}
        return OwnForm("eagle3", settings, tensors)


def cut_vocabulary(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The tensors, without d2t and t2d where they cut nothing: vLLM has no place for them then and refuses the file."""
    d2t = tensors.get("d2t")
    whole = d2t is not None and d2t.shape == (vocab_size,) and not bool(d2t.count_nonzero())
    return {name: tensor for name, tensor in tensors.items() if not (whole and name in ("d2t", "t2d"))}


def check_cut(laid_out: LaidOut, where: str) -> None:
    """d2t and t2d agree, and come together; raises UserError, one line."""
    there = [name for name in ("d2t", "t2d") if name in laid_out.tensors]
    if len(there) == 1:
        raise UserError(f"{where}: {there[0]} without the other of d2t and t2d; write both, or neither")
    if there:
        check_vocabulary(laid_out.tensors["d2t"], laid_out.tensors["t2d"], where)


def check_embedding(laid_out: LaidOut, block: Mapping[str, Any], where: str) -> None:
    """A drafter that is not as wide as its target brings an embedding; raises UserError, one line."""
    hidden, tapped = block["hidden_size"], laid_out.config.get("target_hidden_size")
    if tapped not in (None, hidden) and "embed_tokens.weight" not in laid_out.tensors:
        raise UserError(
            f"{where}: embed_tokens.weight is missing: engines share the target's, which is {tapped} wide, and"
            f" hidden_size is {hidden}; write the drafter's own"
        )


def drafted_tokens(own: OwnForm, vocab_size: int) -> int:
    """How many tokens a drafter with an LM head of its own can guess."""
    found = own.tensors.get("lm_head.weight", own.tensors.get("d2t"))
    return vocab_size if found is None else int(found.shape[0])


def dtype_of(own: OwnForm) -> torch.dtype:
    """The dtype of a drafter's weights; float32 where it has none."""
    return next((t.dtype for _, t in sorted(own.tensors.items()) if t.is_floating_point()), torch.float32)


def eagle3_flags(config: Mapping[str, Any], where: str) -> dict[str, bool]:
    """fc_norm and norm_output as settings of method eagle3; raises UserError for flags that our network has not."""
    for name in ("norm_before_fc", "norm_before_residual"):
        if config.get(name):
            raise UserError(f"{where}: {name} is on, which Draftsmith's EAGLE-3 network does not have")
    return {name: bool(config.get(name)) for name in ("fc_norm", "norm_output")}


def check_architecture(config: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """`architectures` is a list whose first entry is one of these; raises UserError, one line."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or named[0] not in known:
        raise UserError(f"{where}/config.json: architectures is {named!r:.80}, must be one of {', '.join(known)}")


def check_eagle3(config: Mapping[str, Any], where: str) -> None:
    """What EAGLE-3 adds to a block's fields: draft vocabulary, width of the taps, flags, tapped layers."""
    facts = {"draft_vocab_size": COUNT, "target_hidden_size": Fact(int, least=1, optional=True), **FLAGS}
    check_facts(config, facts, where)
    vocab_size = config.get("vocab_size") or config["transformer_layer_config"]["vocab_size"]
    if config["draft_vocab_size"] > vocab_size:
        raise UserError(
            f"{where}/config.json: draft_vocab_size {config['draft_vocab_size']} is larger than vocab_size {vocab_size}"
        )
    if config.get("fc_norm") and config.get("norm_before_fc"):
        raise UserError(f"{where}/config.json: fc_norm and norm_before_fc are both on; engines take one of them")
    check_taps(config, None, where)


def tap_ids(config: Mapping[str, Any]) -> list[int] | None:
    """The tapped layers as Hugging Face hidden_states indices, where the config names any.

    At top level id i is the input of layer i, hidden_states[i] (vLLM, llama.cpp, speculators); in `eagle_config` it is
    the output of layer i, hidden_states[i + 1] (SGLang, which reads it there alone).
    """
    if config.get(TAPS) is not None:
        return list(config[TAPS])
    inner = (config.get("eagle_config") or {}).get(TAPS)
    return None if inner is None else [one + 1 for one in inner]


def misread(profile: Profile, laid_out: LaidOut, shape: TargetShape) -> str:
    """Why an engine would not read a sound EAGLE-3 checkpoint as it is meant, one clause; "" where it would."""
    config = laid_out.config
    places = profile.taps_at
    if places is not None and "transformer_layer_config" in config:
        places = tuple(at for at in places if at == "top")  # speculators' own layout: nothing else is carried over
    meant, top, inner = tap_ids(config), config.get(TAPS), (config.get("eagle_config") or {}).get(TAPS)
    if meant is not None and places is not None:
        there = {"top": top, "inner": inner and [one + 1 for one in inner], "inner as inputs": inner}
        read = next((there[at] for at in places if there[at] is not None), list(shape.tap_layers))
        if read != meant:
            return (
                f"{profile.title} would tap hidden_states{read}, and this one was trained on {meant}: name them"
                f" {meant} at top level and {[one - 1 for one in meant]} in eagle_config"
            )
    if not profile.whole_d2t and config["draft_vocab_size"] == shape.vocab_size and "d2t" in laid_out.tensors:
        return f"{profile.title} refuses d2t of a whole vocabulary: leave d2t and t2d out"
    return ""


def check_taps(config: Mapping[str, Any], num_layers: int | None, where: str) -> None:
    """Tapped layers ascend, agree wherever they stand, and leave the last layer out; raises UserError, one line."""
    inner = config.get("eagle_config")
    if inner is not None and not isinstance(inner, dict):
        raise UserError(f"{where}/config.json: eagle_config is {inner!r:.60}, must be a mapping")
    for given in (config.get(TAPS), (inner or {}).get(TAPS)):
        if given is None:
            continue
        numbers = isinstance(given, list) and all(type(one) is int and one >= 0 for one in given)
        if not numbers or len(given) != NUM_TAPS or sorted(set(given)) != given:
            raise UserError(f"{where}/config.json: {TAPS} is {given!r:.60}, must be {NUM_TAPS} ascending layer numbers")
    ids, told = tap_ids(config), (inner or {}).get(TAPS)
    if ids is not None and told is not None and [one - 1 for one in ids] != told:
        raise UserError(
            f"{where}/config.json: {TAPS} is {ids} at top level and {told} in eagle_config, where SGLang counts"
            f" outputs: the same layers there are {[one - 1 for one in ids]}"
        )
    if ids is not None and num_layers is not None and ids[-1] >= num_layers:
        raise UserError(
            f"{where}/config.json: {TAPS} taps hidden_states[{ids[-1]}] of {num_layers} layers; the last layer's output"
            " is normed in some engines and raw in others: tap an earlier one"
        )


def eagle3_specs(config: Mapping[str, Any], block: Mapping[str, Any], first: str) -> dict[str, Spec]:
    """The tensors of an EAGLE-3 network whose first layer's names begin with `first`. block: the Llama fields."""
    hidden, vocab_size, drafted = int(block["hidden_size"]), int(block["vocab_size"]), int(config["draft_vocab_size"])
    tapped = int(config.get("target_hidden_size") or hidden)
    specs = {
        "fc.weight": Spec((hidden, NUM_TAPS * tapped)),
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
        specs |= {f"fc_norm.{i}.weight": Spec((tapped,)) for i in range(NUM_TAPS)}
    if config.get("norm_before_fc"):
        specs["input_norm.weight"] = Spec((NUM_TAPS * tapped,))
    return specs
