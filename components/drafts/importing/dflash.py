"""Checkpoints of DFlash and DSpark: of the speculators library, and of the code of z-lab, DeepSpec and SpecForge.

Tensor names are the same in all: fc, hidden_norm, layers.{i}, norm, and DSpark's markov_head and confidence_head.
speculators has the fields of the block in `transformer_layer_config` and its own beside it; the others have all at the
top of config.json or in `dflash_config`. The embedding and the LM head are the target's, or copies of them.

Taps: `aux_hidden_state_layer_ids` (speculators) counts inputs of layers, `target_layer_ids` (the others) outputs, so
that id i is hidden_states[i + 1]. `sample_from_anchor` says whether the newest token's own row drafts; where it is
missing, DSpark's does and DFlash's does not, as in the projects that leave it out.
"""

from __future__ import annotations

from typing import Any, final

import torch

from components.drafts.importing.block import EAGLE_TYPES, check_block, read_block, read_own_block
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.eagle import FROZEN, SECTION, SHORT_TAPS, read_embedding
from components.drafts.importing.reader import AbstractReader, Faults, Imported, pop_zero_biases, read_vocabulary
from components.drafts.network.layers import head_rows, rows_unlike
from components.drafts.settings import causal_block_fault
from components.methods import MethodName
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget
from components.targets.shape import TargetShape, tap_layers_fault

OWN, LAYERS = "dflash_config", "target_layer_ids"
KINDS: tuple[MethodName, ...] = ("dflash", "dspark")
UNLIKE: JsonObject = {
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "attention_mode": "gqa",
    "dflash_query_causal": False,
    "log_snr_conditioning": False,
    "shift_label": False,
}
"""Switches with the values that the networks here have."""
BIASED = ("confidence_head.proj.bias",)


@final
class DFlashReader(AbstractReader):
    """DFlash and DSpark, with the fields of the block in a section of their own or not."""

    layout = "dflash"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        kind = checkpoint.config.get("speculators_model_type")
        return (
            kind in KINDS
            or (kind is None and OWN in checkpoint.config)
            or "DSpark" in str(checkpoint.config.get("architectures"))
        )

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        config, inner = checkpoint.config, checkpoint.config.get(OWN) or {}
        if not isinstance(inner, dict):
            faults.add(f"{OWN} is {inner!r:.40}, no mapping")
            faults.raise_any()
        own = {**config, **inner}
        nested = isinstance(config.get(SECTION), dict)
        section, where = (config[SECTION], SECTION) if nested else (config, "")
        block = read_block(section, faults, where=where, model_types=EAGLE_TYPES, windows=True)
        markov = any(name.startswith("markov_head.") for name in checkpoint.files)
        imported = Imported("dspark" if markov else "dflash", {}, checkpoint.read(checkpoint.files))
        _read_shared(imported, target, faults)
        _read_taps(own, target.shape, imported, faults)
        imported.settings |= _own_settings(own, imported.method, faults)
        if block is not None:
            if block.window and (fault := causal_block_fault(own)):
                faults.add(fault)
            check_block(block, target.shape, faults, imported.remarks, tied=("hidden_size",))
            imported.settings |= read_own_block(block, target.shape, faults, imported.remarks)
            sizes = {"intermediate_size": block.intermediate_size, "num_layers": block.num_layers}
            imported.settings |= {**sizes, "qk_norm": block.qk_norm}
        return imported


def _own_settings(own: JsonObject, method: str, faults: Faults) -> JsonObject:
    """The method's own settings, by the checkpoint's fields."""
    settings: JsonObject = {"sample_from_anchor": own.get("sample_from_anchor", method == "dspark")}
    names = ["block_size", "mask_token_id", *(["markov_rank"] if method == "dspark" else [])]
    for name in names:
        if type(own.get(name)) is not int:
            faults.add(f"{name} is {own.get(name)!r:.40}, no number")
        settings[name] = own.get(name)
    if not isinstance(settings["sample_from_anchor"], bool):
        faults.add(f"sample_from_anchor is {settings['sample_from_anchor']!r:.40}, must be true or false")
    for name, value in UNLIKE.items():
        if own.get(name, value) != value:
            faults.add(f"{name} is {own[name]!r:.40}: another network than {method}'s here")
    return settings


def _read_shared(imported: Imported, target: AbstractTarget, faults: Faults) -> None:
    """Vocabulary, embedding, LM head and frozen copies."""
    tensors, size = imported.tensors, target.shape.vocab_size
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is not None:
        imported.draft_ids = read_vocabulary(d2t, t2d, size, faults)
    head = tensors.pop("lm_head.weight", None)
    if head is not None:
        shared = head_rows(target, torch.arange(size) if imported.draft_ids is None else imported.draft_ids)
        if head.shape != shared.shape:
            faults.add(f"lm_head.weight is {list(head.shape)}, the target's rows for it are {list(shared.shape)}")
        elif bool(rows_unlike(head, shared).count_nonzero()):
            faults.add("lm_head.weight is its own, and the drafter here has the target's")
    for name in FROZEN:
        tensors.pop(name, None)
    read_embedding(imported, target, faults)
    pop_zero_biases(tensors, BIASED, imported, faults)


def _read_taps(own: JsonObject, shape: TargetShape, imported: Imported, faults: Faults) -> None:
    """The tapped layers, which must be named."""
    name, shift = (SHORT_TAPS, 0) if own.get(SHORT_TAPS) is not None else (LAYERS, 1)
    ids: Any = own.get(name)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        faults.add(f"{name} is {ids!r:.60}, no list of layers")
        return
    taps = tuple(one + shift for one in ids)
    if fault := tap_layers_fault(taps) or (
        taps[-1] >= shape.num_layers and f"of a target of {shape.num_layers} layers"
    ):
        faults.add(f"{name} is {ids!s:.60}, that is hidden_states{list(taps)!s:.60}: {fault}")
    imported.tap_layers = taps
