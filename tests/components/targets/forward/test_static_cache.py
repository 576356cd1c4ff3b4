"""A pass over a tree gives every path what a pass over that path alone gives, and keeps the accepted path only.

Attention over the cache is held against its definition, row by row and key by key: windows, caps, sinks, blocks, trees.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_targets import FAMILIES, TELLING
from torch import Tensor

from components.targets.forward.static_cache import (
    BLOCK,
    Scoring,
    StaticCache,
    View,
    attend,
    view_of_chain,
    view_of_columns,
    view_of_tree,
)
from components.targets.interface import AbstractTarget, TargetPass, TreeRows
from components.targets.load import open_target

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]  # rows 0; 1, 2; 3, 4 below 1; 5 below 2; 6 below 3; 7 below 5
PATHS = [[0, 1, 3, 6], [0, 1, 4], [0, 2, 5, 7], [0]]


@pytest.fixture(scope="module", params=(*FAMILIES, *TELLING))
def target(request: pytest.FixtureRequest, tiny_targets: dict[str, Path]) -> AbstractTarget:
    return open_target(tiny_targets[request.param], kernel="plain", dtype="float32")


def some_ids(num_sequences: int, num_rows: int, seed: int = 1) -> Tensor:
    return torch.randint(1, 384, (num_sequences, num_rows), generator=torch.Generator().manual_seed(seed))


def tree_rows(num_sequences: int, parents: list[int] = PARENTS) -> TreeRows:
    depths, seen = [0], torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents[1:], start=1):
        depths.append(depths[parent] + 1)
        seen[row] |= seen[parent]
    return TreeRows(torch.tensor(depths).repeat(num_sequences, 1), seen.repeat(num_sequences, 1, 1))


def prefilled(target: AbstractTarget, ids: Tensor, lengths: list[int]) -> object:
    cache = target.new_cache(len(ids), 64)
    target.forward(ids, cache, num_valid=torch.tensor(lengths), logits="none")
    return cache


def alone(target: AbstractTarget, ids: list[int]) -> TargetPass:
    return target.forward(torch.tensor([ids]), target.new_cache(1, len(ids)), features=True)


def assert_row(ours: TargetPass, sequence: int, row: int, theirs: TargetPass) -> None:
    """Row `row` of a tree against the last row of a plain pass: logits and features."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine is not None and other is not None
        torch.testing.assert_close(mine[sequence, row], other[0, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lengths", [[9], [9, 9], [9, 4]], ids=["one", "aligned", "ragged"])
def test_every_path_of_a_tree_is_as_if_alone(target: AbstractTarget, lengths: list[int]) -> None:
    prompt, tree = some_ids(len(lengths), 9), some_ids(len(lengths), 8, seed=2)
    cache = prefilled(target, prompt, lengths)
    out = target.forward(tree, cache, features=True, tree=tree_rows(len(lengths)))  # type: ignore[arg-type]
    for sequence, length in enumerate(lengths):
        for path in PATHS:
            expected = alone(target, [*prompt[sequence, :length].tolist(), *tree[sequence, path].tolist()])
            assert_row(out, sequence, path[-1], expected)


@pytest.mark.parametrize("lengths", [[9], [9, 4, 6]], ids=["one", "ragged"])
def test_the_cache_keeps_the_accepted_path_and_nothing_else(target: AbstractTarget, lengths: list[int]) -> None:
    """Rounds of trees of which another path is kept each time; the text so far is what a plain pass reads."""
    batch = len(lengths)
    prompt = some_ids(batch, 9)
    cache = prefilled(target, prompt, lengths)
    texts = [prompt[sequence, :length].tolist() for sequence, length in enumerate(lengths)]
    for step in range(6):
        tree = some_ids(batch, 8, seed=10 + step)
        before = cache.lengths.clone()  # type: ignore[attr-defined]
        out = target.forward(tree, cache, features=True, tree=tree_rows(batch))  # type: ignore[arg-type]
        kept = [PATHS[(step + sequence) % len(PATHS)] for sequence in range(batch)]
        cache.keep(before, kept)  # type: ignore[attr-defined]
        for sequence, path in enumerate(kept):
            texts[sequence] += tree[sequence, path].tolist()
            assert_row(out, sequence, path[-1], alone(target, texts[sequence]))
        assert cache.lengths.tolist() == [len(text) for text in texts]  # type: ignore[attr-defined]
    newest = some_ids(batch, 1, seed=99)
    after = target.forward(newest, cache, features=True)  # type: ignore[arg-type]
    for sequence, text in enumerate(texts):
        assert_row(after, sequence, 0, alone(target, [*text, int(newest[sequence, 0])]))


def test_padded_trees_of_different_sizes(target: AbstractTarget) -> None:
    prompt, tree = some_ids(2, 9), some_ids(2, 8, seed=2)
    cache = prefilled(target, prompt, [9, 5])
    whole, short = tree_rows(1), tree_rows(1, [-1, 0, 0])
    depths, visible = torch.zeros(2, 8, dtype=torch.int64), torch.eye(8, dtype=torch.bool).repeat(2, 1, 1)
    depths[0], visible[0] = whole.depths[0], whole.visible[0]
    depths[1, :3], visible[1, :3, :3] = short.depths[0], short.visible[0]
    out = target.forward(
        tree,
        cache,
        num_valid=torch.tensor([8, 3]),
        features=True,
        tree=TreeRows(depths, visible),  # type: ignore[arg-type]
    )
    assert cache.lengths.tolist() == [17, 8]  # type: ignore[attr-defined]
    assert_row(out, 0, 7, alone(target, [*prompt[0].tolist(), *tree[0, [0, 2, 5, 7]].tolist()]))
    assert_row(out, 1, 2, alone(target, [*prompt[1, :5].tolist(), *tree[1, [0, 2]].tolist()]))
    cache.keep(torch.tensor([9, 5]), [[0, 2, 5], [0, 2]])  # type: ignore[attr-defined]
    texts = [[*prompt[0].tolist(), *tree[0, [0, 2, 5]].tolist()], [*prompt[1, :5].tolist(), *tree[1, [0, 2]].tolist()]]
    after = target.forward(some_ids(2, 1, seed=5), cache, features=True)  # type: ignore[arg-type]
    for sequence, text in enumerate(texts):
        assert_row(after, sequence, 0, alone(target, [*text, int(some_ids(2, 1, seed=5)[sequence, 0])]))


def test_sequences_that_drop_out_leave_the_others_as_they_were(target: AbstractTarget) -> None:
    prompt = some_ids(4, 9)
    lengths = [9, 4, 7, 2]
    cache = prefilled(target, prompt, lengths)
    cache.select([1, 3])  # type: ignore[attr-defined]
    newest = some_ids(2, 3, seed=6)
    out = target.forward(newest, cache, features=True)  # type: ignore[arg-type]
    for place, sequence in enumerate((1, 3)):
        text = [*prompt[sequence, : lengths[sequence]].tolist(), *newest[place].tolist()]
        assert_row(out, place, 2, alone(target, text))


HEADS, KV_HEADS, WIDTH = 4, 2, 8


SCORINGS = [Scoring(0.7), Scoring(0.7, cap=1.5), Scoring(0.7, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]))]


