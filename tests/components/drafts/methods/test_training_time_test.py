"""The joint softmax without a score matrix is the softmax over one, forwards and backwards."""

from __future__ import annotations

import pytest
import torch

from components.drafts.methods.training_time_test import KERNELS, joined_attention
from components.drafts.network import layers
from components.drafts.network.layers import CausalMask, Sight

BATCH, KEY_HEADS, GROUP, ROWS, COLUMNS, SIZE = 2, 2, 3, 40, 57, 8


@pytest.mark.parametrize(
    ("num_own", "kernel", "window", "mask_entries"),
    [(0, "cpu", 0, 1 << 22), (1, "any", 0, 1 << 22), (3, "cpu", 9, 1), (3, "any", 0, 1), (2, "cpu", 0, 1)],
    ids=["alone", "products", "stretches of a window", "stretches of products", "stretches"],
)
def test_equals_one_softmax_over_all_scores(
    num_own: int, kernel: str, window: int, mask_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MASK_ENTRIES", mask_entries)
    monkeypatch.setitem(KERNELS, "cpu", KERNELS[kernel])
    torch.manual_seed(0)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size).requires_grad_()

    queries = leaf(BATCH, KEY_HEADS, GROUP, ROWS, SIZE)
    keys, values = leaf(BATCH, KEY_HEADS, COLUMNS, SIZE), leaf(BATCH, KEY_HEADS, COLUMNS, SIZE)
    own = [(leaf(BATCH, KEY_HEADS, ROWS, SIZE), leaf(BATCH, KEY_HEADS, ROWS, SIZE)) for _ in range(num_own)]
    rows = torch.stack([torch.randperm(COLUMNS)[:ROWS].sort().values for _ in range(BATCH)])
    rows[0, -3:] = 0  # filler, as packed_rows makes it
    sight = Sight(CausalMask(COLUMNS, rows.device), rows, window, 2)
    unseen = torch.arange(COLUMNS) > rows[:, :, None]  # [B, R, T]
    if window:
        unseen |= torch.arange(COLUMNS) <= rows[:, :, None] + 2 - window
    assert len(sight.stretches(GROUP)) == (1 if mask_entries > 1 else 3)

    found = joined_attention(queries, keys, values, sight, own)
    scores = [torch.einsum("bkgrd,bktd->bkgrt", queries, keys).masked_fill(unseen[:, None, None], float("-inf"))]
    scores += [torch.einsum("bkgrd,bkrd->bkgr", queries, key)[..., None] for key, _ in own]
    weights = (torch.cat(scores, -1) * SIZE**-0.5).softmax(-1)
    expected = torch.einsum("bkgrt,bktd->bkgrd", weights[..., :COLUMNS], values)
    for place, (_, value) in enumerate(own):
        expected = expected + weights[..., COLUMNS + place, None] * value.unsqueeze(2)
    torch.testing.assert_close(found, expected)

    leaves = [queries, keys, values, *(part for pair in own for part in pair)]
    towards = torch.randn_like(found)
    for ours, plain in zip(
        torch.autograd.grad(found, leaves, towards), torch.autograd.grad(expected, leaves, towards), strict=True
    ):
        torch.testing.assert_close(ours, plain, atol=1e-5, rtol=1e-4)
