"""Write a copy of a model's checkpoint with its native MTP module replaced by a fine-tuned one.

Engines read a native module from the model's checkpoint. The copy has the same files, names and dtypes; only the
module's tensors differ. Files without any of them are hard-linked where the disk allows, else copied. The written files
are read back and compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError
from components.drafts.mtp_own_weights import find_native_mtp
from components.publish.checkpoint_files import link_or_copy, save_weights
from components.publish.exact_check import require_equal
from components.targets.source import list_files

MODULE_PREFIX = "module."  # prefix of the drafter's tensor names


def stitch(source: Path, out: Path, tensors: Mapping[str, Tensor], num_layers: int) -> dict[str, Any]:
    """Write the model in `source` into `out` with the tensors of a fine-tuned module (mtp_own.py) in place of its own.

    Returns {"num_tensors", "num_params", "dtype"} of the replaced tensors. Raises UserError, one line, when the model
    has no MTP module, or one of other shapes.
    """
    module = find_native_mtp(source, num_layers, source.name)
    inside = {n.removeprefix(MODULE_PREFIX): t for n, t in tensors.items() if n.startswith(MODULE_PREFIX)}
    named = module.to_checkpoint_names(inside)
    absent = sorted(set(named) - set(module.files))
    if absent or not all(bool(torch.isfinite(tensor).all()) for tensor in named.values()):
        what = f"{absent[0]} is not in it" if absent else "the fine-tuned module holds NaN or infinity"
        raise UserError(f"{source.name}: cannot take the fine-tuned module: {what}; train it again on this target")
    out.mkdir(parents=True, exist_ok=True)
    changed = {module.files[name] for name in named}
    for file in list_files(source, source.name):
        if file not in changed:
            link_or_copy(file, out / file.name)
    dtypes = set()
    for file in sorted(changed):
        with safe_open(file, framework="pt") as tensors_file:
            metadata = tensors_file.metadata()
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
