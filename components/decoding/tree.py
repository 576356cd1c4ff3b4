"""A draft tree: rooted at the newest token, grown level by level, finalised into rows to verify.

Row 0 of a pass is the newest token x_n; every other row is a draft token. A row sees the cached positions, its
ancestors and itself, and sits at the position of its depth, so one pass of the target computes every path as a pass
over that path alone would. Chain, static tree and EAGLE-2's dynamic tree differ only in how they are grown
(tree_shapes.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from components.drafts.network.sampling import ancestor_sets, as_mask
from components.targets.interface import TreeRows


@dataclass(frozen=True)
class DraftTreeRows:
    """A finalised tree of T rows; parents come before their children."""

    tokens: list[int]  # [T]; row 0 is the newest token
    parents: list[int]  # [T]; -1 for row 0
    draft_probs: Mapping[int, Tensor] = field(default_factory=dict)
    """Row -> [V] the distribution its children were drawn from without replacement; absent for a row whose children are
    the drafter's most likely tokens (a deterministic proposal)."""

    @property
    def depths(self) -> list[int]:
        """The depth of each row: [T], 0 for row 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def children(self) -> list[list[int]]:
        """The rows below each row, in the order in which they are tried: [T] lists."""
        children: list[list[int]] = [[] for _ in self.parents]
        for row, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(row)
        return children

    def visible(self) -> Tensor:
        """The tree mask: each row sees itself and its ancestors; bool [T, T]."""
        return as_mask(ancestor_sets(self.parents), len(self.parents))

    def cut_below(self, deepest: int) -> DraftTreeRows:
        """The tree without the rows deeper than `deepest`; the others keep their order."""
        rows = [row for row, depth in enumerate(self.depths) if depth <= deepest]
        row_of = {row: index for index, row in enumerate(rows)}
        return DraftTreeRows(
            tokens=[self.tokens[row] for row in rows],
            parents=[row_of.get(self.parents[row], -1) for row in rows],
            draft_probs={row_of[row]: probs for row, probs in self.draft_probs.items() if row in row_of},
        )


@final
class DraftTree:
    """A tree while it grows. Node 0 is the newest token; scores are cumulative log-probabilities of the drafter."""

    def __init__(self, newest: int) -> None:
        """Start with the newest token alone, of score 0."""
        self.tokens, self.parents, self.depths, self.scores = [newest], [-1], [0], [0.0]
        self.draft_probs: dict[int, Tensor] = {}

    def grow(
        self, parent: int, tokens: Sequence[int], log_probs: Sequence[float], drawn_from: Tensor | None = None
    ) -> list[int]:
        """Add children to a node, in the order in which verification tries them; returns their numbers.

        log_probs: the drafter's log-probability of each child given its path. drawn_from: [V], the distribution of
        children that were drawn without replacement; None for the most likely ones.
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
        """The `count` of `nodes` (ascending) with the highest scores, ascending; those of `always` regardless.

        Ties go to the earlier node, so a selection from the whole tree is connected: a child comes after its parent and
        never scores higher.
        """
        ranked = sorted(nodes, key=self.scores.__getitem__, reverse=True)  # stable: ties keep their order
        if always:
            ranked = [*always, *(node for node in ranked if node not in always)]
        return sorted(ranked[: max(count, len(always))])

    def finalise(self, selected: Sequence[int] | None = None) -> DraftTreeRows:
        """The rows of the selected nodes (ascending; node 0 always; None: all), each path of first children contiguous.

        The path of first children is the drafter's most likely; if accepted, it needs no move in the cache. A selected
        node needs its parent selected. Drawn children are selected all or none: dropping some of them by their scores
        would change the distribution of the others.
        """
        nodes_to_verify = range(1, len(self.tokens)) if selected is None else selected
        children: dict[int, list[int]] = {}
        for node in nodes_to_verify:
            if node:
                children.setdefault(self.parents[node], []).append(node)
        nodes, stack = list[int](), [0]
        while stack:
            nodes.append(stack.pop())
            stack += reversed(children.get(nodes[-1], ()))
        row_of = {node: row for row, node in enumerate(nodes)}
        assert all(parent in row_of for parent in children), "a selected node needs its parent"
        return DraftTreeRows(
            tokens=[self.tokens[node] for node in nodes],
            parents=[row_of.get(self.parents[node], -1) for node in nodes],
            draft_probs={row_of[node]: probs for node, probs in self.draft_probs.items() if node in row_of},
        )


def padded_rows(trees: Sequence[DraftTreeRows]) -> tuple[Tensor, Tensor | None, TreeRows]:
    """Pad the trees of B sequences for one pass: ids int64 [B, T], numbers of valid rows, tree positions and masks.

    The numbers are int64 [B], or None where all rows are valid. Padding rows see themselves, hold token 0 and sit at
    the newest token's position; nothing sees them.
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
