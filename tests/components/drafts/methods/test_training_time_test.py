"""The joint softmax without a score matrix is the softmax over one, forwards and backwards."""

from __future__ import annotations

import pytest
import torch

from components.drafts.methods.training_time_test import joined_attention

BATCH, KEY_HEADS, GROUP, ROWS, COLUMNS, SIZE = 2, 2, 3, 9, 14, 8


@pytest.mark.parametrize("num_own", [0, 1, 3])
def test_equals_one_softmax_over_all_scores(num_own: int) -> None:
    torch.manual_seed(0)

    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size).requires_grad_()

    queries = leaf(BATCH, KEY_HEADS, GROUP, ROWS, SIZE)
    keys, values = leaf(BATCH, KEY_HEADS, COLUMNS, SIZE), leaf(BATCH, KEY_HEADS, COLUMNS, SIZE)
    own = [(leaf(BATCH, KEY_HEADS, ROWS, SIZE), leaf(BATCH, KEY_HEADS, ROWS, SIZE)) for _ in range(num_own)]
    first_unseen = torch.randint(1, COLUMNS, (BATCH, ROWS)).sort().values
    unseen = torch.arange(COLUMNS) >= first_unseen[:, :, None]  # [B, R, T]
    mask = torch.zeros(unseen.shape).masked_fill(unseen, float("-inf"))[:, None].repeat(1, 1, GROUP, 1)

    found = joined_attention(queries, keys, values, mask, own)
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
