"""The cost of rounding a drafter's weights in acceptance: the rounded drafter against its original.

Both have maps of the same prompts, so their acceptance lengths are compared prompt by prompt: every draw of prompts
serves both, and what makes a prompt hard cancels. The depth is the one at which the rounded drafter is to serve.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.policy import WeightsCost
from components.rows import AcceptanceMap
from components.speedup.bootstrap import Estimate, draw_weights
from components.speedup.prediction.replay import acceptance_length


class Rounded(NamedTuple):
    """Storage of a rounded drafter. weights: "int4, groups of 32". original_key: draft_key before rounding."""

    weights: str
    original_key: str


def weights_costs(
    maps: Mapping[str, Sequence[AcceptanceMap]], depths: Mapping[str, int], num_draws: int, seed: int
) -> list[WeightsCost]:
    """The costs of each rounded drafter whose original was measured too, in the order of their keys.

    maps: draft_key -> its chain maps. depths: draft_key -> the depth at which it is to serve; without one, or at 0, the
    deepest common depth is compared.
    """
    costs = []
    for key in sorted(maps):
        rounded = rounded_of(maps[key])
        if rounded is None or not maps.get(rounded.original_key):
            continue
        now, before = ({m.prompt_id: m for m in maps[by_prompt]} for by_prompt in (key, rounded.original_key))
        shared = sorted(now.keys() & before.keys())
        deepest = min((m.k_max for by_prompt in (now, before) for m in by_prompt.values()), default=0)
        if not shared or deepest < 1:
            continue
        depth = min(depths.get(key) or deepest, deepest)
        weights = draw_weights(len(shared), num_draws, np.random.default_rng([seed, 9]))
        al, al_before = (
            acceptance_length([by_prompt[p] for p in shared], depth, weights) for by_prompt in (now, before)
        )
        change = al.minus_paired(al_before)
        (al_lo, al_hi), (lo, hi) = al.interval(), change.interval()
        costs.append(
            WeightsCost(
                draft_key=key,
                quantised_from=rounded.original_key,
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
    return costs


def rounded_of(maps: Sequence[AcceptanceMap]) -> Rounded | None:
    """The storage of the drafter of these maps; None for a drafter that was not rounded."""
    return Rounded(maps[0].weights, maps[0].quantised_from) if maps and maps[0].weights else None


def _verdict(change: Estimate) -> str:
    if not change.is_decisive:
        return "undecided"
    lo, hi = change.interval()
    return "lower" if hi < 0.0 else "higher" if lo > 0.0 else "undecided"
