"""The speedup model: the predicted speedup of every depth of one drafter, with intervals, and the depth to serve.

    S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)),    AL(k) = 1 + sum_{i<=k} prod_{j<=i} p_j

A round of speculative decoding costs one verification pass over k + 1 rows and k drafts, and keeps AL(k) tokens on
average; plain decoding takes T_target for each of them. Leviathan et al. 2023 (arXiv:2211.17192, theorem 3.8)
is the special case p_j = alpha, T_verify = T_target, T_draft = c * k * T_target; we keep each p_j and each time as
measured, because acceptance is not geometric and verification is not free.

Where the rest H of a round (sampling, bookkeeping) was measured, it enters both sides of the ratio:

    S_host(k) = AL(k) * (T_target + H(0)) / (T_verify(k) + T_draft(k) + H(k))

AL is replayed exactly from acceptance maps at each measured depth and pooled over prompts; the cost of a round lies on
the curve of costs.py. Both are drawn together (prompts for AL, processes for cost), with the same draws for all depths:
one depth is better than another only if it stays so over the draws.

One depth for several workloads loses against a depth of its own for each. Plain decoding takes the same time for every
token, so with shares w of the decoded tokens the times add up:

    S_mix(k) = 1 / sum_i w_i / S_i(k)            (a weighted harmonic mean)

A depth k_i for each workload gives 1 / sum_i w_i / S_i(k_i), and the loss is 1 minus the quotient. Without stated
shares, those of the measured prompts hold.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.contract import UserError
from components.policy import Mixture
from components.refusals import PROMPTS
from components.rows import ALL, DepthChoice, DepthEval, PredictionKey
from components.speedup.bootstrap import (
    Estimate,
    Floats,
    draw_weights,
    joined_sample,
    losses,
    near_best,
    p_best,
    ratio_draws,
    ratio_influence,
    sample_of,
)
from components.speedup.prediction.costs import CostTable, round_cost

MIXTURE = "mixture"


def acceptance_lengths(p: Sequence[float]) -> list[float]:
    """AL(0), AL(1), ..., AL(K) from conditional acceptance p_1..p_K (each given that all before were accepted)."""
    lengths, survive = [1.0], 1.0
    for p_i in p:
        assert 0.0 <= p_i <= 1.0, f"an acceptance probability lies in [0, 1], not {p_i}"
        survive *= p_i
        lengths.append(lengths[-1] + survive)
    return lengths


def marginal_gain(al: float, al_before: float) -> float:
    """u_k / AL(k-1): the share of tokens that the k-th draft adds, with u_k = AL(k) - AL(k-1)."""
    return (al - al_before) / al_before


def marginal_cost(cost: float, cost_before: float) -> float:
    """(c(k) - c(k-1)) / c(k-1): the share of time that the k-th draft adds. S rises exactly while gain > cost."""
    return (cost - cost_before) / cost_before


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


def depth_rows(
    speeds: Speeds, cost: CostTable, identity: PredictionKey, tree_budget: int | None = None
) -> list[DepthEval]:
    """One row for each depth."""
    best, regret = p_best(speeds.draws), losses(speeds.draws).mean(axis=0)
    rows = []
    for i, depth in enumerate(speeds.depths):
        al_lo, al_hi = speeds.al[i].interval()
        lo, hi = speeds.speedup[i].interval()
        gain = marginal_gain(speeds.al[i].value, speeds.al[i - 1].value) if i else None
        rows.append(
            DepthEval(
                **vars(identity),
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


def choice_row(speeds: Speeds, identity: PredictionKey, rule: Rule, kv_len: int | None = None) -> DepthChoice:
    """The choice for one drafter by the rule. kv_len: the context length of its cost, None for all."""
    bounds = [s.interval() for s in speeds.speedup]
    picked = pick(speeds.depths, speeds.speedup, rule)
    return DepthChoice(
        **vars(identity),
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


class Evaluated(NamedTuple):
    """One drafter on one workload: its speeds, a row for each depth, and the choice."""

    speeds: Speeds
    evals: list[DepthEval]
    choice: DepthChoice


def evaluate(
    counts: tuple[Floats, Floats],
    cost: CostTable,
    identity: PredictionKey,
    rule: Rule,
    seed: int,
    *,
    tree_budget: int | None = None,
    kv_len: int | None = None,
) -> Evaluated:
    """Predict every depth of `cost` and choose. counts: (tokens, rounds), each [prompts, K + 1], as for `predict`."""
    speeds = predict(*counts, cost, identity.workload, rule, seed)
    evals = depth_rows(speeds, cost, identity, tree_budget)
    return Evaluated(speeds, evals, choice_row(speeds, identity, rule, kv_len))


def one_depth_for_all(
    results: Mapping[str, Evaluated],
    stated: Mapping[str, float],
    tokens: Mapping[str, float],
    identity: PredictionKey,
    rule: Rule,
) -> tuple[list[Mixture], dict[str, DepthChoice]]:
    """The mixture of the workloads, if there are several or shares were stated, and every choice with its loss.

    results: by workload, ALL included. stated: shares of decoded tokens; without them those of `tokens` hold. The
    choice of a stated mixture comes last. identity: of ALL.

    Raises:
        UserError: a stated mixture is of workloads that were not measured, or not at the same depths.
    """
    choices = {name: result.choice for name, result in results.items()}
    by_workload = {name: result.speeds for name, result in results.items() if name != ALL}
    shares = stated_shares(stated, list(by_workload)) if stated else {}
    if len({tuple(result.speeds.depths) for result in results.values()}) > 1:
        if shares:
            raise UserError(f"mixture: {identity.draft_key} was not measured at the same depths on every workload")
        return [], choices
    if len(by_workload) < 2 and not shares:
        return [], choices
    if not shares:
        total = sum(tokens[name] for name in by_workload)
        shares = {name: tokens[name] / total for name in by_workload}
    blended = blend(by_workload, shares)
    choice = choice_row(blended, replace(identity, workload=MIXTURE), rule) if stated else choices[ALL]
    column = blended.depths.index(choice.depth_k)
    lo, hi = blended.speedup[column].interval()
    depths_apart = {name: choices[name].depth_k for name in by_workload}
    speeds_apart = {name: _speedup_at(by_workload[name], depths_apart[name]) for name in by_workload}
    speedup_apart = 1.0 / sum(share / speeds_apart[name] for name, share in shares.items() if share > 0.0)
    mixture = Mixture(
        draft_key=identity.draft_key,
        method=identity.method,
        batch_size=identity.batch_size,
        stated=bool(stated),
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
    own_losses = {name: replace(choices[name], loss=mixture.loss_by_workload[name]) for name in by_workload}
    return [mixture], {**choices, choice.workload: replace(choice, loss=mixture.loss), **own_losses}


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


def _speedup_at(speeds: Speeds, depth: int) -> float:
    return speeds.speedup[speeds.depths.index(depth)].value
