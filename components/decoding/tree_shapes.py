"""How a draft tree grows: a fixed shape, or EAGLE-2's, which follows the drafter's confidence.

Static: the shape fixes the children of every node: Medusa's choice of paths (Cai et al. 2024, arXiv:2401.10774, section
2.1.2), a number of children per level, or a chain. Greedy: child r is the drafter's r-th most likely token.
Sampled: the children of a node are drawn from the drafter without replacement and tried in that order.

Dynamic: Li et al. 2024, "EAGLE-2", arXiv:2406.16858, section 4. A node's value is the product of the drafter's
probabilities on its path. Each level expands the `top_k` nodes of the highest value by `top_k` children (their
expansion phase); of all nodes then the `budget` best are verified (their reranking phase), which stay connected,
because no child has a higher value than its parent. Nothing is drawn at random, so a sampled run verifies the tree as
a deterministic proposal. Deviations: the chain of most likely tokens is always expanded and kept
(`keep_chain`), so no position accepts less than the chain of that depth; with few nodes the published rule drops it.
`width` may expand fewer nodes a level than top_k: with 1 a tree is drafted at the cost of a chain, and its siblings
cost only their rows in the verification pass.

A stop rule (components/stop_rule.py) prunes either shape. A node's confidence is the probability that the drafter gives
it at temperature 1, also where the method has a head that says it for chains; its survival is that of its parent times
the curve of its depth. Likeliest children below `verify_from` are left out; nodes below `draft_from` are not expanded.
Both keep the distribution: a deterministic tree may be any tree. Drawn children come all or none, by the likeliest
token of what they would be drawn from and before they are drawn: leaving out drawn ones by what they are would change
the distribution of the others. What was drawn counts for the nodes below it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

from components.contract import UserError
from components.decoding.session import is_greedy
from components.decoding.tree import DraftTree, DraftTreeRows
from components.drafts.interface import Branches, Sampling
from components.drafts.network.sampling import confidence_of, probabilities
from components.stop_rule import StopRule


class TreeShape(Protocol):
    """How to grow one round's tree."""

    @property
    def depth(self) -> int:
        """The depth of the deepest draft token."""

    @property
    def num_draft_tokens(self) -> int:
        """The most draft tokens that a round verifies."""

    def grow(
        self,
        branches: Branches,
        newest: int,
        draft_ids: Tensor,
        vocab_size: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> DraftTreeRows:
        """Grow a finished tree after the newest token. draft_ids: int64 [N], the target ids of the drafter's logits."""


@dataclass(frozen=True)
class StaticShape:
    """Paths of ranks from the newest token: (0,) is the best first draft token, (0, 1) the second best after it."""

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise UserError("tree: it has no paths: give at least one guess")
        paths = {(), *self.paths}
        for path in self.paths:
            required = [path[:-1], *((*path[:-1], rank) for rank in range(path[-1]))] if path else []
            if not path or min(path) < 0 or any(needed not in paths for needed in required):
                raise UserError(f"tree: path {path} needs its beginning and all lower ranks at its end among the paths")

    @classmethod
    def chain(cls, depth: int) -> StaticShape:
        """One draft token per level."""
        return cls.branching([1] * depth)

    @classmethod
    def branching(cls, counts: Sequence[int]) -> StaticShape:
        """Every node of level i has counts[i] children."""
        paths: list[tuple[int, ...]] = []
        level: list[tuple[int, ...]] = [()]
        for count in counts:
            level = [(*path, rank) for path in level for rank in range(count)]
            paths += level
        return cls(tuple(paths))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def num_draft_tokens(self) -> int:
        return len(self.paths)

    def grow(
        self,
        branches: Branches,
        newest: int,
        draft_ids: Tensor,
        vocab_size: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> DraftTreeRows:
        """As TreeShape; nodes get fewer children where the drafter has fewer possible tokens."""
        tree, ids = DraftTree(newest), draft_ids.cpu()
        pruning = _Pruning(sampling.stop, tree)
        num_children: dict[tuple[int, ...], int] = {}
        for path in self.paths:
            num_children[path[:-1]] = max(num_children.get(path[:-1], 0), path[-1] + 1)
        parents: list[tuple[int, tuple[int, ...]]] = [(0, ())]  # nodes to grow, and their paths
        logits, numbering = branches.root[None], _NodeNumbering()
        while parents:
            children: list[tuple[int, tuple[int, ...]]] = []
            for row, (node, path) in enumerate(parents):
                count = num_children[path]
                if is_greedy(sampling):
                    tokens, log_probs = _most_likely(logits[row : row + 1], ids, count)
                    new = pruning.grow(node, tokens[0], log_probs[0])
                elif pruning.leaves_out(node, logits[row]):
                    continue
                else:
                    probs = torch.zeros(vocab_size).index_copy_(0, ids, probabilities(logits[row], sampling).cpu())
                    drawn = draw_distinct(probs, count, rng)
                    new = tree.grow(node, drawn, probs[drawn].log().tolist(), drawn_from=probs)
                    pruning.note_drawn(new, logits[row], ids)
                children += [(child, (*path, rank)) for rank, child in enumerate(new)]
            parents = [(node, path) for node, path in children if path in num_children and pruning.expands(node)]
            if parents:
                logits = numbering.expand(branches, tree, [node for node, _ in parents], draft_ids.device)
        return tree.finalise()


@dataclass(frozen=True)
class DynamicShape:
    """EAGLE-2's tree; keep_chain False and width None are the published rule."""

    depth: int = 5
    top_k: int = 4
    budget: int = 12
    keep_chain: bool = True
    width: int | None = None  # nodes expanded a level; None: top_k, as published

    def __post_init__(self) -> None:
        if min(self.depth, self.top_k, self.budget, 1 if self.width is None else self.width) < 1:
            raise UserError("tree: depth, top_k, budget and width must be at least 1")
        if self.keep_chain and self.budget < self.depth:
            raise UserError(f"tree: a budget of {self.budget} guesses cannot hold a chain of {self.depth}")

    @property
    def num_draft_tokens(self) -> int:
        return self.budget

    def grow(
        self,
        branches: Branches,
        newest: int,
        draft_ids: Tensor,
        vocab_size: int,
        sampling: Sampling,
        rng: torch.Generator,
    ) -> DraftTreeRows:
        """As TreeShape, deterministic at every temperature; node values are the drafter's at temperature 1."""
        tree, ids, numbering = DraftTree(newest), draft_ids.cpu(), _NodeNumbering()
        pruning = _Pruning(sampling.stop, tree)
        parents, logits, chain = [0], branches.root[None], [0]
        for level in range(1, self.depth + 1):
            tokens, log_probs = _most_likely(logits, ids, self.top_k)
            new: list[int] = []
            for node, children, scores in zip(parents, tokens, log_probs, strict=True):
                added = pruning.grow(node, children, scores)
                new += added
                if node == chain[-1] and self.keep_chain and len(chain) == level:
                    chain += added[:1]
            if level == self.depth:
                break
            width = self.top_k if self.width is None else self.width
            best = tree.best(new, width, always=chain[level:])
            parents = [node for node in best if pruning.expands(node)]
            if not parents:
                break
            logits = numbering.expand(branches, tree, parents, draft_ids.device)
        drafted = range(1, len(tree.tokens))
        return tree.finalise(tree.best(drafted, self.budget, always=chain[1:]))


@final
class _Pruning:
    """What a stop rule leaves of a tree; without one, everything. See the module docstring."""

    def __init__(self, rule: StopRule | None, tree: DraftTree) -> None:
        self.rule, self.tree = rule, tree
        self.survival = {0: 1.0}  # of each node

    def grow(self, node: int, tokens: Sequence[int], log_probs: Sequence[float]) -> list[int]:
        """Add the likeliest children of a node, in descending order, as far as they survive."""
        if self.rule is None:
            return self.tree.grow(node, tokens, log_probs)
        survivals = self._below(node, [math.exp(log_prob) for log_prob in log_probs])
        count = sum(survival >= self._least(node) for survival in survivals)
        new = self.tree.grow(node, tokens[:count], log_probs[:count])
        self.survival.update(zip(new, survivals, strict=False))
        return new

    def leaves_out(self, node: int, logits: Tensor) -> bool:
        """Whether no children are drawn below a node from logits [N]."""
        if self.rule is None:
            return False
        return self._below(node, [float(confidence_of(logits))])[0] < self._least(node)

    def note_drawn(self, new: Sequence[int], logits: Tensor, ids: Tensor) -> None:
        """Children of one node that were drawn from logits [N] of these target ids, ascending."""
        if self.rule is not None and new:
            rows = torch.searchsorted(ids, torch.tensor([self.tree.tokens[node] for node in new]))
            confidences = logits.float().softmax(-1).cpu()[rows].tolist()
            self.survival.update(zip(new, self._below(self.tree.parents[new[0]], confidences), strict=True))

    def expands(self, node: int) -> bool:
        """Whether a node may get children."""
        depth = self.tree.depths[node]
        return self.rule is None or (depth < self.rule.depth and self.survival[node] >= self.rule.draft_from[depth])

    def _below(self, node: int, confidences: Sequence[float]) -> list[float]:
        assert self.rule is not None
        depth = self.tree.depths[node]
        return [self.rule.survival(depth, self.survival[node], confidence) for confidence in confidences]

    def _least(self, node: int) -> float:
        assert self.rule is not None
        return self.rule.verify_from[self.tree.depths[node]]


class _NodeNumbering:
    """Translates between nodes of a tree and the numbers that Branches gives to those it has expanded."""

    def __init__(self) -> None:
        self.numbers: dict[int, int] = {0: -1}

    def expand(self, branches: Branches, tree: DraftTree, nodes: Sequence[int], device: torch.device) -> Tensor:
        parents = [self.numbers[tree.parents[node]] for node in nodes]
        for node in nodes:
            self.numbers[node] = len(self.numbers) - 1
        return branches.expand(parents, torch.tensor([tree.tokens[node] for node in nodes], device=device))


def _most_likely(logits: Tensor, ids: Tensor, count: int) -> tuple[list[list[int]], list[list[float]]]:
    """Target ids and log-probabilities of the `count` best of each row of [F, N]."""
    best = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
    return ids.take(best.indices.cpu()).tolist(), best.values.tolist()


def draw_distinct(probs: Tensor, count: int, rng: torch.Generator) -> list[int]:
    """Up to `count` different tokens from [V], as drawn one after the other without replacement, in that order.

    The largest p / Exp(1) are such a draw (Efraimidis & Spirakis 2006; Gumbel-top-k of Kool et al. 2019,
    arXiv:1903.06059). Tokens of probability 0 never come.
    """
    noise = torch.empty(probs.shape[0]).exponential_(generator=rng)
    best = (probs / noise).topk(min(count, int((probs > 0).sum())))
    return best.indices.tolist()
