"""The drafting methods: one entry each with all facts that other rooms need, so that naming a method imports none.

A new method is one entry here, a class of settings in drafts/settings.py and one of drafters in drafts/methods/.
The code fingerprint of a step (flows/planning/code_index.py) follows, of the methods that its settings name, the fields
that its code mentions: name fields as attributes, and give them by keyword.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal

MethodName = Literal[
    "dflash",
    "draft-model",
    "dspark",
    "eagle1",
    "eagle3",
    "hass",
    "lookahead",
    "medusa",
    "mtp",
    "mtp-parallel",
    "ngram",
    "p-eagle",
    "suffix",
]
AUTO = "auto"
"""A method that is said where a drafter goes on from another: the method of that one."""
Format = Literal[
    "eagle1", "eagle3", "dflash", "z-lab", "speculators", "medusa", "mtp", "mimo", "stitched", "causal-lm", "gguf"
]


@dataclass(frozen=True, kw_only=True)
class Method:
    """One drafting method.

    draft_class, settings_class: "module:Class" of its drafter and of its settings.
    decoding_loop: "module:function" of a loop of its own, for one sequence and a chain; "" for decoding/chain.py. The
        acceptance map of such a method is that of one live run at its deepest depth, and says nothing of others.
    trained: whether it learns weights; if not, no depth lies beyond what it was trained for.
    llama_block: the Llama block that it trains, whose layers read the target's hidden size, a multiple of it, or the
        width of their own MLP: EAGLE's, which engines load by their EAGLE readers, or MTP's.
    reads_taps: whether it reads several layers of the target; others read its last hidden state, which every engine
        has.
    one_pass: whether one pass gives all draft tokens, so that a shorter chain saves no drafting.
    default_formats: the formats that are written when no engine is named.
    gguf_base: the format that llama.cpp's converter reads, where it has one for this method.
    """

    draft_class: str
    settings_class: str
    decoding_loop: str = ""
    trained: bool = True
    llama_block: Literal["eagle", "mtp"] | None = None
    reads_taps: bool = False
    one_pass: bool = False
    default_formats: tuple[Format, ...] = ()
    gguf_base: Format | None = None


METHODS: dict[str, Method] = {
    "dflash": Method(
        draft_class="components.drafts.methods.dflash:DFlash",
        settings_class="components.drafts.settings:DFlashSettings",
        reads_taps=True,
        default_formats=("dflash",),
        gguf_base="dflash",
        one_pass=True,
    ),
    "draft-model": Method(
        draft_class="components.drafts.methods.draft_model:DraftModel",
        settings_class="components.drafts.settings:DraftModelSettings",
        default_formats=("causal-lm",),
        gguf_base="causal-lm",
    ),
    "dspark": Method(
        draft_class="components.drafts.methods.dspark:DSpark",
        settings_class="components.drafts.settings:DSparkSettings",
        reads_taps=True,
        default_formats=("dflash",),
        gguf_base="dflash",
        one_pass=True,
    ),
    "eagle1": Method(
        draft_class="components.drafts.methods.eagle1:Eagle1",
        settings_class="components.drafts.settings:Eagle1Settings",
        llama_block="eagle",
        default_formats=("eagle1",),
    ),
    "eagle3": Method(
        draft_class="components.drafts.methods.eagle3:Eagle3",
        settings_class="components.drafts.settings:Eagle3Settings",
        llama_block="eagle",
        reads_taps=True,
        default_formats=("eagle3",),
        gguf_base="eagle3",
    ),
    "hass": Method(
        draft_class="components.drafts.methods.eagle1:Hass",
        settings_class="components.drafts.settings:HassSettings",
        llama_block="eagle",
        default_formats=("eagle1",),
    ),
    "lookahead": Method(
        draft_class="components.drafts.methods.lookahead:Lookahead",
        settings_class="components.drafts.settings:LookaheadSettings",
        decoding_loop="components.decoding.lookahead:lookahead_rounds",
        trained=False,
    ),
    "medusa": Method(
        draft_class="components.drafts.methods.medusa:Medusa",
        settings_class="components.drafts.settings:MedusaSettings",
        default_formats=("medusa",),
        one_pass=True,
    ),
    "mtp": Method(
        draft_class="components.drafts.methods.mtp:Mtp",
        settings_class="components.drafts.settings:MtpSettings",
        llama_block="mtp",
        default_formats=("mtp",),
    ),
    "mtp-parallel": Method(
        draft_class="components.drafts.methods.mtp_parallel:MtpParallel",
        settings_class="components.drafts.settings:MtpParallelSettings",
        one_pass=True,
    ),
    "p-eagle": Method(
        draft_class="components.drafts.methods.p_eagle:PEagle",
        settings_class="components.drafts.settings:PEagleSettings",
        llama_block="eagle",
        reads_taps=True,
        default_formats=("speculators",),
        one_pass=True,
    ),
    "ngram": Method(
        draft_class="components.drafts.methods.ngram:Ngram",
        settings_class="components.drafts.settings:NgramSettings",
        trained=False,
    ),
    "suffix": Method(
        draft_class="components.drafts.methods.suffix:Suffix",
        settings_class="components.drafts.settings:SuffixSettings",
        trained=False,
    ),
}


def load_object(address: str) -> Any:
    """The object at "module:name"."""
    module, name = address.split(":")
    return getattr(importlib.import_module(module), name)


def is_trained(method: str | None) -> bool:
    """Whether a method of this name learns weights, unknown ones included; rows may name any."""
    return method not in METHODS or METHODS[method].trained


def decoding_loop_of(method: str) -> str:
    """The address of a method's own decoding loop; "" where it has none or is unknown."""
    return METHODS[method].decoding_loop if method in METHODS else ""


def gguf_base_of(method: str) -> Format | None:
    """The format from which llama.cpp's converter makes a drafter of this method; None where it makes none."""
    return METHODS[method].gguf_base if method in METHODS else None
