"""A pass over a tree gives every path what a pass over that path alone gives, and keeps the accepted path only."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_targets import FAMILIES
from torch import Tensor

from components.targets.interface import AbstractTarget, TargetPass, TreeRows
from components.targets.load import open_target

PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]  # rows 0; 1, 2; 3, 4 below 1; 5 below 2; 6 below 3; 7 below 5
PATHS = [[0, 1, 3, 6], [0, 1, 4], [0, 2, 5, 7], [0]]


@pytest.fixture(scope="module", params=FAMILIES)
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
