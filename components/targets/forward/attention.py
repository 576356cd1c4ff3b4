"""Attention of few rows over a cache of keys and values, in a function of our own that reads each of them once.

PyTorch's operator is made for many rows. With one to eight it takes two to four times as long as memory needs for keys
and values in float32, and up to twenty times in bfloat16 without native products: after 2,000 columns more than all
weights of a small model take. attention.c is compiled where it runs (compiled.py).
"""

from __future__ import annotations

from ctypes import byref
from typing import Final

import torch
from torch import Tensor

from components.targets.forward.compiled import SIZES_DIVIDE_BY, Sight, can_run, run

MOST_ROWS: Final = 16
"""Rows of a sequence: with more, products of matrices are as quick."""
MOST_SIZE: Final = 256
"""Numbers of a head, of which arrays on a thread's stack have room for 16 rows."""
CHUNK: Final = 256
"""Columns of a task: attention.c has the same number, and the room for the parts depends on it."""


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    *,
    first: int,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(scale q k^T + mask) v for few rows: contiguous [B, T, heads, D].

    A row's bits depend neither on the rows beside it nor on `first`, as long as what it sees is the same.

    queries: [B, T, heads, D]; keys, values: [B, kv_heads, S, D] with equal strides, columns `first` and on of a cache;
    mask: [T, S] or [B, 1, T, S], of the queries' dtype; sinks: float32 [heads], scores that have no value.
    """
    batch, rows, heads, size = queries.shape
    kv_heads, columns = keys.shape[1], keys.shape[2]
    assert heads % kv_heads == 0 and size % SIZES_DIVIDE_BY == 0 and size <= MOST_SIZE
    assert keys.stride() == values.stride() and keys.stride(2) == size and queries.stride(2) == size
    of = Sight(batch, rows, heads, kv_heads, size, *queries.stride()[:2], *keys.stride()[:2], first, first + columns)
    assert mask is None or mask.dtype == queries.dtype
    of.mask_batch, of.mask_row = mask_strides(mask)
    of.scale = scale
    parts = room_for_parts(batch, heads, rows, size, first, first + columns)
    out = torch.empty(batch, rows, heads, size, dtype=queries.dtype)
    run("attention", queries.dtype, (queries, keys, values, mask, sinks, out, parts), byref(of))
    return out


def room_for_parts(batch: int, heads: int, rows: int, size: int, first: int, stop: int) -> Tensor:
    """Room for what each chunk of columns first..stop gives to each row, float32."""
    num_chunks = (stop + CHUNK - 1) // CHUNK - first // CHUNK
    return torch.empty(batch * heads * rows * num_chunks * (size + 2), dtype=torch.float32)


def mask_strides(mask: Tensor | None) -> tuple[int, int]:
    """Numbers from a sequence's mask to the next one's (0: all have the same), and from a row's to the next one's."""
    assert mask is None or mask.stride(-1) == 1
    return (0, 0) if mask is None else (mask.stride(0) if mask.ndim == 4 else 0, mask.stride(-2))


def can_attend(device: torch.device, dtype: torch.dtype, size: int) -> bool:
    """Whether there is such a function for heads of this size."""
    return size <= MOST_SIZE and can_run(device, dtype, size)
