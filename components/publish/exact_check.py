"""Refuse a checkpoint that is not exactly what an engine expects: names, shapes, dtypes, finite numbers.

Engines tolerate what they should refuse (a missing norm loads without a word, a wrong offset crashes while generating),
so nothing is written before this check has passed, and what was written is read back and compared bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.contract import UserError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Spec(NamedTuple):
    """What one tensor must be. dtype None: the one floating dtype that all weights share."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    optional: bool = False


class LaidOut(NamedTuple):
    """A checkpoint in some format, checked and not yet written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Spec], where: str) -> None:
    """Raises UserError, one line, for the first kind of thing that is wrong."""
    missing = sorted(name for name, spec in expected.items() if not spec.optional and name not in tensors)
    if missing:
        raise UserError(f"{where}: {_some(missing)} missing; the drafter was not saved whole, train it again")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UserError(f"{where}: {_some(extra)} not part of this layout; export it in the layout of its own method")
    floats = {t.dtype for name, t in tensors.items() if expected[name].dtype is None}
    for name, tensor in sorted(tensors.items()):
        spec = expected[name]
        if tuple(tensor.shape) != spec.shape:
            raise UserError(f"{where}: {name} is {list(tensor.shape)}, must be {list(spec.shape)} for this target")
        if spec.dtype is not None and tensor.dtype != spec.dtype:
            raise UserError(f"{where}: {name} is {_name(tensor.dtype)}, must be {_name(spec.dtype)}")
        if spec.dtype is None and tensor.dtype not in FLOATS:
            raise UserError(f"{where}: {name} is {_name(tensor.dtype)}, weights are one of {_some(map(_name, FLOATS))}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{where}: {name} holds NaN or infinity; the training run diverged, do not publish it")
    if len(floats) > 1:
        raise UserError(f"{where}: weights mix {_some(sorted(map(_name, floats)))}; all must share one dtype")


def write_checkpoint(folder: Path, laid_out: LaidOut) -> None:
    """Write config.json and model.safetensors, then read both back and compare; raises UserError when they differ."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in sorted(laid_out.tensors.items())}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(laid_out.config, indent=2) + "\n", encoding="utf-8")
    require_equal(tensors, load_file(folder / "model.safetensors"), str(folder.name))
    if json.loads((folder / "config.json").read_text(encoding="utf-8")) != laid_out.config:
        raise UserError(f"{folder.name}/config.json: reads back differently than it was written; check the disk")


def require_equal(written: Mapping[str, Tensor], found: Mapping[str, Tensor], where: str) -> None:
    """Raises UserError unless two sets of tensors are equal bit for bit, dtypes included."""
    different = sorted(set(written) ^ set(found))
    for name in sorted(set(written) & set(found)):
        a, b = written[name], found[name]
        # Bytes, not values: -0.0 == 0.0 would pass, and a NaN is never equal to itself.
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b)):
            different.append(name)
    if different:
        raise UserError(
            f"{where}: {_some(different)} read back differently than written; check the disk and export again"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Any) -> str:
    """At most three names and how many more."""
    names = list(names)
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest
