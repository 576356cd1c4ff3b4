"""Codes of few bits: no weight moves by more than half a step, and packing loses nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.drafts.storage.quantisation import (
    dequantise,
    pack,
    quantise,
    unpack,
)


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    """(weight [O, I], bits, group size that divides I) of any scale, with groups of zeros among them."""
    bits, size = draw(st.sampled_from([4, 8])), draw(st.sampled_from([0, 8, 16]))
    rows, columns = draw(st.integers(1, 5)), draw(st.integers(1, 4)) * (size or draw(st.integers(1, 9)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(rows, columns, generator=generator) * 10.0 ** draw(st.integers(-25, 25))
    weight[torch.rand(rows, columns, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    return weight, bits, size


@settings(max_examples=150, deadline=None)
@given(weights())
def test_rounding_moves_no_weight_by_more_than_half_a_step_and_rounding_again_none(
    given_: tuple[Tensor, int, int],
) -> None:
    weight, bits, size = given_
    codes, scales = quantise(weight, bits, size)
    assert bool((scales > 0).all()) and bool(torch.isfinite(scales).all())
    assert int(codes.abs().max()) <= 2 ** (bits - 1) - 1
    back = dequantise(codes, scales)
    steps = scales.float().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    assert bool(((weight - back).abs() <= 0.5001 * steps).all())
    again, same = quantise(back, bits, size)
    assert torch.equal(again, codes)
    assert torch.equal(dequantise(again, same), back)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from([4, 8]), st.integers(1, 4), st.integers(1, 21), st.integers(0, 2**31))
def test_packed_codes_come_back_and_unused_bits_are_zero(bits: int, rows: int, columns: int, seed: int) -> None:
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.int32 and packed.shape == (rows, -(-columns * bits // 32))
    assert torch.equal(unpack(packed, bits, columns), codes)
    used = columns * bits % 32
    if used:
        assert not bool(((packed[:, -1].long() & 0xFFFFFFFF) >> used).any())


def test_the_first_code_stands_in_the_low_bits_plus_half() -> None:
    """As compressed-tensors packs: 1, 2 in 8 bits are 129 and 130, the word 33409."""
    assert pack(torch.tensor([[1, 2, -128, -128]], dtype=torch.int8), 8).tolist() == [[33409]]
    assert pack(torch.tensor([[-8, -7, -8, -8, -8, -8, -8, 7]], dtype=torch.int8), 4).tolist() == [[16 - 2**28]]
