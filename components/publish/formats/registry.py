"""The registry of formats: write a drafter in one, recognise and check a folder, and reopen it as a drafter."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.contract import UserError
from components.drafts.interface import AbstractDraft
from components.drafts.storage.files import DraftRecord, build_draft, pop_vocabulary, read_draft, read_stored
from components.drafts.storage.files import check_tensors as check_draft_tensors
from components.drafts.storage.quantisation import packed_layers, parse_storage
from components.publish.formats.checkpoint import (
    Checkpoint,
    check_stated_dtype,
    check_tensors,
    name_of,
    read_checkpoint,
    write_checkpoint,
)
from components.publish.formats.compressed_tensors import (
    check_packed,
    dequantise_checkpoint,
    lay_out_quantised,
    packed_specs,
)
from components.publish.formats.interface import AbstractLayout, DrafterState, Source
from components.release_record import WeightCounts
from components.targets.interface import AbstractTarget, tapping
from components.targets.shape import TargetShape
from components.weight_format import Storage

# format -> "module:class". A stranger's folder is tried against them in this order.
FORMATS: dict[str, str] = {
    "dflash": "components.publish.formats.dflash:DFlashLayout",
    "z-lab": "components.publish.formats.z_lab:ZLabLayout",
    "speculators": "components.publish.formats.speculators:SpeculatorsLayout",
    "eagle3": "components.publish.formats.eagle3:Eagle3Layout",
    "medusa": "components.publish.formats.medusa:MedusaLayout",
    "eagle1": "components.publish.formats.eagle1:Eagle1Layout",
    "mimo": "components.publish.formats.mtp:MimoLayout",
    "mtp": "components.publish.formats.mtp:MtpLayout",
    "causal-lm": "components.publish.formats.causal_lm:CausalLmLayout",
}
LOADED_FROM = {
    "name_or_path",
    "_name_or_path",
    "tokenizer_file",
    "special_tokens_map_file",
    "vocab_file",
    "merges_file",
}
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab*", "merges*")


def layout_of(name: str) -> AbstractLayout:
    """The layout of a format."""
    module, cls = FORMATS[name].split(":")
    layout: AbstractLayout = getattr(importlib.import_module(module), cls)()
    return layout


def check_checkpoint(
    layout: AbstractLayout, checkpoint: Checkpoint, location: str, shape: TargetShape | None = None
) -> None:
    """Check a checkpoint completely. Raises UserError, one line, for the first fault.

    shape: of the target that it is meant for; None checks it against its own config only.
    """
    storage = parse_storage(checkpoint.config, location)
    layout.check_config(checkpoint.config, location)
    if shape is not None:
        layout.check_target(checkpoint.config, shape, location)
    specs = layout.expected(checkpoint.config)
    stored_specs = specs if storage is None else packed_specs(specs, checkpoint.config, storage, location)
    check_tensors(checkpoint.tensors, stored_specs, location)
    check_stated_dtype(checkpoint.config, checkpoint.tensors, location)
    if storage is not None:
        check_packed(checkpoint, specs, storage, location)
        checkpoint = dequantise_checkpoint(checkpoint, storage)
    layout.check_values(checkpoint, location)


def write_format(name: str, drafter: DrafterState, source: Source, folder: Path) -> WeightCounts:
    """Write a drafter in a format: it is checked before anything is written, and read back and checked again after.

    Returns {"num_tensors", "num_params", "dtype"}. Raises UserError, one line.
    """
    layout = layout_of(name)
    checkpoint = (
        layout.lay_out(drafter, source) if drafter.storage is None else lay_out_quantised(layout, drafter, source)
    )
    check_checkpoint(layout, checkpoint, f"{name} checkpoint", source.shape)
    if layout.with_tokenizer and source.folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted({file for pattern in TOKENIZER for file in source.folder.glob(pattern) if file.is_file()}):
            _copy_tokenizer_file(file, folder / file.name)
    written = write_checkpoint(folder, checkpoint, layout.weights_file)  # last: it reads the whole folder back
    check_checkpoint(layout, written, folder.name, source.shape)
    num_params, dtype = count_weights(checkpoint)
    return {"num_tensors": len(checkpoint.tensors), "num_params": num_params, "dtype": dtype}


def _copy_tokenizer_file(file: Path, copy: Path) -> None:
    """Copy a tokenizer file; tokenizer_config.json without the fields that say where it was loaded from."""
    config: Any = None
    if file.name == "tokenizer_config.json":
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file.name} of the target: not sound JSON ({error}); mend it") from error
    if not isinstance(config, dict) or not config.keys() & LOADED_FROM:
        shutil.copyfile(file, copy)
        return
    public_config = {name: value for name, value in config.items() if name not in LOADED_FROM}
    copy.write_text(json.dumps(public_config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def count_weights(checkpoint: Checkpoint) -> tuple[int, str]:
    """(number of parameters, dtype); for quantised weights, the parameters they stand for and the format in words."""
    storage = parse_storage(checkpoint.config, "")
    tensors = checkpoint.tensors if storage is None else dequantise_checkpoint(checkpoint, storage).tensors
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = name_of(weights[0].dtype) if storage is None else storage.description
    return sum(tensor.numel() for tensor in weights), dtype


def recognise_layout(checkpoint: Checkpoint, location: str) -> AbstractLayout:
    """The format of a stranger's checkpoint. Raises UserError when no format recognises it."""
    names = frozenset(checkpoint.tensors)
    for name in FORMATS:
        layout = layout_of(name)
        if layout.recognises(checkpoint.config, names):
            return layout
    raise UserError(f"{location}: no drafter in a known format ({', '.join(FORMATS)}); is it one?")


