"""A window, a cap, blocks of rows and trees: attention by the definition, row by row and key by key."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from components.targets.forward.attention import BLOCK, View, attend, view_of_chain, view_of_columns, view_of_tree
from components.targets.interface import TreeRows

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def by_definition(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    """seen: bool [B, T, S]."""
    groups = HEADS // KV_HEADS
    scores = torch.einsum("bhtd,bhsd->bhts", queries, keys.repeat_interleave(groups, 1)).double() * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    shares = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhts,bhsd->bhtd", shares, values.repeat_interleave(groups, 1).double()).float()


def numbers(batch: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(num_rows + num_columns)
    shapes = ((HEADS, num_rows), (KV_HEADS, num_columns), (KV_HEADS, num_columns))
    return tuple(torch.randn(batch, *shape, WIDTH, generator=dice) for shape in shapes)  # type: ignore[return-value]


def assert_attends(parts: tuple[Tensor, Tensor, Tensor], view: View, seen: Tensor, cap: float) -> None:
    queries, keys, values = parts
    given = attend(queries, keys[:, :, view.first :], values[:, :, view.first :], view, 0.7, cap)
    torch.testing.assert_close(given, by_definition(queries, keys, values, seen, 0.7, cap), rtol=1e-4, atol=1e-5)


def within(rows: Tensor, keys: Tensor, window: int) -> Tensor:
    behind = rows[..., :, None] - keys[..., None, :]
    return (behind >= 0) & (behind < window) if window else behind >= 0


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(
    ("num_rows", "start"), [(1, 0), (1, 3), (1, 60), (4, 0), (4, 2), (7, 38), (9, 60), (BLOCK, 7), (2 * BLOCK + 3, 30)]
)
def test_a_chain_sees_its_window(num_rows: int, start: int, window: int, cap: float) -> None:
    parts = numbers(2, num_rows, start + num_rows)
    view = view_of_chain(num_rows, start, window, parts[0], is_capped=cap > 0)
    rows = torch.arange(start, start + num_rows)
    seen = within(rows, torch.arange(start + num_rows), window).expand(2, -1, -1)
    assert view.first == (max(0, start - window + 1) if 0 < window < start + num_rows else 0), "no more is read"
    assert_attends(parts, view, seen, cap)


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_ragged_rows_see_their_windows(window: int, cap: float) -> None:
    columns = torch.tensor([50, 9, 31])[:, None] + torch.arange(4)
    parts = numbers(3, 4, 54)
    assert_attends(
        parts, view_of_columns(columns, 54, window, parts[0]), within(columns, torch.arange(54), window), cap
    )


@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 2, 5, 40])
def test_tree_rows_see_their_path_and_what_their_position_reaches(window: int, cap: float) -> None:
    """Rows 1 and 2 follow row 0, row 3 follows 1 and row 4 follows 3: positions, not columns, count."""
    lengths, depths = torch.tensor([50, 9]), torch.tensor([0, 1, 1, 2, 3])
    path = torch.eye(5, dtype=torch.bool)
    for row, parent in ((1, 0), (2, 0), (3, 1), (4, 3)):
        path[row] |= path[parent]
    stop, parts = 55, numbers(2, 5, 55)
    view = view_of_tree(lengths, TreeRows(depths.repeat(2, 1), path.repeat(2, 1, 1)), stop, window, parts[0])
    seen = torch.zeros(2, 5, stop, dtype=torch.bool)
    for sequence, length in enumerate(lengths.tolist()):
        for row, depth in enumerate(depths.tolist()):
            for column in range(length + 5):
                above = column - length
                position = column if above < 0 else length + int(depths[above])
                near = not window or length + depth - position < window
                seen[sequence, row, column] = near and (above < 0 or bool(path[row, above]))
    assert_attends(parts, view, seen, cap)
