"""Predicted speedup of every depth of one drafter on one workload, with intervals, and the depth to serve.

AL is replayed exactly from acceptance maps at each measured depth and pooled over prompts; the cost of a round lies on
the curve of costs.py. Both are drawn together (prompts for AL, processes for cost), with the same draws for all depths:
one depth is better than another only if it stays so over the draws.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.rows import DepthChoice, DepthEval
from components.speedup.bootstrap import (
    PROMPTS,
    Estimate,
    Floats,
    draw_weights,
    losses,
    near_best,
    p_best,
    ratio_draws,
    ratio_influence,
    sample_of,
)
from components.speedup.prediction.costs import CostTable, round_cost
from components.speedup.prediction.model import marginal_cost, marginal_gain


class Rule(NamedTuple):
    """The rule by which a depth is chosen."""

    tolerance: float
    confidence: float
    num_draws: int
    include_host: bool

    @property
    def description(self) -> str:
        """The rule as text, printed with every choice."""
        return (
            f"smallest depth that loses at most {self.tolerance:.0%} to the best with probability {self.confidence:g}, "
            "prompts and processes drawn alike for all; without one, that of the least expected loss; "
            f"0 unless P(speedup > 1) of that very depth >= {self.confidence:g}"
        )


class Identity(NamedTuple):
    """The key columns of DepthEval and DepthChoice."""

    selection_id: str
    target_key: str
    draft_key: str
    method: str
    workload: str
    batch_size: int


class Speeds(NamedTuple):
    """Acceptance length and predicted speedup of every depth. Lists are over depths."""

    depths: list[int]
    al: list[Estimate]
    speedup: list[Estimate]
    cycle: Floats  # ms of a round; of depth 0, of a plain step

    @property
    def draws(self) -> Floats:
        """[draws, K + 1]: the speedup of every depth in the same draws."""
        return np.stack([s.draws for s in self.speedup], axis=1)


def predict(tokens: Floats, rounds: Floats, cost: CostTable, workload: str, rule: Rule, seed: int) -> Speeds:
    """The speedup model at every depth of `cost`. tokens, rounds: [prompts, K + 1], at the same depths.

    The draws of prompts depend only on `seed`, the workload and the number of prompts: two drafters on the same prompts
    are resampled together, two workloads apart. The draws of processes depend on `seed` and the measurement.
    """
    stream = np.random.default_rng([seed, 2, zlib.crc32(workload.encode())])
    weights = draw_weights(len(rounds), rule.num_draws, stream)
    al, al_draws = tokens.sum(axis=0) / rounds.sum(axis=0), ratio_draws(weights, tokens, rounds)
    influence = ratio_influence(tokens, rounds)
    samples = [sample_of(rounds[:, i], influence[:, i]) for i in range(len(cost.depths))]
    plain, cycle = round_cost(cost.times, rule.include_host)
    factor, factor_draws = plain / cycle, cost_factors(cost, rule.num_draws, seed)
    columns = range(len(cost.depths))
    return Speeds(
        depths=list(cost.depths),
        al=[Estimate(float(al[i]), al_draws[:, i], influence[:, i], samples[i], minimum=0.0) for i in columns],
        speedup=[
            Estimate(
                float(al[i] * factor[i]),
                al_draws[:, i] * (factor[i] * factor_draws[:, i]),
                influence[:, i] * factor[i],
                samples[i],
                cost.process[i] * (-al[i] * factor[i]),
                float(cost.process_dof[i]),
                minimum=0.0,
            )
            for i in columns
        ],
        cycle=cycle,
    )


def cost_factors(cost: CostTable, num_draws: int, seed: int) -> Floats:
    """[draws, K + 1]: factor on the speedup in each draw of processes; 1 where chance in cost is not known."""
    session, own_stream = cost.streams
    num_own = cost.process.shape[1] - cost.num_shared
    shared = np.random.default_rng([seed, 1, session]).standard_normal((num_draws, cost.num_shared))
    apart = np.random.default_rng([seed, 1, session, own_stream]).standard_normal((num_draws, num_own))
    # einsum sums in a fixed order on any number of threads; a matrix product does not.
    return np.exp(-np.einsum("du,ku->dk", np.concatenate([shared, apart], axis=1), cost.process))


def depth_rows(speeds: Speeds, cost: CostTable, identity: Identity, tree_budget: int | None = None) -> list[DepthEval]:
    """One row for each depth."""
    best, regret = p_best(speeds.draws), losses(speeds.draws).mean(axis=0)
    rows = []
    for i, depth in enumerate(speeds.depths):
        al_lo, al_hi = speeds.al[i].interval()
        lo, hi = speeds.speedup[i].interval()
        gain = marginal_gain(speeds.al[i].value, speeds.al[i - 1].value) if i else None
        rows.append(
            DepthEval(
                **identity._asdict(),
                depth_k=depth,
                al=speeds.al[i].value,
                al_lo=al_lo,
                al_hi=al_hi,
                t_target_ms=float(cost.times.target),
                t_verify_ms=float(cost.times.verify[i]),
                t_draft_ms=float(cost.times.draft[i]),
                cost_ratio=float((cost.times.verify[i] + cost.times.draft[i]) / cost.times.target),
                speedup_pred=speeds.speedup[i].value,
                pred_lo=lo,
                pred_hi=hi,
                marginal_gain=gain,
                marginal_cost=marginal_cost(float(speeds.cycle[i]), float(speeds.cycle[i - 1])) if i else None,
                p_best=float(best[i]),
                regret=float(regret[i]),
                al_meas=None,
                speedup_meas=None,
                meas_lo=None,
                meas_hi=None,
                tree_budget=tree_budget if depth else None,
            )
        )
    return rows


class Pick(NamedTuple):
    """The depth that the rule picks. column: its index, 0 for plain decoding."""

    column: int
    p_beats: float | None  # P(speedup > 1) of the picked depth, or of the best candidate; None: not known
    verdict: str
    reason: str


def pick(depths: Sequence[int], speedup: Sequence[Estimate], rule: Rule) -> Pick:
    """Pick the smallest depth that is as good as the best and beats plain decoding. depths[0] is 0.

    The picked depth itself must have the probability: if any were enough, one of many slower ones would pass by luck.
    With too few prompts for a verdict a depth to try is still named.
    """
    near_best_columns = [
        1 + i for i in near_best(np.stack([s.draws for s in speedup[1:]], axis=1), rule.tolerance, rule.confidence)
    ]
    p_beats = {i: speedup[i].p_above(1.0) for i in near_best_columns}
    eligible = [i for i in near_best_columns if (p_beats[i] or 0.0) >= rule.confidence]
    column = next(iter(eligible or [i for i in near_best_columns if speedup[i].value > 1.0]), near_best_columns[-1])
    candidate, p_taken = f"depth {depths[column]} (predicted {speedup[column].value:.3f}x)", p_beats[column]
    if p_taken is None or not speedup[column].is_decisive:
        effective = speedup[column].prompts.effective
        missing = (
            f"{PROMPTS.decide} prompts are asked for a verdict, these are worth {effective:.1f}"
            if len(speedup[column].influence) > 1
            else f"acceptance prompt by prompt, of at least {PROMPTS.decide}, tells how far chance could move it"
        )
        column_to_try = column if speedup[column].value > 1.0 else 0
        return Pick(
            column_to_try, p_taken, "undecided", f"the best candidate is {candidate}, but nothing is decided: {missing}"
        )
    if eligible:
        return Pick(column, p_taken, "use", f"{candidate} is faster than plain decoding with probability {p_taken:.3f}")
    reason = f"the best candidate, {candidate}, beats plain decoding with probability {p_taken:.3f}; "
    p_any = max(s.p_above(1.0) or 0.0 for s in speedup[1:])
    verdict = "do_not_speculate" if p_any < 1.0 - rule.confidence else "undecided"
    return Pick(0, p_taken, verdict, f"{reason}{rule.confidence:g} is asked")


def choice_row(speeds: Speeds, identity: Identity, rule: Rule, kv_len: int | None = None) -> DepthChoice:
    """The choice for one drafter by the rule. kv_len: the context length of its cost, None for all."""
    bounds = [s.interval() for s in speeds.speedup]
    picked = pick(speeds.depths, speeds.speedup, rule)
    return DepthChoice(
        **identity._asdict(),
        depth_k=speeds.depths[picked.column],
        rule=rule.description,
        tolerance=rule.tolerance,
        p_beats_no_spec=picked.p_beats,
        speedup_pred=speeds.speedup[picked.column].value,
        pred_lo=bounds[picked.column][0],
        pred_hi=bounds[picked.column][1],
        speedup_meas=None,
        meas_lo=None,
        meas_hi=None,
        pred_error=None,
        verdict=picked.verdict,
        reasons=[picked.reason],
        kv_len=kv_len,
    )
