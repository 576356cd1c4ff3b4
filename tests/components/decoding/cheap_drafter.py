"""A drafter so cheap that the distribution of whole runs can be counted, and that distribution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from components.drafts.interface import Branches, CommittedPositions, Sampling
from components.drafts.network.sampling import probabilities
from components.targets.interface import AbstractTarget

PROMPTS = ([5, 9, 2, 7], [3], [11, 4, 4, 8, 30, 2, 6, 19, 25])


class Cheap:
    """Knows how likely each token is at each place on average, and adds whims of its own to it, path by path."""

    method: ClassVar[str] = "cheap"
    needs_features: ClassVar[bool] = False
    max_depth = 4

    def __init__(self, cells: dict[tuple[int, ...], float]) -> None:
        tokens = sorted({token for said in cells for token in said})
        self.draft_ids = torch.tensor(tokens)
        self.means = torch.full((3, len(tokens)), 0.02)
        for said, chance in cells.items():
            for place, token in enumerate(said):
                self.means[place, tokens.index(token)] += chance

    def new_state(self, capacity: int) -> list[int]:
        return []

    def propose(self, *_: object) -> None:
        raise AssertionError("only trees are asked for")

    def begin(self, state: list[int], columns: CommittedPositions, depth: int) -> Branches:
        state += columns.next_tokens.tolist()
        return CheapBranches(self.means, state[-1], len(state) - len(PROMPTS[0]) + 1)


class CheapBranches(Branches):
    def __init__(self, means: Tensor, newest: int, place: int) -> None:
        self.means, self.paths = means, [(newest,)]
        self.place = place  # output tokens known so far
        self.root = self.logits((newest,))

    def logits(self, path: tuple[int, ...]) -> Tensor:
        whims = [((sum(path) * 7 + i * i * 3 + i) % 11) / 8 for i in range(self.means.shape[1])]
        return self.means[min(2, self.place + len(path) - 1)].log() + torch.tensor(whims)

    def expand(self, parents: Sequence[int], tokens: Tensor) -> Tensor:
        new = [(*self.paths[parent + 1], token) for parent, token in zip(parents, tokens.tolist(), strict=True)]
        self.paths += new
        return torch.stack([self.logits(path) for path in new])


def exact_triples(target: AbstractTarget, prompt: list[int], hot: Sampling) -> dict[tuple[int, ...], float]:
    """The target's distribution of the first three output tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        ids = torch.tensor([[*prompt, *said] for said in found])
        logits = target.forward(ids, target.new_cache(*ids.shape), logits="last").logits
        assert logits is not None
        probs = probabilities(logits[:, 0], hot)
        found = {
            (*said, token): chance * float(probs[row, token])
            for row, (said, chance) in enumerate(found.items())
            for token in probs[row].nonzero().flatten().tolist()
        }
    return found
