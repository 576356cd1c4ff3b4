"""Trees over logits that follow from the path alone, so that they can be computed again by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from components.decoding.tree import DraftTreeRows
from components.decoding.tree_shapes import TreeShape
from components.drafts.interface import Branches, Sampling

VOCAB = 12


DRAFT_IDS = torch.arange(1, VOCAB, 2)  # target ids of the draft vocabulary


GREEDY = Sampling()


def logits_after(path: tuple[int, ...], seed: int) -> Tensor:
    """A drafter's logits [N] after a path of guesses: anything, but the same each time."""
    number = seed
    for token in path:
        number = number * 31 + token + 1
    return 2 * torch.randn(len(DRAFT_IDS), generator=torch.Generator().manual_seed(number))


class HashedBranches(Branches):
    """Guesses that depend on their whole path."""

    def __init__(self, seed: int) -> None:
        self.seed, self.paths = seed, list[tuple[int, ...]]()
        self.root = logits_after((), seed)

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        new = [
            (*(self.paths[parent] if parent >= 0 else ()), token)
            for parent, token in zip(parents, tokens.tolist(), strict=True)
        ]
        assert len({len(path) for path in new}) == 1
        assert not set(new) & set(self.paths)
        self.paths += new
        return torch.stack([logits_after(path, self.seed) for path in new])


def grow(shape: TreeShape, seed: int, sampling: Sampling = GREEDY) -> DraftTreeRows:
    rng = torch.Generator().manual_seed(seed)
    return shape.grow(HashedBranches(seed), 99, DRAFT_IDS, VOCAB, sampling, rng)
