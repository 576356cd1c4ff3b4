"""The arms of a comparison: plain decoding, prompt lookup, and each drafter loaded but off and at several depths.

The arm "loaded, off": a drafter that keeps its state at every token, so that it could draft, but proposes nothing.

An engine does this for a request without speculation while a drafter is in memory: the target computes the features,
the drafter gets every committed column and updates its state, and each round verifies no draft token. The cost of the
update differs: a drafter with one cache (the EAGLE family, a draft model) runs a pass over the column; mtp and
mtp-parallel only store it, and pay when drafting resumes; prompt lookup adds it to its index; medusa keeps nothing. The
arm's speed against plain decoding, with nothing loaded, is the overhead of enabled speculation (vLLM #49548 saw 7 to
22 %), and includes that update.

The tree of a budget (the draft tokens that one pass verifies) is the same in acceptance maps, cost cells and end-to-end
arms, so that they can be combined: EAGLE-2's dynamic tree in which only the chain is expanded
(decoding/tree_shapes.py), as deep as the drafter's trained depth and the budget allow.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from components.bench.settings import DepthsToRun
from components.contract import DepthPolicy, Draft, UserError
from components.decoding.batch import propose_each
from components.decoding.tree_shapes import DynamicShape
from components.drafts.interface import CommittedPositions, Proposal, Proposer, Sampling, TreeProposer
from components.drafts.storage.files import read_record
from components.methods import decoding_loop_of
from components.outside_json import JsonObject
from components.policy import read_policy
from components.rows import ALL
from components.stop_rule import StopRule
from components.targets.interface import AbstractTarget, check_verifies_trees

EDGE_DEPTHS = (3, 7)
"""Draft counts that engines on phones and laptops are usually shipped with; shown beside the chosen depth."""
TOP_K = 4  # children of an expanded node of a tree
WIDTH = 1  # nodes expanded a level: on the built-in target, more cost more drafting time than they save


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    method: "none" for plain decoding. draft_key: "" without a trained drafter. A depth of 0 with a drafter: loaded, but
    off (arms.py). on_rival: plain decoding on the plain kernels, the second baseline. tree_budget: draft tokens
    verified in a pass of a tree (depth is then the tree's); None for a chain. stop: ends chains before `depth`.
    """

    method: str
    draft_key: str
    depth: int
    on_rival: bool = False
    tree_budget: int | None = None
    stop: StopRule | None = None

    @classmethod
    def of_json(cls, fields: JsonObject) -> Arm:
        """The arm whose fields were written as JSON."""
        stop = fields["stop"]
        return cls(**{**fields, "stop": None if stop is None else StopRule.of_json(stop)})

    @property
    def is_plain(self) -> bool:
        """Whether it is plain decoding, on either kernel."""
        return self.method == "none"

    @property
    def is_baseline(self) -> bool:
        """Whether it is plain decoding on the kernel that all drafters use: outputs are compared with this arm's."""
        return self.is_plain and not self.on_rival

    @property
    def is_off(self) -> bool:
        """Whether a drafter is loaded but drafts nothing."""
        return not self.is_plain and self.depth == 0

    @property
    def label(self) -> str:
        """Its name in tables and notes."""
        if self.is_plain:
            return "plain on plain kernels" if self.on_rival else "plain"
        if self.tree_budget is not None:
            return f"{self.method} k={self.depth} tree of {self.tree_budget}"
        if self.stop is not None:
            return f"{self.method} k<={self.depth} by {'p_min' if self.stop.is_single_threshold else 'confidence'}"
        return f"{self.method} k={self.depth}" if self.depth else f"{self.method} off"

    @property
    def depth_of_loop(self) -> int:
        """The depth for the decoding loop: 1 for a drafter that is off, which then proposes nothing."""
        return self.depth if self.is_plain else max(1, self.depth)

    @property
    def rows_of_pass(self) -> int:
        """Rows of its verification pass: the newest token and every draft token."""
        return 1 + (self.tree_budget or self.depth)


PLAIN = Arm("none", "", 0)
RIVAL = Arm("none", "", 0, on_rival=True)


