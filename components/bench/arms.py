"""The arms of a comparison: plain decoding, prompt lookup, each drafter loaded but off and at the depths worth it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from components.contract import DepthPolicy, UserError
from components.outside_json import read_object

Depths = Literal["around", "all"] | list[int]


EDGE_DEPTHS = (3, 7)
"""Draft counts that engines on phones and laptops are usually shipped with; shown beside the chosen depth."""


@dataclass(frozen=True)
class Arm:
    """One way of decoding, as the process that runs it is told.

    method: "none" for plain decoding. draft_key: "" where there is no trained drafter. A depth of 0 with a drafter:
    loaded, but off (loaded_off.py). on_rival: plain decoding on the plain kernels, the second baseline. tree_budget:
    guesses verified in a pass where they branch (depth is then the tree's); None for a chain.
    """

    method: str
    draft_key: str
    depth: int
    on_rival: bool = False
    tree_budget: int | None = None

    @property
    def is_plain(self) -> bool:
        """Nothing drafts, on either kernel."""
        return self.method == "none"

    @property
    def is_baseline(self) -> bool:
        """Plain decoding on the kernel that all drafters use: the run that others are compared with for identity."""
        return self.is_plain and not self.on_rival

    @property
    def is_off(self) -> bool:
        """A drafter is loaded and drafts nothing."""
        return not self.is_plain and self.depth == 0

    @property
    def label(self) -> str:
        """How tables and notes call it."""
        if self.is_plain:
            return "plain on plain kernels" if self.on_rival else "plain"
        if self.tree_budget is not None:
            return f"{self.method} k={self.depth} tree of {self.tree_budget}"
        return f"{self.method} k={self.depth}" if self.depth else f"{self.method} off"

    @property
    def depth_of_loop(self) -> int:
        """What the decoding loop is asked for: a drafter that is off is asked for a guess and gives none."""
        return self.depth if self.is_plain else max(1, self.depth)

    @property
    def rows_of_pass(self) -> int:
        """Rows of its verification pass: the newest token and every guess."""
        return 1 + (self.tree_budget or self.depth)


PLAIN = Arm("none", "", 0)
RIVAL = Arm("none", "", 0, on_rival=True)


def chosen_depths(policy: DepthPolicy) -> Mapping[str, frozenset[int]]:
    """draft_key -> the depths that the policy chose over all workloads, at one batch size or another, and the one
    that a released drafter serves at; 0 left out.

    Raises UserError when the artifact is not a depth policy.
    """
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(
            f"{policy.path}: no policy.json: not a DepthPolicy artifact; make one with speedup.choose_depth"
        )
    written = read_object(file)
    found: dict[str, set[int]] = {key: {depth} for key, depth in written.get("served", {}).items() if depth > 0}
    for choice in written["choices"]:
        if choice["workload"] == "all" and choice["depth_k"] > 0:
            found.setdefault(choice["draft_key"], set()).add(int(choice["depth_k"]))
    return {key: frozenset(depths) for key, depths in found.items()}


def depths_to_run(which: Depths, chosen: Collection[int], deepest: int) -> list[int]:
    """The depths of one drafter, ascending.

    "around": the chosen depths and their neighbours, 1, the edge settings and the deepest; "all": 1 to the deepest, and
    the chosen ones; a list: those of it that the drafter can reach. `deepest` is the trained depth for the first two; a
    depth chosen beyond it (acceptance and cost may be measured deeper) is run too, for it cannot be confirmed else.
    """
    if which == "around":
        wanted: Iterable[int] = (1, *(k + near for k in chosen for near in (-1, 0, 1)), *EDGE_DEPTHS, deepest)
    elif which == "all":
        wanted = range(1, deepest + 1)
    else:
        wanted, chosen = which, ()
    return sorted({depth for depth in wanted if 1 <= depth <= deepest} | set(chosen))
