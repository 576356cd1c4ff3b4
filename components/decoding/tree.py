"""A tree of guesses: made with the newest token at its root, grown level by level, finalised into rows to verify.

Row 0 of a pass is the newest token x_n; every other row is a guess. A row sees the cached columns, its ancestors and
itself, and sits at the position of its depth, so one pass of the target gives every path what a pass over that path
alone would. Chain, static tree and EAGLE-2's dynamic tree differ in how they are grown (tree_shapes.py), no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from components.drafts.ancestry import ancestor_sets, as_mask
from components.targets.model import TreeRows


@dataclass(frozen=True)
class GuessRows:
    """A finalised tree of T rows. Rows are in an order in which parents come before their children."""

    tokens: list[int]  # [T]; row 0 is the newest token
    parents: list[int]  # [T]; -1 for row 0
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)
    """Row -> [V] the distribution that its children were drawn from, without replacement; rows whose children are the
    drafter's most likely tokens, a deterministic proposal, are not in it."""

    @property
    def depths(self) -> list[int]:
        """Guesses between the newest token and each row, itself included: [T], 0 for row 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def children(self) -> list[list[int]]:
        """The rows below each row, in the order in which they are tried: [T] lists."""
        found: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(row)
        return found

    def visible(self) -> Tensor:
        """Which rows each row sees: itself and its ancestors; bool [T, T]."""
        return as_mask(ancestor_sets(self.parents), len(self.parents))

    def within(self, deepest: int) -> GuessRows:
        """The tree without the rows below this depth; the others keep their order."""
        kept = [row for row, depth in enumerate(self.depths) if depth <= deepest]
        row_of = {row: place for place, row in enumerate(kept)}
        return GuessRows(
            tokens=[self.tokens[row] for row in kept],
            parents=[row_of.get(self.parents[row], -1) for row in kept],
            draft_probs={row_of[row]: probs for row, probs in self.draft_probs.items() if row in row_of},
        )

    def retrieve_indices(self) -> Tensor:
        """The rows of every path from row 0 to a leaf: int64 [paths, deepest + 1], -1 after the end of shorter ones."""
        has_child = set(self.parents)
        paths = []
        for leaf in (row for row in range(len(self.parents)) if row not in has_child):
            path = [leaf]
            while self.parents[path[-1]] >= 0:
                path.append(self.parents[path[-1]])
            paths.append(path[::-1])
        longest = max(map(len, paths))
        return torch.tensor([path + [-1] * (longest - len(path)) for path in paths])


@final
class GuessTree:
    """A tree while it grows. Node 0 is the newest token; scores are cumulative log-probabilities of the drafter."""

    def __init__(self, newest: int) -> None:
        """Only the newest token, which is known: score 0."""
        self.tokens, self.parents, self.depths, self.scores = [newest], [-1], [0], [0.0]
        self.draft_probs: dict[int, Tensor] = {}

    def grow(
        self, parent: int, tokens: Sequence[int], log_probs: Sequence[float], drawn_from: Tensor | None = None
    ) -> list[int]:
        """Add children to a node, in the order in which they are to be tried; returns their numbers.

        log_probs: what the drafter gives each child after its parent. drawn_from: [V], for children that were drawn
        without replacement; None for the most likely ones.
        """
        first = len(self.tokens)
        self.tokens += tokens
        self.parents += [parent] * len(tokens)
        self.depths += [self.depths[parent] + 1] * len(tokens)
        self.scores += [self.scores[parent] + log_prob for log_prob in log_probs]
        assert len(self.scores) == len(self.tokens), "every child has its log-probability"
        if drawn_from is not None and tokens:
            self.draft_probs[parent] = drawn_from
        return list(range(first, len(self.tokens)))

    def best(self, nodes: Sequence[int], count: int, always: Sequence[int] = ()) -> list[int]:
        """The `count` of `nodes` (ascending) with the highest scores, ascending; `always` whatever their score.

        Of nodes that score alike the earlier is better, so what is chosen from the whole tree is connected: a child
        comes after its parent and never scores higher.
        """
        ranked = sorted(nodes, key=self.scores.__getitem__, reverse=True)  # stable: of equal ones the earlier is first
        if always:
            ranked = [*always, *(node for node in ranked if node not in always)]
        return sorted(ranked[: max(count, len(always))])

    def finalise(self, kept: Sequence[int] | None = None) -> GuessRows:
        """The rows of these nodes (ascending; node 0 is always one; None: all), each path of first children in a run.

        The path of first children is what the drafter finds likeliest; kept, it is in its place in the cache already.
        A kept node must have its parent kept. Drawn children are kept all or none: leaving out some of them by their
        scores would change the distribution that the others come from.
        """
        guesses = range(1, len(self.tokens)) if kept is None else kept
        below: dict[int, list[int]] = {}
        for node in guesses:
            if node:
                below.setdefault(self.parents[node], []).append(node)
        nodes, left = list[int](), [0]
        while left:
            nodes.append(left.pop())
            left += reversed(below.get(nodes[-1], ()))
        row_of = {node: row for row, node in enumerate(nodes)}
        assert all(parent in row_of for parent in below), "a guess without its parent means nothing"
        return GuessRows(
            tokens=[self.tokens[node] for node in nodes],
            parents=[row_of.get(self.parents[node], -1) for node in nodes],
            draft_probs={row_of[node]: probs for node, probs in self.draft_probs.items() if node in row_of},
        )


def padded_rows(trees: Sequence[GuessRows]) -> tuple[Tensor, Tensor | None, TreeRows]:
    """Trees of B sequences as one pass: ids int64 [B, T], how many rows of each count, and their geometry.

    The counts are int64 [B], or None where all rows count. Padding rows see themselves, hold token 0 and sit at the
    newest token's position; nothing sees them.
    """
    counts = [len(tree.tokens) for tree in trees]
    num_rows = max(counts)
    ids, depths, sets = [], [], list[int]()
    for tree, count in zip(trees, counts, strict=True):
        padding = [0] * (num_rows - count)
        ids.append(tree.tokens + padding)
        depths.append(tree.depths + padding)
        sets += ancestor_sets(tree.parents + [-1] * len(padding))
    visible = as_mask(sets, num_rows).view(len(trees), num_rows, num_rows)
    num_valid = None if min(counts) == num_rows else torch.tensor(counts)
    return torch.tensor(ids), num_valid, TreeRows(torch.tensor(depths), visible)
