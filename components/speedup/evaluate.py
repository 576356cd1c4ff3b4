"""Every depth of one drafter on one workload: predicted speedup with intervals, and the depth to serve with.

AL is replayed exactly from acceptance maps at each measured depth and pooled over prompts; times come from cost cells.
The two are resampled together (prompts for AL, blocks for cost), because a depth is only better if it stays better when
both could have come out differently.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components.rows import DepthChoice, DepthEval
from components.speedup.bootstrap import Estimate, Floats, draw_weights, ratio_draws, ratio_influence
from components.speedup.costs import CostTable, StepTimes
from components.speedup.model import marginal_cost, marginal_gain, pick_depth


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
            f"smallest depth within {self.tolerance:.0%} of the best lower 95 % bound of predicted speedup; "
            f"0 unless P(speedup > 1) >= {self.confidence:g}"
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

    def p_best(self) -> Floats:
        """Share of draws in which each depth is the fastest."""
        draws = np.stack([s.draws for s in self.speedup], axis=1)
        return np.bincount(draws.argmax(axis=1), minlength=len(self.depths)) / len(draws)

    def regret(self) -> Floats:
        """Mean share of speed that each depth loses to the fastest one of the same draw."""
        draws = np.stack([s.draws for s in self.speedup], axis=1)
        return np.asarray((1.0 - draws / draws.max(axis=1, keepdims=True)).mean(axis=0))


def round_cost(times: StepTimes, include_host: bool) -> tuple[Floats, Floats]:
    """(plain step [...], round [..., K + 1]) in ms: numerator and denominator of the speedup model."""
    host = times.host if include_host else np.zeros_like(times.host)
    plain = times.target + host[..., 0]
    cycle = times.verify + times.draft + host
    # Depth 0 is plain decoding itself.
    cycle[..., 0] = plain
    return plain, cycle


def predict(tokens: Floats, rounds: Floats, cost: CostTable, workload: str, rule: Rule, seed: int) -> Speeds:
    """The speedup model at every depth of `cost`. tokens, rounds: [prompts, K + 1], at the same depths.

    The random draws depend on `seed`, the workload and the number of prompts alone, so two drafters measured on the
    same prompts are resampled together, and two workloads apart.
    """
    stream = np.random.default_rng([seed, 2, zlib.crc32(workload.encode())])
    weights = draw_weights(len(rounds), rule.num_draws, stream)
    al, al_draws = tokens.sum(axis=0) / rounds.sum(axis=0), ratio_draws(weights, tokens, rounds)
    influence = ratio_influence(tokens, rounds)
    plain_draws, cycle_draws = round_cost(cost.draws, rule.include_host)
    plain, cycle = round_cost(cost.times, rule.include_host)
    factor, factor_draws = plain / cycle, plain_draws[:, None] / cycle_draws
    columns = range(len(cost.depths))
    return Speeds(
        depths=list(cost.depths),
        al=[Estimate(float(al[i]), al_draws[:, i], influence[:, i]) for i in columns],
        speedup=[
            Estimate(float(al[i] * factor[i]), al_draws[:, i] * factor_draws[:, i], influence[:, i] * factor[i])
            for i in columns
        ],
        cycle=cycle,
    )


def depth_rows(speeds: Speeds, cost: CostTable, who: Identity, tree_budget: int | None = None) -> list[DepthEval]:
    """One row for each depth."""
    p_best, regret = speeds.p_best(), speeds.regret()
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
                p_best=float(p_best[i]),
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
    p_beats: float  # P(speedup > 1) of the best drafting depth, taken or not
    verdict: str
    why: str


def pick(depths: Sequence[int], speedup: Sequence[Estimate], lower: Sequence[float], rule: Rule) -> Pick:
    """The smallest depth near the best lower bound, if it also beats plain decoding. depths[0] is 0."""
    # Depth 0 is left out here and comes back as the verdict: a bound of 0.99 is "undecided", not "do not".
    index = list(depths).index(pick_depth(depths[1:], lower[1:], rule.tolerance))
    candidate = depths[index]
    p_beats = float((speedup[index].draws > 1.0).mean())
    if p_beats >= rule.confidence:
        why = f"depth {candidate} is predicted to be faster than plain decoding with probability {p_beats:.3f}"
        return Pick(index, p_beats, "use", why)
    p_any = max(float((s.draws > 1.0).mean()) for s in speedup[1:])
    why = (
        f"the best candidate, depth {candidate} (predicted {speedup[index].value:.3f}x), beats plain decoding "
        f"with probability {p_beats:.3f}; {rule.confidence:g} is asked"
    )
    return Pick(0, p_beats, "do_not_speculate" if p_any < 1.0 - rule.confidence else "undecided", why)


def choice_row(speeds: Speeds, who: Identity, rule: Rule, kv_len: int | None = None) -> DepthChoice:
    """The rule applied to every depth of one drafter. kv_len: the context that its cost is of, None for all."""
    bounds = [s.interval() for s in speeds.speedup]
    found = pick(speeds.depths, speeds.speedup, [low for low, _ in bounds], rule)
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
