"""Blocks attended by the kernel give the values and gradients of scores written out, in one stretch or many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from components.drafts.methods import block_attention
from components.drafts.methods.block_attention import BlockSight, attend_blocks


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rows_at_once", [512, 8])
@pytest.mark.parametrize("asking", [3, 2])
def test_values_and_gradients_are_those_of_written_out_scores(
    asking: int, rows_at_once: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "ROWS_AT_ONCE", rows_at_once)
    torch.manual_seed(0)
    num_blocks, width, num_columns, size = 11, 3, 150, 8
    roots = torch.randint(0, num_columns, (2, num_blocks)).sort(1).values
    columns = torch.arange(num_columns)
    masked = columns > roots[..., None]
    if window:
        masked = masked | (columns <= roots[..., None] - window)
    sizes = [(2, 4, num_blocks * asking), *[(2, 2, num_columns)] * 2, *[(2, 2, num_blocks * width)] * 2]
    parts = [torch.randn(*of, size, requires_grad=True) for of in sizes]

    def attended() -> Tensor:
        sight = BlockSight(masked, asking, torch.float32)
        assert (len(sight.stretches) > 1) == (rows_at_once < num_blocks * asking)
        return attend_blocks(parts[0], (parts[1], parts[2]), (parts[3], parts[4]), sight)

    weights = torch.randn_like(parts[0])
    found = [attended(), *torch.autograd.grad((attended() * weights).sum(), parts)]
    monkeypatch.setattr(
        block_attention._BlockAttention, "apply", lambda *of: block_attention._written_out(*of[:5], masked)
    )
    expected = [attended(), *torch.autograd.grad((attended() * weights).sum(), parts)]
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-4)