def read_policy_depths(policy: DepthPolicy) -> Mapping[str, frozenset[int]]:
    """draft_key -> the depths above 0 that the policy chose over all workloads at any batch size, and the served depth.

    Raises UserError when the artifact is not a depth policy.
    """
    content = read_policy(policy.path)
    depths_of: dict[str, set[int]] = {key: {depth} for key, depth in content.served.items() if depth > 0}
    for choice in content.choices:
        if choice.workload == ALL and choice.depth_k > 0:
            depths_of.setdefault(choice.draft_key, set()).add(choice.depth_k)
    return {key: frozenset(depths) for key, depths in depths_of.items()}


def depths_to_run(which: DepthsToRun, policy_depths: Collection[int], deepest: int) -> list[int]:
    """The depths of one drafter, ascending.

    "around": the policy's depths and their neighbours, 1, EDGE_DEPTHS and the deepest; "all": 1 to the deepest, and the
    policy's; a list: those of it that the drafter can reach. `deepest` is the trained depth for the first two; a policy
    depth beyond it (acceptance and cost may be measured deeper) is run too, so that it can be confirmed.
    """
    if which == "around":
        neighbours = (k + step for k in policy_depths for step in (-1, 0, 1))
        candidates: Iterable[int] = (1, *neighbours, *EDGE_DEPTHS, deepest)
    elif which == "all":
        candidates = range(1, deepest + 1)
    else:
        candidates, policy_depths = which, ()
    return sorted({depth for depth in candidates if 1 <= depth <= deepest} | set(policy_depths))


def tree_shape(deepest: int, budget: int) -> DynamicShape:
    """The tree of a budget for a drafter of chains of at most `deepest` tokens."""
    return DynamicShape(depth=min(deepest, budget), top_k=min(TOP_K, budget), budget=budget, width=WIDTH)


def tree_arms(method: str, draft_key: str, trained_depth: int, budgets: Sequence[int]) -> list[Arm]:
    """The arms of a drafter's trees, by ascending budget."""
    depths = {budget: tree_shape(trained_depth, budget).depth for budget in sorted(set(budgets))}
    return [Arm(method, draft_key, depth, tree_budget=budget) for budget, depth in depths.items()]


def check_branching(target: AbstractTarget, proposer: Proposer, budgets: Sequence[int]) -> None:
    """Raises UserError for trees with a method that cannot branch, or a target that cannot verify them."""
    if budgets and not isinstance(proposer, TreeProposer):
        raise UserError(f"trees: the guesses of {proposer.method} do not branch: leave trees empty for it")
    if budgets:
        check_verifies_trees(target)


def check_loop_supports(draft: Draft, batch_sizes: Sequence[int], trees: Sequence[int]) -> None:
    """Raises UserError for batches or trees with a method that has a decoding loop of its own."""
    method = read_record(draft.path)["method"]
    if not decoding_loop_of(method):
        return
    if max(batch_sizes, default=1) > 1:
        raise UserError(
            f"batch_sizes: {method} ({draft.key[:12]}) decodes one sequence at a time: set batch_sizes [1], or leave "
            "the drafter out"
        )
    if trees:
        raise UserError(f"trees: {method} ({draft.key[:12]}) decodes chains alone: set trees [], or leave it out")


def make_idle(proposer: Proposer) -> Proposer:
    """The same drafter, loaded but off."""
    return cast(Proposer, IdleDrafter(proposer))


class IdleDrafter:
    """A Proposer that updates the state of another one and proposes nothing."""

    def __init__(self, proposer: Proposer) -> None:
        self.inner, self.needs_features = proposer, proposer.needs_features
        self.method = f"{proposer.method} off"  # decoded by the ordinary loop, even if the method has its own
        self.max_depth = self.num_steps = 1  # the loop asks for one token a round and gets none

    def new_state(self, capacity: int) -> Any:
        """The wrapped drafter's own state."""
        return self.inner.new_state(capacity)

    def propose(
        self, state: Any, columns: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """Update the state with the columns; propose nothing."""
        return self.inner.propose(state, columns, 0, sampling, rng)

    def propose_batch(
        self,
        states: Sequence[Any],
        columns: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As `propose`, for every sequence."""
        return propose_each(self.inner, states, columns, [0] * len(states), sampling, rngs)
