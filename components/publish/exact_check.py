"""Refuse a checkpoint that is not exactly what an engine expects: names, shapes, dtypes, vocabulary, finite numbers.

Engines tolerate what they should refuse (a missing norm loads without a word, a wrong offset crashes while generating),
so nothing is written before this check has passed, and what was written is read back, compared bit for bit and checked
again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.tensor_files import require_finite

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Spec(NamedTuple):
    """What one tensor must be. dtype None: the one floating dtype that all weights share."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    optional: bool = False


class LaidOut(NamedTuple):
    """A checkpoint in some format: its config.json and its tensors under that format's names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, Spec], where: str) -> None:
    """Raises UserError, one line, for the first kind of thing that is wrong."""
    missing = sorted(name for name, spec in expected.items() if not spec.optional and name not in tensors)
    if missing:
        raise UserError(f"{where}: {some(missing)} missing; the drafter was not saved whole, make it again")
    extra = sorted(set(tensors) - set(expected))
    if extra:
        raise UserError(f"{where}: {some(extra)} not part of this layout; export it in the layout of its own method")
    floats = {t.dtype for name, t in tensors.items() if expected[name].dtype is None}
    for name, tensor in sorted(tensors.items()):
        spec = expected[name]
        if tuple(tensor.shape) != spec.shape:
            raise UserError(f"{where}: {name} is {list(tensor.shape)}, must be {list(spec.shape)}")
        if spec.dtype is not None and tensor.dtype != spec.dtype:
            raise UserError(f"{where}: {name} is {name_of(tensor.dtype)}, must be {name_of(spec.dtype)}")
        if spec.dtype is None and tensor.dtype not in FLOATS:
            raise UserError(f"{where}: {name} is {name_of(tensor.dtype)}, weights are {some(map(name_of, FLOATS))}")
        require_finite({name: tensor}, where, "the training run diverged, do not publish it")
    if len(floats) > 1:
        raise UserError(f"{where}: weights mix {some(sorted(map(name_of, floats)))}; all must share one dtype")


def check_stated_dtype(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> None:
    """config.json says the dtype that the weights have, under either of its two names."""
    stored = {name_of(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    for key in ("torch_dtype", "dtype"):
        if config.get(key) is not None and stored and [config[key]] != sorted(stored):
            raise UserError(
                f"{where}/config.json: {key} is {config[key]!r:.60}, the weights are {some(sorted(stored))}"
            )


def check_vocabulary(d2t: Tensor, t2d: Tensor, where: str) -> None:
    """d2t holds offsets (target id = i + d2t[i]), ids ascend inside the target's vocabulary, t2d marks the same ids."""
    ids = d2t + torch.arange(d2t.numel())
    vocab_size = t2d.numel()
    ascending = bool((ids.diff() > 0).all())
    inside = bool(((ids >= 0) & (ids < vocab_size)).all())
    if not (ascending and inside):
        absolute = bool((d2t.diff() > 0).all()) and bool(((d2t >= 0) & (d2t < vocab_size)).all())
        same = absolute and torch.equal(t2d.nonzero().flatten(), d2t)
        if same:
            raise UserError(f"{where}: d2t holds target ids, must hold offsets (target id - draft id)")
        what = "leave the target's vocabulary" if not inside else "do not ascend"
        raise UserError(f"{where}: d2t is wrong: the target ids i + d2t[i] {what} (0..{vocab_size - 1})")
    if not torch.equal(t2d.nonzero().flatten(), ids):
        absolute = torch.equal(t2d.nonzero().flatten(), d2t)
        hint = "d2t holds target ids, must hold offsets" if absolute else "one of the two was changed alone"
        raise UserError(f"{where}: t2d and d2t name different tokens; {hint}")


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
            f"{where}: {some(different)} read back differently than written; check the disk and export again"
        )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def name_of(dtype: torch.dtype) -> str:
    """float32, bfloat16, ..."""
    return str(dtype).removeprefix("torch.")


def some(names: Iterable[str]) -> str:
    """At most three names and how many more."""
    given = list(names)
    rest = f" and {len(given) - 3} more" if len(given) > 3 else ""
    return ", ".join(given[:3]) + rest
