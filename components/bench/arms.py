"""The arms of a comparison: plain decoding, prompt lookup, and each drafter at the depths worth running."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from components.contract import DepthPolicy, UserError

if TYPE_CHECKING:
    from components.drafts.draft import Proposer
    from components.targets.model import AbstractTarget

Depths = Literal["around", "all"] | list[int]


@dataclass(frozen=True)
class Arm:
    """One way of decoding. proposer None and depth 0 is plain decoding."""

    method: str  # "none" for plain decoding
    draft_key: str  # "" where there is no trained drafter
    depth: int
    proposer: Proposer | None
    target: AbstractTarget | None = None  # its own, where it runs on another kernel than the session

    @property
    def is_baseline(self) -> bool:
        """Plain decoding on the kernel that all drafters use: the run that others are compared with for identity."""
        return self.method == "none" and self.target is None

    @property
    def label(self) -> str:
        """How tables and notes call it."""
        return "plain" if self.depth == 0 else f"{self.method} k={self.depth}"


PLAIN = Arm("none", "", 0, None)


def chosen_depths(policy: DepthPolicy) -> Mapping[str, int]:
    """draft_key -> the depth that the policy chose over all workloads.

    Raises UserError when the artifact is not a depth policy.
    """
    file = policy.path / "policy.json"
    if not file.is_file():
        raise UserError(
            f"{policy.path}: no policy.json: not a DepthPolicy artifact; make one with speedup.choose_depth"
        )
    choices = json.loads(file.read_text(encoding="utf-8"))["choices"]
    return {choice["draft_key"]: int(choice["depth_k"]) for choice in choices if choice["workload"] == "all"}


def depths_to_run(which: Depths, chosen: int, deepest: int) -> list[int]:
    """The depths of one drafter, ascending.

    "around": the chosen depth and its neighbours, 1, and the deepest; "all": 1 to the deepest; a list: those of it that
    the drafter can reach. `deepest` is the trained depth for the first two.
    """
    if which == "around":
        wanted: Sequence[int] = (1, chosen - 1, chosen, chosen + 1, deepest)
    elif which == "all":
        wanted = range(1, deepest + 1)
    else:
        wanted = which
    return sorted({depth for depth in wanted if 1 <= depth <= deepest})
