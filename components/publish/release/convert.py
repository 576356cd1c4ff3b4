"""Turn a drafter of any format that is read here into any format that is written here, for `draftsmith convert`.

It is an import followed by an export, with the checks of both: the checkpoint must fit its target, and what is written
is read back and compared. Weights keep their dtype.
"""

from __future__ import annotations

from pathlib import Path

import torch

from components.contract import Target, UserError
from components.drafts.importing.checkpoint import find_checkpoint, require_room
from components.drafts.importing.imported_draft import fit_network, read_drafter, reader_of
from components.drafts.network.vocabulary import membership_of, offsets_of
from components.publish.formats.interface import DrafterState
from components.publish.formats.registry import FORMATS, layout_of, write_format
from components.publish.release.export import source_of
from components.targets.load import open_target
from components.targets.source import local_folder


def convert_folder(folder: Path, format: str, target: str, out: Path) -> list[str]:
    """Write the drafter in `folder` in another format, and return what was done in lines.

    target: "builtin" or a folder in Hugging Face format. out: a folder that does not exist yet, or an empty one.

    Raises:
        UserError: one line, for a drafter that does not fit, a format that cannot hold it, or a folder that is taken.
    """
    if format not in FORMATS:
        raise UserError(f"--to {format}: no such format; there are {', '.join(FORMATS)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out}: is there already; give another --out")
    target_folder = local_folder(target)
    if target_folder is None:
        raise UserError(f"--target {target}: no such folder; give 'builtin' or a folder with config.json")
    found = find_checkpoint(folder, folder.name)
    reader = reader_of(found, "auto")
    disk = next(place for place in (out.resolve(), *out.resolve().parents) if place.is_dir())
    require_room(found.num_elements(reader.stored(found)), disk, folder.name)
    opened = open_target(target_folder, dtype="float32", kernel="plain")
    imported = read_drafter(found, reader, opened)
    if imported.untrained or imported.settings.get("start") == "own":
        raise UserError(
            f"{folder.name}: a {reader.layout} drafter is used from where it is; no format is written of it"
        )
    if imported.method not in layout_of(format).methods:
        able = ", ".join(name for name in FORMATS if imported.method in layout_of(name).methods)
        raise UserError(f"{folder.name}: is a drafter of method {imported.method}, which --to {able} can hold")
    network = fit_network(imported, opened, folder.name)
    dtypes = {tensor.dtype for tensor in imported.tensors.values() if tensor.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    tensors = {name: tensor.to(dtype) for name, tensor in network.state_dict().items()}
    ids = network.draft_ids.cpu()
    tensors |= {"d2t": offsets_of(ids), "t2d": membership_of(ids, opened.shape.vocab_size)}
    source = source_of(Target(key="", path=target_folder))
    drafter = DrafterState(imported.method, imported.settings, tensors, tap_layers=imported.tap_layers)
    counts = write_format(format, drafter, source, out)
    return [
        f"{out}: {imported.method} as {format}, from {reader.layout}: {counts['num_tensors']} tensors,"
        f" {counts['num_params']:,} parameters, {counts['dtype']}",
        *(f"note: {remark}" for remark in imported.remarks),
    ]
