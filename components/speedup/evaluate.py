"""Every depth of one drafter on one workload: predicted speedup with intervals, and the depth to serve with.

AL is replayed exactly from acceptance maps at each measured depth and pooled over prompts; what a round costs lies on
the curve of costs.py. The two are drawn together (prompts for AL, processes for cost), and for all depths alike: one is
only better than another if it stays better when both could have come out differently.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.rows import DepthChoice, DepthEval
from components.speedup.bootstrap import (
    LEAST_PROMPTS,
    Estimate,
    Floats,
    draw_weights,
    ratio_draws,
    ratio_influence,
    sample_of,
)
from components.speedup.costs import CostTable, round_cost
from components.speedup.model import marginal_cost, marginal_gain
from components.speedup.regret import losses, near_best, p_best


class Rule(NamedTuple):
    """How a depth is chosen."""

    tolerance: float
    confidence: float
    num_draws: int
    include_host: bool

    @property
    def words(self) -> str:
        """The rule as it is printed with every choice."""
        return (
            f"smallest depth that loses at most {self.tolerance:.0%} to the best with probability {self.confidence:g}, "
            "prompts and processes drawn alike for all; without one, that of the least expected loss; "
            f"0 unless P(speedup > 1) of that very depth >= {self.confidence:g}"
        )


class Identity(NamedTuple):
    """What a row says it is about."""

    selection_id: str
    target_key: str
    draft_key: str
    method: str
    workload: str
    batch_size: int


class Speeds(NamedTuple):
    """Acceptance and predicted speedup of every depth, each with draws and influence. Lists are over depths."""

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

    The random draws depend on `seed`, the workload and the number of prompts alone, so two drafters measured on the
    same prompts are resampled together, and two workloads apart; those of processes on the measurement they are of.
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
        al=[Estimate(float(al[i]), al_draws[:, i], influence[:, i], samples[i], least=0.0) for i in columns],
        speedup=[
            Estimate(
                float(al[i] * factor[i]),
                al_draws[:, i] * (factor[i] * factor_draws[:, i]),
                influence[:, i] * factor[i],
                samples[i],
                cost.process[i] * (-al[i] * factor[i]),
                float(cost.process_free[i]),
                least=0.0,
            )
            for i in columns
        ],
        cycle=cycle,
    )


def cost_factors(cost: CostTable, num_draws: int, seed: int) -> Floats:
    """[draws, K + 1]: by what each draw of processes multiplies a speedup; 1 where chance in cost is not known."""
    session, own = cost.streams
    num_own = cost.process.shape[1] - cost.num_shared
    shared = np.random.default_rng([seed, 1, session]).standard_normal((num_draws, cost.num_shared))
    apart = np.random.default_rng([seed, 1, session, own]).standard_normal((num_draws, num_own))
    # Not a matrix product: sums in a fixed order are the same on any number of threads.
    return np.exp(-np.einsum("du,ku->dk", np.concatenate([shared, apart], axis=1), cost.process))


def depth_rows(speeds: Speeds, cost: CostTable, who: Identity, tree_budget: int | None = None) -> list[DepthEval]:
    """One row for each depth."""
    best, regret = p_best(speeds.draws), losses(speeds.draws).mean(axis=0)
    rows = []
    for i, depth in enumerate(speeds.depths):
        al_lo, al_hi = speeds.al[i].interval()
        lo, hi = speeds.speedup[i].interval()
        gain = marginal_gain(speeds.al[i].value, speeds.al[i - 1].value) if i else None
        rows.append(
            DepthEval(
                **who._asdict(),
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
    """What the rule says of a set of depths. column: of the depth to serve with, 0 for plain decoding."""

    column: int
    p_beats: float | None  # P(speedup > 1) of the depth that is taken, or of the best candidate; None: not known
    verdict: str
    why: str


def pick(depths: Sequence[int], speedup: Sequence[Estimate], rule: Rule) -> Pick:
    """The smallest depth as good as the best that also beats plain decoding. depths[0] is 0.

    The probability is asked of the very depth that is taken: asked of any depth at all, one of many that are slower
    would pass by luck. Too few prompts for a verdict still name a depth, the one to try.
    """
    near = [1 + i for i in near_best(np.stack([s.draws for s in speedup[1:]], axis=1), rule.tolerance, rule.confidence)]
    p_beats = {i: speedup[i].p_above(1.0) for i in near}
    able = [i for i in near if (p_beats[i] or 0.0) >= rule.confidence]
    column = next(iter(able or [i for i in near if speedup[i].value > 1.0]), near[-1])
    said, p_taken = f"depth {depths[column]} (predicted {speedup[column].value:.3f}x)", p_beats[column]
    if p_taken is None or not speedup[column].is_decisive:
        told = speedup[column].prompts.effective
        missing = (
            f"{LEAST_PROMPTS} prompts are asked for a verdict, these are worth {told:.1f}"
            if len(speedup[column].influence) > 1
            else f"acceptance prompt by prompt, of at least {LEAST_PROMPTS}, tells how far chance could move it"
        )
        taken = column if speedup[column].value > 1.0 else 0
        return Pick(taken, p_taken, "undecided", f"the best candidate is {said}, but nothing is decided: {missing}")
    if able:
        return Pick(column, p_taken, "use", f"{said} is faster than plain decoding with probability {p_taken:.3f}")
    why = f"the best candidate, {said}, beats plain decoding with probability {p_taken:.3f}; "
    p_any = max(s.p_above(1.0) or 0.0 for s in speedup[1:])
    verdict = "do_not_speculate" if p_any < 1.0 - rule.confidence else "undecided"
    return Pick(0, p_taken, verdict, f"{why}{rule.confidence:g} is asked")


def choice_row(speeds: Speeds, who: Identity, rule: Rule, kv_len: int | None = None) -> DepthChoice:
    """The rule applied to every depth of one drafter. kv_len: the context that its cost is of, None for all."""
    bounds = [s.interval() for s in speeds.speedup]
    found = pick(speeds.depths, speeds.speedup, rule)
    return DepthChoice(
        **who._asdict(),
        depth_k=speeds.depths[found.column],
        rule=rule.words,
        tolerance=rule.tolerance,
        p_beats_no_spec=found.p_beats,
        speedup_pred=speeds.speedup[found.column].value,
        pred_lo=bounds[found.column][0],
        pred_hi=bounds[found.column][1],
        speedup_meas=None,
        meas_lo=None,
        meas_hi=None,
        pred_error=None,
        verdict=found.verdict,
        reasons=[found.why],
        kv_len=kv_len,
    )
