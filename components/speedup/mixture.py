"""One depth for several workloads, and what it costs against each at its own.

With shares w of the tokens that are decoded, plain decoding takes as long for every token, so times add up and
    S_mix(k) = 1 / sum_i w_i / S_i(k)            (a weighted harmonic mean)
A depth of its own for each workload gives 1 / sum_i w_i / S_i(k_i), and 1 minus the quotient is the loss. Without
stated shares, those of the measured prompts hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from components.contract import UserError
from components.rows import DepthChoice
from components.speedup.bootstrap import Estimate, joined_sample
from components.speedup.candidate import Mixture
from components.speedup.evaluate import Identity, Rule, Speeds, choice_row

MIXTURE = "mixture"


def stated_shares(mixture: Mapping[str, float], workloads: list[str]) -> dict[str, float]:
    """The shares of a stated mixture, scaled to add up to 1.

    Raises:
        UserError: a workload that was not measured, a share that is negative or no number, or nothing but zeros.
    """
    unknown = sorted(set(mixture) - set(workloads))
    if unknown:
        there = ", ".join(workloads) or "no row that names its workload"
        raise UserError(f"mixture: {', '.join(unknown)} not measured; there is {there}")
    total = sum(mixture.values())
    if not all(0.0 <= share < math.inf for share in mixture.values()) or not 0.0 < total < math.inf:
        raise UserError("mixture: shares are numbers of at least 0, not all of them 0")
    return {name: share / total for name, share in sorted(mixture.items())}


def blend(by_workload: Mapping[str, Speeds], shares: Mapping[str, float]) -> Speeds:
    """Acceptance and speedup of a mixture, at every depth: means over the time that each workload takes."""
    parts = [(shares[name], by_workload[name]) for name in shares if shares[name] > 0.0]
    first = parts[0][1]
    columns = range(len(first.depths))
    return Speeds(
        depths=first.depths,
        al=[_harmonic([(share, speeds.al[i]) for share, speeds in parts]) for i in columns],
        speedup=[_harmonic([(share, speeds.speedup[i]) for share, speeds in parts]) for i in columns],
        cycle=first.cycle,
    )


def _harmonic(parts: list[tuple[float, Estimate]]) -> Estimate:
    """1 / sum w / x of estimates over different prompts, whose costs were drawn together."""
    value = 1.0 / sum(share / part.value for share, part in parts)
    draws = 1.0 / sum((share / part.draws for share, part in parts), start=np.zeros(1))
    scales = [share * (value / part.value) ** 2 for share, part in parts]
    slopes = [part.influence * scale for scale, (_, part) in zip(scales, parts, strict=True)]
    process = [part.process * scale for scale, (_, part) in zip(scales, parts, strict=True)]
    return Estimate(
        value,
        draws,
        np.concatenate(slopes),
        joined_sample([(slope, part.prompts) for slope, (_, part) in zip(slopes, parts, strict=True)]),
        np.sum(process, axis=0),
        min(part.process_free for _, part in parts),
        least=0.0,
    )


def one_depth_for_all(
    by_workload: Mapping[str, Speeds],
    shares: Mapping[str, float],
    together: DepthChoice | None,
    apart: Mapping[str, DepthChoice],
    who: Identity,
    rule: Rule,
) -> tuple[Mixture, DepthChoice]:
    """The mixture and its choice. together: the choice over all measured prompts, where no shares were stated."""
    blended = blend(by_workload, shares)
    chosen = together or choice_row(blended, who._replace(workload=MIXTURE), rule)
    column = blended.depths.index(chosen.depth_k)
    lo, hi = blended.speedup[column].interval()
    own = {name: apart[name].depth_k for name in by_workload}
    at_own = {name: _at(by_workload[name], own[name]) for name in by_workload}
    speedup_apart = 1.0 / sum(share / at_own[name] for name, share in shares.items() if share > 0.0)
    mixture = Mixture(
        draft_key=who.draft_key,
        method=who.method,
        batch_size=who.batch_size,
        stated=together is None,
        shares=dict(shares),
        depth_k=chosen.depth_k,
        speedup_pred=blended.speedup[column].value,
        pred_lo=lo,
        pred_hi=hi,
        depths_apart=own,
        speedup_apart=speedup_apart,
        loss=1.0 - blended.speedup[column].value / speedup_apart,
        loss_by_workload={name: 1.0 - _at(by_workload[name], chosen.depth_k) / at_own[name] for name in by_workload},
    )
    return mixture, chosen


def _at(speeds: Speeds, depth: int) -> float:
    return speeds.speedup[speeds.depths.index(depth)].value