def read_folder(folder: Path, shape: TargetShape | None = None, format: str = "") -> tuple[str, Checkpoint]:
    """(format, checkpoint) of a folder that passes every check. Raises UserError, one line.

    format: the expected format; "" recognises it.
    """
    location = folder.name or str(folder)
    checkpoint = read_checkpoint(folder, location)
    layout = layout_of(format) if format else recognise_layout(checkpoint, location)
    check_checkpoint(layout, checkpoint, location, shape)
    return layout.format, checkpoint


def reopen_drafter(
    folder: Path, target: AbstractTarget, source: Source, format: str = "", draft_ids: Tensor | None = None
) -> AbstractDraft:
    """The drafter in a folder of any format, loaded in float32 and ready to decode, by kernels that need no timing.

    draft_ids: int64 [N], the draft vocabulary in ascending order, for formats that use the target's whole LM head.
    """
    name, checkpoint = read_folder(folder, source.shape, format)
    layout = layout_of(name)
    storage = parse_storage(checkpoint.config, folder.name)
    checkpoint = checkpoint if storage is None else dequantise_checkpoint(checkpoint, storage)
    state = layout.drafter_state(checkpoint, source)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in state.tensors.items()}
    vocab_size = target.shape.vocab_size
    if "d2t" in tensors:
        ids = pop_vocabulary(folder, tensors, vocab_size)
    else:
        ids = draft_ids if layout.shares_head and draft_ids is not None else torch.arange(vocab_size)
    target = tapping(target, state.tap_layers or target.tap_layers)
    draft: AbstractDraft = build_draft(state.method, target, state.settings, ids.to(target.device))
    check_draft_tensors(folder, tensors, draft.state_dict())
    draft.load_state_dict(tensors)
    draft.eval().requires_grad_(False)
    draft.prepare_decoding(kernel="plain")
    return draft


def drafter_state_of(record: DraftRecord, tensors: Mapping[str, Tensor]) -> DrafterState:
    """The state of a drafter from the record and tensors of `read_draft`."""
    taps = tuple(record.get("tap_layers", ()))
    return DrafterState(record["method"], dict(record["settings"]), dict(tensors), tap_layers=taps)


def read_drafter_state(folder: Path) -> DrafterState:
    """The drafter in a Draft artifact's folder, with its quantised layers where it has any."""
    record, tensors = read_draft(folder)
    storage, drafter = Storage.from_record(record), drafter_state_of(record, tensors)
    return (
        drafter if storage is None else drafter._replace(storage=storage, packed=packed_layers(read_stored(folder)[1]))
    )
