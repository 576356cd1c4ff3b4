"""Every format by name: a drafter written in one, checked before and after; a folder recognised, checked, reopened."""

from __future__ import annotations

import importlib
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

    layout.check_config(laid_out.config, where)
    if shape is not None:
        layout.check_target(laid_out.config, shape, where)
    check_tensors(laid_out.tensors, layout.expected(laid_out.config), where)
    check_stated_dtype(laid_out.config, laid_out.tensors, where)
    layout.check_values(laid_out, where)


def write_format(name: str, own: OwnForm, source: Source, folder: Path) -> dict[str, Any]:
    """Write a drafter in a format; nothing is written unless it is sound, and what was written is checked again.

    Returns {"num_tensors", "num_params", "dtype"}. Raises UserError, one line.
    """
    from components.publish.checkpoint_files import read_checkpoint, write_checkpoint

    layout = layout_of(name)
    laid_out = layout.lay_out(own, source)
    check(layout, laid_out, f"{name} checkpoint", source.shape)
    write_checkpoint(folder, laid_out, layout.weights_file)
    if layout.with_tokenizer and source.folder is not None:
        for file in sorted({file for pattern in TOKENIZER for file in source.folder.glob(pattern) if file.is_file()}):
            shutil.copyfile(file, folder / file.name)
    check(layout, read_checkpoint(folder, folder.name), folder.name, source.shape)
    weights = {n: t for n, t in laid_out.tensors.items() if t.is_floating_point()}
    return {
        "num_tensors": len(laid_out.tensors),
        "num_params": sum(t.numel() for t in weights.values()),
        "dtype": str(next(iter(weights.values())).dtype).removeprefix("torch."),
    }


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

    name, laid_out = read_folder(folder, source.shape, format)
    layout = layout_of(name)
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
