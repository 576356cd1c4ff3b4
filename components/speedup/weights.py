"""What rounding a drafter's weights costs in acceptance: the rounded drafter against the one that it was made from.

Both have maps of the same prompts, so their acceptance lengths are compared prompt by prompt: every draw of prompts
serves both, and what makes a prompt hard cancels. The depth is the one that the rounded drafter is to serve with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from components.rows import AcceptanceMap
from components.speedup.bootstrap import Estimate, draw_weights
from components.speedup.replay import acceptance_length


class Rounded(NamedTuple):
    """A drafter's weights as its maps say. weights: "int4, groups of 32"; made_from: draft_key of the unrounded one."""

    weights: str
    made_from: str


@dataclass(frozen=True)
class WeightsCost:
    """One rounded drafter at one depth on the prompts that both have maps of; 95 % intervals over prompts.

    al, al_before: tokens kept a round, rounded and as trained. change: al - al_before, resampled together.
    verdict: lower (change_hi < 0), higher (change_lo > 0), else undecided: no difference shown. On fewer prompts than
        LEAST_PROMPTS, also by what they are worth, always undecided.
    """

    draft_key: str
    quantised_from: str
    method: str
    weights: str
    depth_k: int
    num_prompts: int
    al: float
    al_lo: float
    al_hi: float
    al_before: float
    change: float
    change_lo: float
    change_hi: float
    verdict: str

    @property
    def in_words(self) -> str:
        """One line for a reader."""
        told = {"lower": "lower", "higher": "higher"}.get(self.verdict, "no difference shown")
        return (
            f"{self.method} in {self.weights}: acceptance length {self.al:.2f} at depth {self.depth_k}, "
            f"{self.change:+.3f} [{self.change_lo:+.3f}, {self.change_hi:+.3f}] against {self.al_before:.2f} as "
            f"trained, over {self.num_prompts} prompts: {told}"
        )


def weights_costs(
    maps: Mapping[str, Sequence[AcceptanceMap]], depths: Mapping[str, int], num_draws: int, seed: int
) -> list[WeightsCost]:
    """One for each rounded drafter whose original was measured too, in the order of their keys.

    maps: draft_key -> its chain maps. depths: draft_key -> the depth it is to serve with; 0, or none, compares at the
    deepest that both were mapped at.
    """
    found = []
    for key in sorted(maps):
        rounded = rounded_of(maps[key])
        if rounded is None or not maps.get(rounded.made_from):
            continue
        now, before = ({m.prompt_id: m for m in maps[one]} for one in (key, rounded.made_from))
        shared = sorted(now.keys() & before.keys())
        deepest = min((m.k_max for one in (now, before) for m in one.values()), default=0)
        if not shared or deepest < 1:
            continue
        depth = min(depths.get(key) or deepest, deepest)
        weights = draw_weights(len(shared), num_draws, np.random.default_rng([seed, 9]))
        al, al_before = (acceptance_length([one[p] for p in shared], depth, weights) for one in (now, before))
        change = al.minus_paired(al_before)
        (al_lo, al_hi), (lo, hi) = al.interval(), change.interval()
        found.append(
            WeightsCost(
                draft_key=key,
                quantised_from=rounded.made_from,
                method=maps[key][0].method,
                weights=rounded.weights,
                depth_k=depth,
                num_prompts=len(shared),
                al=al.value,
                al_lo=al_lo,
                al_hi=al_hi,
                al_before=al_before.value,
                change=change.value,
                change_lo=lo,
                change_hi=hi,
                verdict=_verdict(change),
            )
        )
    return found


def rounded_of(maps: Sequence[AcceptanceMap]) -> Rounded | None:
    """How the drafter of these maps stores its weights; None for one as it was trained."""
    return Rounded(maps[0].weights, maps[0].quantised_from) if maps and maps[0].weights else None


def _verdict(change: Estimate) -> str:
    if not change.is_decisive:
        return "undecided"
    lo, hi = change.interval()
    return "lower" if hi < 0.0 else "higher" if lo > 0.0 else "undecided"
