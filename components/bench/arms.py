"""The arms of a comparison: plain decoding, prompt lookup, and each drafter loaded but off and at several depths."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from components.contract import DepthPolicy, UserError
from components.outside_json import read_object
from components.rows import ALL

Depths = Literal["around", "all"] | list[int]


EDGE_DEPTHS = (3, 7)
"""Draft counts that engines on phones and laptops are usually shipped with; shown beside the chosen depth."""


@dataclass(frozen=True)
class Arm:
    """One way of decoding.

    method: "none" for plain decoding. draft_key: "" without a trained drafter. A depth of 0 with a drafter: loaded, but
    off (loaded_off.py). on_rival: plain decoding on the plain kernels, the second baseline. tree_budget: draft tokens
    verified in a pass of a tree (depth is then the tree's); None for a chain.
    """

    method: str
    draft_key: str
    depth: int
    on_rival: bool = False
    tree_budget: int | None = None

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
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(
            f"{policy.path}: no policy.json: not a DepthPolicy artifact; make one with speedup.choose_depth"
        )
    policy_record = read_object(file)
    served = policy_record.get("served", {})
    depths_of: dict[str, set[int]] = {key: {depth} for key, depth in served.items() if depth > 0}
    for choice in policy_record["choices"]:
        if choice["workload"] == ALL and choice["depth_k"] > 0:
            depths_of.setdefault(choice["draft_key"], set()).add(int(choice["depth_k"]))
    return {key: frozenset(depths) for key, depths in depths_of.items()}


def depths_to_run(which: Depths, policy_depths: Collection[int], deepest: int) -> list[int]:
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
