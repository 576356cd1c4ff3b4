"""Every format by name: a drafter written in one, checked before and after; a folder recognised, checked, reopened."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contract import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from components.drafts.draft import AbstractDraft
    from components.publish.exact_check import LaidOut
    from components.publish.layout import AbstractLayout, OwnForm, Source
    from components.targets.model import AbstractTarget, TargetShape

# format -> "module:class". The order is that in which a stranger's folder is recognised.
FORMATS: dict[str, str] = {
    "speculators": "components.publish.speculators_layout:SpeculatorsLayout",
    "eagle3": "components.publish.eagle3_layout:Eagle3Layout",
    "medusa": "components.publish.medusa_layout:MedusaLayout",
    "eagle1": "components.publish.eagle1_layout:Eagle1Layout",
    "mimo": "components.publish.mimo_layout:MimoLayout",
    "mtp": "components.publish.mtp_layout:MtpLayout",
    "causal-lm": "components.publish.causal_lm_layout:CausalLmLayout",
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
    found: AbstractLayout = getattr(importlib.import_module(module), cls)()
    return found


def check(layout: AbstractLayout, laid_out: LaidOut, where: str, shape: TargetShape | None = None) -> None:
    """Everything that can be wrong with a checkpoint of a format; raises UserError, one line, for the first of it.

    shape: of the target it is said to be for; None checks it against its own config alone.
    """
    from components.publish.exact_check import check_stated_dtype, check_tensors
    from components.publish.quantised_layout import check_packed, packed_specs, storage_in, unpacked

    storage = storage_in(laid_out.config, where)
    layout.check_config(laid_out.config, where)
    if shape is not None:
        layout.check_target(laid_out.config, shape, where)
    specs = layout.expected(laid_out.config)
    there = specs if storage is None else packed_specs(specs, laid_out.config, storage, where)
    check_tensors(laid_out.tensors, there, where)
    check_stated_dtype(laid_out.config, laid_out.tensors, where)
    if storage is not None:
        check_packed(laid_out, specs, storage, where)
        laid_out = unpacked(laid_out, storage)
    layout.check_values(laid_out, where)


def write_format(name: str, own: OwnForm, source: Source, folder: Path) -> dict[str, Any]:
    """Write a drafter in a format; nothing is written unless it is sound, and what was written is checked again.

    Returns {"num_tensors", "num_params", "dtype"}. Raises UserError, one line.
    """
    from components.publish.checkpoint_files import write_checkpoint
    from components.publish.quantised_layout import lay_out_stored

    layout = layout_of(name)
    laid_out = layout.lay_out(own, source) if own.storage is None else lay_out_stored(layout, own, source)
    check(layout, laid_out, f"{name} checkpoint", source.shape)
    if layout.with_tokenizer and source.folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted({file for pattern in TOKENIZER for file in source.folder.glob(pattern) if file.is_file()}):
            _copy_of_tokenizer(file, folder / file.name)
    written = write_checkpoint(folder, laid_out, layout.weights_file)  # last: it reads all that is in the folder
    check(layout, written, folder.name, source.shape)
    num_params, dtype = weights_in(laid_out)
    return {"num_tensors": len(laid_out.tensors), "num_params": num_params, "dtype": dtype}


def _copy_of_tokenizer(file: Path, copy: Path) -> None:
    """Byte for byte, but for the places that a tokenizer was loaded from, which name folders and tell what it is of."""
    told: Any = None
    if file.name == "tokenizer_config.json":
        try:
            told = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{file.name} of the target: not sound JSON ({error}); mend it") from error
    if not isinstance(told, dict) or not told.keys() & LOADED_FROM:
        shutil.copyfile(file, copy)
        return
    kept = {name: value for name, value in told.items() if name not in LOADED_FROM}
    copy.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def weights_in(laid_out: LaidOut) -> tuple[int, str]:
    """How many numbers a checkpoint stands for, and their dtype; of one in few bits, what it says of itself."""
    from components.publish.exact_check import name_of
    from components.publish.quantised_layout import storage_in, unpacked

    storage = storage_in(laid_out.config, "")
    tensors = laid_out.tensors if storage is None else unpacked(laid_out, storage).tensors
    weights = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    dtype = name_of(weights[0].dtype) if storage is None else storage.in_words
    return sum(tensor.numel() for tensor in weights), dtype


def recognised(laid_out: LaidOut, where: str) -> AbstractLayout:
    """The format a checkpoint is meant to be of; raises UserError when it is none that is known."""
    names = frozenset(laid_out.tensors)
    for name in FORMATS:
        layout = layout_of(name)
        if layout.recognises(laid_out.config, names):
            return layout
    raise UserError(f"{where}: no drafter in a known format ({', '.join(FORMATS)}); is it one?")


def read_folder(folder: Path, shape: TargetShape | None = None, format: str = "") -> tuple[str, LaidOut]:
    """(format, checkpoint) of a folder, checked whole; raises UserError, one line.

    format: what it must be; empty finds out.
    """
    from components.publish.checkpoint_files import read_checkpoint

    where = folder.name or str(folder)
    laid_out = read_checkpoint(folder, where)
    layout = layout_of(format) if format else recognised(laid_out, where)
    check(layout, laid_out, where, shape)
    return layout.format, laid_out


def reopened(
    folder: Path, target: AbstractTarget, source: Source, format: str = "", draft_ids: Tensor | None = None
) -> AbstractDraft:
    """The drafter in a folder of any format, ready to decode in float32: our own reader of what others load.

    draft_ids: int64 [N], tokens to guess among, ascending, where the format leaves that to the target's whole head.
    """
    import torch

    from components.drafts.files import check_tensors, method_class, take_vocabulary
    from components.publish.quantised_layout import storage_in, unpacked

    name, laid_out = read_folder(folder, source.shape, format)
    layout = layout_of(name)
    storage = storage_in(laid_out.config, folder.name)
    laid_out = laid_out if storage is None else unpacked(laid_out, storage)
    own = layout.own_form(laid_out, source)
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in own.tensors.items()}
    vocab_size = target.shape.vocab_size
    if "d2t" in tensors:
        ids = take_vocabulary(folder, tensors, vocab_size)
    else:
        ids = draft_ids if layout.shares_head and draft_ids is not None else torch.arange(vocab_size)
    draft: AbstractDraft = method_class(own.method).build(target, own.settings, ids.to(target.device))
    check_tensors(folder, tensors, draft.state_dict())
    draft.load_state_dict(tensors)
    draft.eval().requires_grad_(False)
    draft.prepare_decoding()
    return draft


def own_form_of(record: Mapping[str, Any], tensors: Mapping[str, Any]) -> OwnForm:
    """A drafter as `drafts.files.read_draft` gives it."""
    from components.publish.layout import OwnForm

    return OwnForm(str(record["method"]), dict(record["settings"]), dict(tensors))


def own_form_at(folder: Path) -> OwnForm:
    """The drafter in a Draft artifact's folder, with how its weights are stored."""
    from components.drafts.files import read_draft, read_stored
    from components.drafts.quantised import packed_layers
    from components.drafts.storage import Storage

    record, tensors = read_draft(folder)
    storage, own = Storage.of(record), own_form_of(record, tensors)
    return own if storage is None else own._replace(storage=storage, packed=packed_layers(read_stored(folder)[1]))
