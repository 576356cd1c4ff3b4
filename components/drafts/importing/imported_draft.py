"""The step that adopts a drafter which another project wrote: a Draft artifact like those that are trained here.

The format is recognised by config and tensor names; `layout` names one instead. What is read is fitted against the
network that its settings build for this target, under the checkpoint's own names, and everything that does not fit is
said in one line. The drafter then is a Draft like any other: measured, compared, tuned (`start_from`), exported.
"""

from __future__ import annotations

from pathlib import Path

import torch

from components.contract import Context, Draft, Target, UserError
from components.drafts.importing.checkpoint import FoundCheckpoint, find_checkpoint, require_room
from components.drafts.importing.eagle3 import Eagle3Reader, SpeculatorsReader
from components.drafts.importing.reader import AbstractReader, Faults, Imported, check_fit
from components.drafts.interface import AbstractDraft
from components.drafts.settings import settings_class
from components.drafts.storage.files import build_draft, save_draft
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.targets.source import find_folder

READERS: tuple[AbstractReader, ...] = (SpeculatorsReader(), Eagle3Reader())
"""Every reader; a checkpoint is tried against them in this order."""


def import_draft(target: Target, *, model: str, layout: str, ctx: Context) -> Draft:
    """The step `drafts.import_draft`; its settings are explained in components/drafts/steps.py."""
    torch.set_num_threads(ctx.num_threads)
    found = find_checkpoint(find_folder(model), model)
    reader = reader_of(found, layout)
    require_room(found.num_elements(found.files), ctx.out, model)
    opened = open_target(target, device=ctx.device, kernel="plain")
    network, imported = read_network(found, reader, opened)
    for remark in imported.remarks:
        ctx.note(f"{model}: {remark}")
    facts = {
        "method": imported.method,
        "num_steps": network.num_steps,
        "max_depth": network.max_depth,
        "target_key": target.key,
        "draft_vocab_size": network.draft_ids.numel(),
        "imported_from": model,
        "imported_layout": reader.layout,
        "import_remarks": imported.remarks,
    }
    settings = settings_class(imported.method).model_validate(imported.settings).model_dump(mode="json")
    save_draft(ctx.out, imported.method, settings, opened, network.draft_ids, network.state_dict(), facts)
    num_parameters = sum(weight.numel() for weight in network.state_dict().values())
    ctx.note(f"{model}: {imported.method} ({reader.layout}), {num_parameters:,} parameters")
    return Draft.of_step(ctx, {**facts, "num_parameters": num_parameters})


def reader_of(found: FoundCheckpoint, layout: str) -> AbstractReader:
    """The reader that `layout` names, "auto" for the one that recognises the checkpoint; raises UserError for none."""
    for reader in READERS:
        if reader.layout == layout or (layout == "auto" and reader.recognises(found)):
            return reader
    names = ", ".join(reader.layout for reader in READERS)
    raise UserError(f"{found.label}: no drafter in a format that is read here ({names}); is it one?")


def read_network(
    found: FoundCheckpoint, reader: AbstractReader, target: AbstractTarget
) -> tuple[AbstractDraft, Imported]:
    """The drafter in a checkpoint, loaded in float32; raises UserError, one line, for all that does not fit."""
    faults = Faults(found.label)
    if found.config.get("quantization_config"):
        faults.add("its weights are quantised; import the checkpoint that it was made from")
        faults.raise_any()
    imported = reader.read(found, target, faults)
    faults.raise_any()
    whole = torch.arange(target.shape.vocab_size)
    draft_ids = whole if imported.draft_ids is None else imported.draft_ids
    network: AbstractDraft = build_draft(imported.method, target, imported.settings, draft_ids.to(target.device))
    check_fit(imported, network.state_dict(), faults)
    faults.raise_any()
    network.load_state_dict({name: tensor.float() for name, tensor in imported.tensors.items()})
    network.eval().requires_grad_(False)
    return network, imported


def open_imported(folder: Path, target: AbstractTarget, layout: str = "auto") -> AbstractDraft:
    """The drafter in a folder, ready to decode; raises UserError as `read_network` does."""
    found = find_checkpoint(folder, folder.name)
    network, _ = read_network(found, reader_of(found, layout), target)
    network.prepare_decoding()
    return network
