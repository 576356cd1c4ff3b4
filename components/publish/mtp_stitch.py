"""A fine-tuned MTP module put back into a copy of its model, tensor for tensor where the checkpoint had it.

Engines read a model's own module from the model's checkpoint, so what is published is that checkpoint with the module's
tensors exchanged: same files, same names, same dtypes. Files that hold none of them are linked where the disk allows
(no bytes copied), else copied. What was written is read back and compared bit for bit.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError
from components.drafts.mtp_own_weights import find_own
from components.publish.checkpoint_files import save_weights
from components.publish.exact_check import require_equal
from components.targets.source import list_files

OF_MODULE = "module."  # what the drafter's tensors begin with


def stitch(source: Path, out: Path, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Any]:
    """Write the model of folder `source` into `out`, with these tensors of a fine-tuned module (mtp_own.py).

    Returns {"num_tensors", "num_params", "dtype"} of what was exchanged. Raises UserError, one line, when the model in
    `source` has no such module, or another one.
    """
    own = find_own(source, num_layers, source.name)
    inside = {n.removeprefix(OF_MODULE): t for n, t in tensors.items() if n.startswith(OF_MODULE)}
    named = own.named_back(inside)
    absent = sorted(set(named) - set(own.files))
    if absent or not all(bool(torch.isfinite(tensor).all()) for tensor in named.values()):
        what = f"{absent[0]} is not in it" if absent else "the fine-tuned module holds NaN or infinity"
        raise UserError(f"{source.name}: cannot take the fine-tuned module: {what}; train it again on this target")
    out.mkdir(parents=True, exist_ok=True)
    changed = {own.files[name] for name in named}
    for file in list_files(source, source.name):
        if file not in changed:
            _link(file, out / file.name)
    dtypes = set()
    for file in sorted(changed):
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        stored = load_file(file)
        for name in named.keys() & stored.keys():
            if named[name].shape != stored[name].shape:
                raise UserError(f"{source.name}: {name} has another shape now; train the module again on this target")
            dtypes.add(stored[name].dtype)
            stored[name] = named[name].to(stored[name].dtype).contiguous()
        save_weights(stored, out / file.name, metadata)
        require_equal(stored, load_file(out / file.name), file.name)
    return {
        "num_tensors": len(named),
        "num_params": sum(tensor.numel() for tensor in named.values()),
        "dtype": ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
    }


def _link(file: Path, beside: Path) -> None:
    beside.unlink(missing_ok=True)
    try:
        os.link(file.resolve(), beside)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, beside)
