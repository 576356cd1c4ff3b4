"""One depth for several workloads, and its loss against a depth of its own for each.

Plain decoding takes the same time for every token, so with shares w of the decoded tokens the times add up:
    S_mix(k) = 1 / sum_i w_i / S_i(k)            (a weighted harmonic mean)
A depth k_i for each workload gives 1 / sum_i w_i / S_i(k_i), and the loss is 1 minus the quotient. Without stated
shares, those of the measured prompts hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from components.contract import UserError
from components.policy import Mixture
from components.rows import DepthChoice
from components.speedup.bootstrap import Estimate, joined_sample
from components.speedup.prediction.predict import Identity, Rule, Speeds, choice_row

MIXTURE = "mixture"


def stated_shares(mixture: Mapping[str, float], workloads: list[str]) -> dict[str, float]:
    """The shares of a stated mixture, scaled to add up to 1.

    Raises:
        UserError: a workload that was not measured, a share that is negative or no number, or nothing but zeros.
    """
    unknown = sorted(set(mixture) - set(workloads))
    if unknown:
        measured = ", ".join(workloads) or "no row that names its workload"
        raise UserError(f"mixture: {', '.join(unknown)} not measured; there is {measured}")
    total = sum(mixture.values())
    if not all(0.0 <= share < math.inf for share in mixture.values()) or not 0.0 < total < math.inf:
        raise UserError("mixture: shares are numbers of at least 0, not all of them 0")
    return {name: share / total for name, share in sorted(mixture.items())}


def blend(by_workload: Mapping[str, Speeds], shares: Mapping[str, float]) -> Speeds:
    """Acceptance length and speedup of a mixture at every depth: harmonic means weighted by shares."""
    parts = [(shares[name], by_workload[name]) for name in shares if shares[name] > 0.0]
    first = parts[0][1]
    columns = range(len(first.depths))
    return Speeds(
        depths=first.depths,
        al=[_harmonic_mean([(share, speeds.al[i]) for share, speeds in parts]) for i in columns],
        speedup=[_harmonic_mean([(share, speeds.speedup[i]) for share, speeds in parts]) for i in columns],
        cycle=first.cycle,
    )


def _harmonic_mean(parts: list[tuple[float, Estimate]]) -> Estimate:
    """1 / sum w / x over estimates of different prompts that share the draws of processes. parts: (w, x)."""
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
        min(part.process_dof for _, part in parts),
        minimum=0.0,
    )


def one_depth_for_all(
    by_workload: Mapping[str, Speeds],
    shares: Mapping[str, float],
    together: DepthChoice | None,
    apart: Mapping[str, DepthChoice],
    identity: Identity,
    rule: Rule,
) -> tuple[Mixture, dict[str, DepthChoice]]:
    """The mixture, and every choice with the loss of one depth for all; that of a stated mixture comes last.

    together: the choice over all measured prompts; None where shares are stated. apart: workload -> its choice.
    """
    blended = blend(by_workload, shares)
    choice = together or choice_row(blended, identity._replace(workload=MIXTURE), rule)
    column = blended.depths.index(choice.depth_k)
    lo, hi = blended.speedup[column].interval()
    depths_apart = {name: apart[name].depth_k for name in by_workload}
    speeds_apart = {name: _speedup_at(by_workload[name], depths_apart[name]) for name in by_workload}
    speedup_apart = 1.0 / sum(share / speeds_apart[name] for name, share in shares.items() if share > 0.0)
    mixture = Mixture(
        draft_key=identity.draft_key,
        method=identity.method,
        batch_size=identity.batch_size,
        stated=together is None,
        shares=dict(shares),
        depth_k=choice.depth_k,
        speedup_pred=blended.speedup[column].value,
        pred_lo=lo,
        pred_hi=hi,
        depths_apart=depths_apart,
        speedup_apart=speedup_apart,
        loss=1.0 - blended.speedup[column].value / speedup_apart,
        loss_by_workload={
            name: 1.0 - _speedup_at(by_workload[name], choice.depth_k) / speeds_apart[name] for name in by_workload
        },
    )
    choices = {**apart, choice.workload: replace(choice, loss=mixture.loss)}
    return mixture, choices | {name: replace(apart[name], loss=mixture.loss_by_workload[name]) for name in by_workload}


def _speedup_at(speeds: Speeds, depth: int) -> float:
    return speeds.speedup[speeds.depths.index(depth)].value
