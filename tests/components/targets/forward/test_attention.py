"""Attention of few rows gives what its definition gives; a row's bits depend on nothing but what it sees."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from components.targets.forward.attention import MOST_ROWS, attend_rows, can_attend
from components.targets.forward.compiled import compiled_functions

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(compiled_functions() is None, reason="needs a C compiler")


def by_definition(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """In double precision; mask [B, 1, T, S]; sinks [heads], -inf where there is none."""
    together = queries.shape[2] // keys.shape[1]
    keys, values = (each.double().repeat_interleave(together, 1) for each in (keys, values))
    scores = torch.einsum("bthd,bhsd->bhts", queries.double() * scale, keys) + mask.double()
    beside = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    shares = torch.cat([scores, beside], dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("bhts,bhsd->bthd", shares, values)


@given(
    seed=st.integers(0, 1 << 30),
    batch=st.integers(1, 3),
    rows=st.integers(1, MOST_ROWS + 5),
    kv_heads=st.integers(1, 3),
    together=st.integers(1, 5),
    size=st.sampled_from([16, 48, 64, 80, 128, 256]),
    before=st.one_of(st.integers(0, 40), st.integers(240, 530)),
    first=st.one_of(st.just(0), st.integers(0, 300)),
    has_sinks=st.booleans(),
    of_tree=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_what_a_row_gets(
    seed: int,
    batch: int,
    rows: int,
    kv_heads: int,
    together: int,
    size: int,
    before: int,
    first: int,
    has_sinks: bool,
    of_tree: bool,
    dtype: torch.dtype,
) -> None:
    """Queries and cache are parts of larger tensors, as in a pass; every row sees its own column, and others or not."""
    dice = torch.Generator().manual_seed(seed)
    heads, stop, scale = kv_heads * together, before + rows, size**-0.5
    first = min(first, before)
    qkv = torch.randn(batch, rows, heads + 2 * kv_heads, size, generator=dice).to(dtype)
    cache = torch.randn(batch, 2 * kv_heads, stop + 3, size, generator=dice).to(dtype)
    queries, columns = qkv[:, :, :heads], cache[:, :, first:stop]
    keys, values = columns[:, :kv_heads], columns[:, kv_heads:]
    visible = torch.rand(batch if of_tree else 1, 1, rows, stop - first, generator=dice) < 0.7
    own = torch.arange(before - first, stop - first)
    visible[:, :, torch.arange(rows), own] = True
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)
    sinks = torch.randn(heads, generator=dice) if has_sinks else None

    given_mask = mask if of_tree else mask[0, 0]
    out = attend_rows(queries, keys, values, given_mask, first=first, scale=scale, sinks=sinks)

    none = torch.full((heads,), -math.inf)
    exact = by_definition(queries, keys, values, mask, scale, none if sinks is None else sinks)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), exact, rtol=rounding, atol=rounding)
    alone = attend_rows(
        queries[:1, -1:], keys[:1], values[:1], mask[:1, 0, -1:][0], first=first, scale=scale, sinks=sinks
    )
    assert torch.equal(alone[0, 0], out[0, -1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [5, 300])
def test_columns_that_a_row_does_not_see_change_no_bit(window: int, dtype: torch.dtype) -> None:
    """A verification reads from where its first row's window begins, a plain step from its own; and threads differ."""
    dice = torch.Generator().manual_seed(3)
    stop, threads = 700, torch.get_num_threads()
    query = torch.randn(1, 1, 8, 64, generator=dice).to(dtype)
    cache = torch.randn(1, 4, stop, 64, generator=dice).to(dtype)

    def attended(first: int) -> Tensor:
        columns = cache[:, :, first:]
        mask = torch.zeros(1, stop - first, dtype=dtype)
        mask[:, : stop - window - first] = -math.inf
        return attend_rows(query, columns[:, :2], columns[:, 2:], mask, first=first, scale=0.125, sinks=None)

    alone = attended(stop - window)
    try:
        for first, count in ((0, 1), (stop - window - 3, 3), (17, 4)):
            torch.set_num_threads(count)
            assert torch.equal(attended(first), alone)
    finally:
        torch.set_num_threads(threads)


def test_heads_that_fill_no_vector_or_no_stack_are_left_to_pytorch() -> None:
    assert can_attend(CPU, torch.float32, 128)
    assert not can_attend(CPU, torch.float32, 40)
    assert not can_attend(CPU, torch.float32, 512)
    assert not can_attend(CPU, torch.float16, 64)
