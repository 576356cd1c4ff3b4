"""Refuse a checkpoint that is not exactly what an engine expects: names, shapes, dtypes, vocabulary, finite numbers.

Engines accept faulty files (a missing norm loads silently, a wrong offset crashes while generating). So a checkpoint
must pass these checks before it is written, and is then read back, compared bit for bit and checked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.outside_json import JsonObject
from components.tensor_files import require_finite

Config = Mapping[str, Any]
"""A checkpoint's config.json: anybody's, so that every field is checked where it is read."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Spec(NamedTuple):
    """The shape and dtype that one tensor must have. dtype None: the one floating dtype that all weights share."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    optional: bool = False


class Checkpoint(NamedTuple):
    """A checkpoint in some format: its config.json and its tensors under that format's names."""

    config: JsonObject
    tensors: dict[str, Tensor]


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Spec], location: str) -> None:
    """Compare names, shapes and dtypes with the expected ones. Raises UserError, one line, for the first fault."""
    missing = sorted(name for name, spec in expected.items() if not spec.optional and name not in tensors)
    if missing:
        raise UserError(f"{location}: {abbreviate(missing)} missing; the drafter was not saved whole, make it again")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UserError(
            f"{location}: {abbreviate(extra)} not part of this layout; export it in the layout of its own method"
        )
    floats = {t.dtype for name, t in tensors.items() if expected[name].dtype is None}
    for name, tensor in sorted(tensors.items()):
        spec = expected[name]
        if tuple(tensor.shape) != spec.shape:
            raise UserError(f"{location}: {name} is {list(tensor.shape)}, must be {list(spec.shape)}")
        if spec.dtype is not None and tensor.dtype != spec.dtype:
            raise UserError(f"{location}: {name} is {name_of(tensor.dtype)}, must be {name_of(spec.dtype)}")
        if spec.dtype is None and tensor.dtype not in FLOATS:
            raise UserError(
                f"{location}: {name} is {name_of(tensor.dtype)}, weights are {abbreviate(map(name_of, FLOATS))}"
            )
        require_finite({name: tensor}, location, "the training run diverged, do not publish it")
    if len(floats) > 1:
        raise UserError(f"{location}: weights mix {abbreviate(sorted(map(name_of, floats)))}; all must share one dtype")


def check_stated_dtype(config: Config, tensors: Mapping[str, Tensor], location: str) -> None:
    """Check that config.json states the weights' dtype, under either of its two keys. Raises UserError."""
    stored = {name_of(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    for key in ("torch_dtype", "dtype"):
        if config.get(key) is not None and stored and [config[key]] != sorted(stored):
            raise UserError(
                f"{location}/config.json: {key} is {config[key]!r:.60}, the weights are {abbreviate(sorted(stored))}"
            )


def check_vocabulary(d2t: Tensor, t2d: Tensor, location: str) -> None:
    """Check that d2t holds offsets (target id = i + d2t[i]) of ascending ids below V, and t2d marks the same ids.

    d2t: int64 [N]. t2d: bool [V]. Raises UserError, one line.
    """
    ids = d2t + torch.arange(d2t.numel())
    vocab_size = t2d.numel()
    ascending = bool((ids.diff() > 0).all())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not (ascending and inside):
        absolute = bool((d2t.diff() > 0).all()) and bool(((d2t >= 0) & (d2t < vocab_size)).all())
        same = absolute and torch.equal(t2d.nonzero().flatten(), d2t)
        if same:
            raise UserError(f"{location}: d2t holds target ids, must hold offsets (target id - draft id)")
        what = "leave the target's vocabulary" if not inside else "do not ascend"
        raise UserError(f"{location}: d2t is wrong: the target ids i + d2t[i] {what} (0..{vocab_size - 1})")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        absolute = torch.equal(t2d.nonzero().flatten(), d2t)
        hint = "d2t holds target ids, must hold offsets" if absolute else "one of the two was changed alone"
        raise UserError(f"{location}: t2d and d2t name different tokens; {hint}")


def require_equal(written: Mapping[str, Tensor], read_back: Mapping[str, Tensor], location: str) -> None:
    """Raises UserError unless two sets of tensors are equal bit for bit, dtypes included."""
    different = sorted(set(written) ^ set(read_back))
    for name in sorted(set(written) & set(read_back)):
        a, b = written[name], read_back[name]
        # Bytes, not values: -0.0 == 0.0 would pass, and a NaN is never equal to itself.
        if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(_bytes(a), _bytes(b)):
            different.append(name)
    if different:
        raise UserError(
            f"{location}: {abbreviate(different)} read back differently than written; check the disk and export again"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """A dtype without its prefix: float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def abbreviate(names: Iterable[str]) -> str:
    """At most three names, and the number of the others."""
    listed = list(names)
    rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return ", ".join(listed[:3]) + rest