def by_definition(queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scoring: Scoring) -> Tensor:
    """seen: bool [B, T, S]."""
    groups, (scale, cap, sinks) = HEADS // KV_HEADS, scoring
    scores = torch.einsum("bhtd,bhsd->bhts", queries, keys.repeat_interleave(groups, 1)).double() * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    weights = scores.exp() * seen[:, None]
    rest = 0.0 if sinks is None else sinks.double().exp().view(-1, 1, 1)
    shares = weights / (weights.sum(-1, keepdim=True) + rest)
    return torch.einsum("bhts,bhsd->bhtd", shares, values.repeat_interleave(groups, 1).double()).float()


def numbers(batch: int, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(num_rows + num_columns)
    shapes = ((HEADS, num_rows), (KV_HEADS, num_columns), (KV_HEADS, num_columns))
    return tuple(torch.randn(batch, *shape, WIDTH, generator=dice) for shape in shapes)  # type: ignore[return-value]


def assert_attends(parts: tuple[Tensor, Tensor, Tensor], view: View, seen: Tensor, scoring: Scoring) -> None:
    queries, keys, values = parts
    rows = queries.transpose(1, 2)
    given = attend(rows.contiguous(), keys[:, :, view.first :], values[:, :, view.first :], view, scoring)
    exact = by_definition(queries, keys, values, seen, scoring).transpose(1, 2).flatten(2)
    torch.testing.assert_close(given, exact, rtol=1e-4, atol=1e-5)


def within(rows: Tensor, keys: Tensor, window: int) -> Tensor:
    behind = rows[..., :, None] - keys[..., None, :]
    return (behind >= 0) & (behind < window) if window else behind >= 0


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(
    ("num_rows", "start"), [(1, 0), (1, 3), (1, 60), (4, 0), (4, 2), (7, 38), (9, 60), (BLOCK, 7), (2 * BLOCK + 3, 30)]
)
def test_a_chain_sees_its_window(num_rows: int, start: int, window: int, scoring: Scoring) -> None:
    parts = numbers(2, num_rows, start + num_rows)
    view = view_of_chain(num_rows, start, window, parts[0], materialises=scoring.materialises)
    rows = torch.arange(start, start + num_rows)
    seen = within(rows, torch.arange(start + num_rows), window).expand(2, -1, -1)
    assert view.first == (max(0, start - window + 1) if 0 < window < start + num_rows else 0), "no more is read"
    assert_attends(parts, view, seen, scoring)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [0, 1, 5, 40])
def test_ragged_rows_see_their_windows(window: int, scoring: Scoring) -> None:
    columns = torch.tensor([50, 9, 31])[:, None] + torch.arange(4)
    parts = numbers(3, 4, 54)
    assert_attends(
        parts, view_of_columns(columns, 54, window, parts[0]), within(columns, torch.arange(54), window), scoring
    )


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("window", [0, 2, 5, 40])
def test_tree_rows_see_their_path_and_what_their_position_reaches(window: int, scoring: Scoring) -> None:
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
    assert_attends(parts, view, seen, scoring)


def test_rows_that_keep_their_order_stay_in_one_cache_and_others_are_copied() -> None:
    held = torch.arange(2 * 5 * 2 * 3, dtype=torch.float32).view(2, 5, 2, 3, 1)
    for kept, is_copied in (([0, 3, 4], False), ([4, 0, 3], True), ([1], False)):
        cache = StaticCache(held.clone())
        cache.lengths, before = torch.arange(5), cache.kv.data_ptr()
        cache.select(kept)
        assert torch.equal(cache.kv, held[:, kept]) and cache.lengths.tolist() == kept
        assert (cache.kv.data_ptr() != before) == is_copied
        assert cache.bytes_per_token() == 2 * 2 * 4
