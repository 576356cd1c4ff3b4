"""The best rule that ends chains by confidence: fitted to acceptance maps and to what a round costs, then replayed.

A round that runs d passes of the drafter and verifies m draft tokens takes T_draft(d) + T_verify(m) and emits 1 + (its
accepted draft tokens). Decoding is a sequence of rounds, so its speed is R = E[tokens] / E[time], and the rule with the
highest R also maximises E[tokens] - R E[time] (renewal reward; Dinkelbach 1967). At a given R one more draft token j is
worth its survival s_j and costs R (T_verify(j) - T_verify(j-1)); one more pass costs R (T_draft(j) - T_draft(j-1)).

Thresholds come by backward induction over the recorded rounds, deepest token first (Longstaff & Schwartz 2001, with
isotonic regression on s_j in place of their polynomials): what going on is worth, as a function of survival, never
falls, so that each decision is one threshold (components/stop_rule.py). R, and the rounds that the rule starts, depend
on the rule: fit, replay, and fit again with what was replayed, until R stands.

Only rounds count that a replay really starts. Confidence is calibrated on them: over all positions it would be too
good, since rounds start just after a miss.

Everything is judged on prompts that the rule was not fitted to (FOLDS parts of the prompts, each judged by a rule of
the others). K = depths of the maps, n = rounds, P = prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from components.rows import AcceptanceMap
from components.speedup.bootstrap import Floats
from components.stop_rule import Calibration, StopRule

Integers = NDArray[np.int64]

FOLDS: Final = 5
LEAST_ROUNDS: Final = 50
"""Fewer rounds that reach a depth give no curve of their own; the depth takes that of the one before."""
MOST_FITS: Final = 8
NEVER: Final = 2.0  # a threshold that no survival reaches
NUM_FITTED: Final = 20  # points at most through which a calibration curve is fitted
NUM_BINS: Final = 10  # of a reliability diagram


class RoundTimes(NamedTuple):
    """What a round takes, ms. draft: [K + 1], by passes. verify: [K + 1], by draft tokens verified, host time included.

    in_one_pass: the drafter computes all its draft tokens at once, so that a shorter chain saves no drafting.
    """

    draft: Floats
    verify: Floats
    in_one_pass: bool = False

    def of(self, passes: Integers, verified: Integers) -> Floats:
        """The time of rounds, in the shape of `passes`."""
        deepest = np.full_like(passes, len(self.draft) - 1) if self.in_one_pass else passes
        return np.asarray(self.draft[deepest] + self.verify[verified])

    @property
    def draft_steps(self) -> Floats:
        """[K + 1]: what pass j adds; 0 after the first where all draft tokens come from one."""
        steps = np.diff(self.draft, prepend=0.0)
        if self.in_one_pass:
            steps[2:] = 0.0
        return steps


class Answer(NamedTuple):
    """One prompt's map. accepted: [n]; confidence: [n, K]; n = output tokens - 1."""

    accepted: Integers
    confidence: Floats


def answers_of(maps: Sequence[AcceptanceMap]) -> list[Answer]:
    """The maps as arrays, in the order of their prompts; all have confidences of the same depths."""
    ordered = sorted(maps, key=lambda m: m.prompt_id)
    depth = min(m.k_max for m in ordered)
    return [
        Answer(
            np.minimum(np.array(m.accepted[: m.num_tokens - 1], dtype=np.int64), depth),
            np.array(m.confidence, dtype=np.float64).reshape(-1, m.k_max)[: m.num_tokens - 1, :depth],
        )
        for m in ordered
    ]


Chains = Callable[[Answer], tuple[Integers, Integers]]
"""For each position of an answer: (passes run, draft tokens verified) by a round that starts there."""


def fixed_chains(depth: int) -> Chains:
    """Every round drafts `depth` tokens."""
    return lambda answer: (np.full(len(answer.accepted), depth), np.full(len(answer.accepted), depth))


def rule_chains(rule: StopRule) -> Chains:
    """Rounds as the rule ends them: `StopRule.length` for all positions at once."""

    def chains(answer: Answer) -> tuple[Integers, Integers]:
        survival = survival_of(rule, answer.confidence)
        depth = survival.shape[1]
        unverified = survival < np.array(rule.verify_from[:depth])
        undrafted = survival < np.array([*rule.draft_from[1:depth], -1.0])  # nothing comes after the last
        ends = unverified | undrafted
        ends[:, -1] = True
        first = ends.argmax(axis=1)
        return first + 1, first + 1 - unverified[np.arange(len(first)), first]

    return chains


def survival_of(rule: StopRule, confidence: Floats) -> Floats:
    """[n, K]: s_1 .. s_K of each round."""
    depth = min(confidence.shape[1], rule.depth)
    accepted: Floats = np.stack([_read(rule.calibration[j], confidence[:, j]) for j in range(depth)], axis=1)
    return np.asarray(accepted.cumprod(axis=1))


def _read(curve: Calibration, confidence: Floats) -> Floats:
    return np.asarray(np.interp(confidence, curve.confidence, curve.accepted))


class Replayed(NamedTuple):
    """Rounds of one way to end chains, prompt by prompt."""

    rounds: list[Integers]  # of each prompt, the positions where rounds started
    tokens: Floats  # [P] emitted by rounds
    counts: Floats  # [P, K + 1, K + 1]: rounds by passes and by draft tokens verified

    def by_verified(self, times: RoundTimes) -> Floats:
        """[P, K + 1]: time of each prompt's rounds by draft tokens verified, in the unit of `times`."""
        depths = np.arange(self.counts.shape[1])
        each = times.of(*np.meshgrid(depths, depths, indexing="ij"))  # [K + 1, K + 1]
        return np.asarray((self.counts * each).sum(axis=1))

    def rate(self, times: RoundTimes) -> float:
        """R: tokens per unit of time over all prompts."""
        return float(self.tokens.sum() / self.by_verified(times).sum())


def replay_chains(answers: Sequence[Answer], chains: Chains, depth: int) -> Replayed:
    """Replay every answer: a round at i verifies m draft tokens and the next starts at i + min(accepted, m) + 1."""
    counts, starts = np.zeros((len(answers), depth + 1, depth + 1)), []
    for index, answer in enumerate(answers):
        passes, verified = chains(answer)
        steps = (np.minimum(answer.accepted, verified) + 1).tolist()
        position, started = 0, []
        while position < len(steps):
            started.append(position)
            position += steps[position]
        rounds = np.array(started, dtype=np.int64)
        np.add.at(counts[index], (passes[rounds], verified[rounds]), 1.0)
        starts.append(rounds)
    return Replayed(starts, np.array([float(len(answer.accepted)) for answer in answers]), counts)


def best_fixed(answers: Sequence[Answer], times: RoundTimes) -> tuple[int, float]:
    """(the depth from 1 up with the highest rate, that rate)."""
    depth = answers[0].confidence.shape[1]
    rates = [replay_chains(answers, fixed_chains(k), depth).rate(times) for k in range(1, depth + 1)]
    best = int(np.argmax(rates))
    return best + 1, rates[best]


def fit_rule(answers: Sequence[Answer], times: RoundTimes) -> StopRule:
    """The rule with the highest rate on these answers."""
    depth = answers[0].confidence.shape[1]
    start, rate = best_fixed(answers, times)
    replayed = replay_chains(answers, fixed_chains(start), depth)
    best_rule, best_rate = None, -math.inf
    for _ in range(MOST_FITS):
        started = _rows_at(answers, replayed.rounds)
        rule = _thresholds(calibrate(started), started, times, rate)
        replayed = replay_chains(answers, rule_chains(rule), depth)
        before, rate = rate, replayed.rate(times)
        if rate > best_rate:
            best_rule, best_rate = rule, rate
        if abs(rate - before) < 1e-4 * before:
            break
    assert best_rule is not None
    return best_rule


def _rows_at(answers: Sequence[Answer], rounds: Sequence[Integers]) -> Answer:
    """The rows of all answers at these positions, one after the other."""
    pairs = list(zip(answers, rounds, strict=True))
    return Answer(
        np.concatenate([answer.accepted[at] for answer, at in pairs]),
        np.concatenate([answer.confidence[at] for answer, at in pairs]),
    )


def calibrate(rows: Answer) -> tuple[Calibration, ...]:
    """A curve for every depth: acceptance of draft token j, where those before it were accepted, over c_j."""
    curves: list[Calibration] = []
    for j in range(rows.confidence.shape[1]):
        reaching = rows.accepted >= j
        if curves and int(reaching.sum()) < LEAST_ROUNDS:
            curves.append(curves[-1])
            continue
        hits = (rows.accepted[reaching] > j).astype(float)
        # Equal confidences are one point: in any order among themselves the last would be the lucky ones.
        points, point = np.unique(rows.confidence[reaching, j], return_inverse=True)
        group = _bins(np.bincount(point))[point]
        weights = np.bincount(group).astype(float)
        confidence = np.bincount(group, weights=points[point]) / weights
        shares = np.bincount(group, weights=hits) / weights
        # Half a hit and half a miss more at either end keep a curve of few rounds off 0 and 1.
        fitted = isotonic_regression([0.5, *shares, 0.5], weights=[1.0, *weights, 1.0]).x[1:-1]
        edge = 1.0 / (len(hits) + 2)
        curves.append(_knots(confidence, weights, np.clip(fitted, edge, 1.0 - edge)))
    return tuple(curves)


def _bins(counts: Integers) -> Integers:
    """The bin of each point, NUM_FITTED each about as many rows; single rows at the ends would follow chance."""
    before = np.cumsum(counts) - counts
    bins = before * min(NUM_FITTED, max(1, int(counts.sum()) // LEAST_ROUNDS)) // counts.sum()
    return np.asarray(np.unique(bins, return_inverse=True)[1])


def _knots(confidence: Floats, weights: Floats, fitted: Floats) -> Calibration:
    """A curve through the middle of every flat piece of a fit; `confidence` rises strictly."""
    piece = np.cumsum(np.diff(fitted, prepend=fitted[0]) != 0.0)
    middles = np.bincount(piece, weights=weights * confidence) / np.bincount(piece, weights=weights)
    return Calibration(tuple(middles.tolist()), tuple(fitted[np.unique(piece, return_index=True)[1]].tolist()))


def _thresholds(curves: tuple[Calibration, ...], rows: Answer, times: RoundTimes, rate: float) -> StopRule:
    """Backward induction over rounds, at a given rate."""
    depth = rows.confidence.shape[1]
    rule = StopRule(curves, (0.0,) * depth, (0.0,) * depth)
    survival = survival_of(rule, rows.confidence)
    verify_steps, draft_steps = np.diff(times.verify, prepend=0.0), times.draft_steps
    draft_from, verify_from = [0.0] * depth, [0.0] * depth
    after = np.zeros(len(rows.accepted))  # worth of going on after draft token j is verified
    for j in range(depth, 0, -1):
        reaching = survival[:, j - 1]
        kept = reaching - rate * verify_steps[j] + after
        verify_from[j - 1] = _first_worth_it(reaching, kept)
        going_on = np.where(reaching >= verify_from[j - 1], kept, 0.0) - rate * draft_steps[j]
        if j > 1:
            draft_from[j - 1] = _first_worth_it(survival[:, j - 2], going_on)
            after = np.where(survival[:, j - 2] >= draft_from[j - 1], going_on, 0.0)
    return StopRule(curves, tuple(draft_from), tuple(verify_from))


def _first_worth_it(survival: Floats, worth: Floats) -> float:
    """The least survival from which the expected worth, which never falls in it, is above zero."""
    points, group = np.unique(survival, return_inverse=True)
    weights = np.bincount(group).astype(float)
    expected = isotonic_regression(np.bincount(group, weights=worth) / weights, weights=weights).x
    above = np.flatnonzero(expected > 0.0)
    if not len(above):
        return NEVER
    return 0.0 if above[0] == 0 else float(points[above[0]])


def held_out_chains(answers: Sequence[Answer], times: RoundTimes) -> tuple[Chains, list[StopRule]]:
    """(chains of every answer by a rule that was fitted without it, the rules of the folds)."""
    folds = min(FOLDS, len(answers))
    rules = [fit_rule([a for i, a in enumerate(answers) if i % folds != fold], times) for fold in range(folds)]
    chains_of = {id(answer): rule_chains(rules[i % folds]) for i, answer in enumerate(answers)}
    return lambda answer: chains_of[id(answer)](answer), rules


def oracle_chains(rate: float, times: RoundTimes) -> Chains:
    """Chains of somebody who knows what will be accepted, at a given rate: a bound that no rule reaches."""
    depth = len(times.verify) - 1
    lengths = np.arange(depth + 1)
    worth = lengths - rate * times.of(np.maximum(lengths, 1), lengths)
    best = np.array([int(worth[: accepted + 1].argmax()) for accepted in lengths])

    def chains(answer: Answer) -> tuple[Integers, Integers]:
        verified = best[answer.accepted]
        return np.maximum(verified, 1), verified

    return chains


def oracle(answers: Sequence[Answer], times: RoundTimes, rate: float) -> Replayed:
    """The oracle's rounds at its own rate, found from another one."""
    depth = len(times.verify) - 1
    replayed = replay_chains(answers, oracle_chains(rate, times), depth)
    for _ in range(MOST_FITS):
        replayed = replay_chains(answers, oracle_chains(replayed.rate(times), times), depth)
    return replayed


class ReliabilityBin(NamedTuple):
    """Held-out draft tokens of about the same predicted acceptance."""

    predicted: float
    observed: float
    num_tokens: int


def reliability(answers: Sequence[Answer], replayed: Replayed, rules: Sequence[StopRule]) -> list[ReliabilityBin]:
    """Predicted against observed acceptance of draft tokens that were reached in held-out rounds, in equal bins."""
    predicted, observed = [], []
    for index, (answer, rounds) in enumerate(zip(answers, replayed.rounds, strict=True)):
        rule, rows = rules[index % len(rules)], _rows_at([answer], [rounds])
        for j in range(rows.confidence.shape[1]):
            reaching = rows.accepted >= j
            predicted.append(_read(rule.calibration[j], rows.confidence[reaching, j]))
            observed.append((rows.accepted[reaching] > j).astype(float))
    predictions, hits = np.concatenate(predicted), np.concatenate(observed)
    parts = np.array_split(np.argsort(predictions, kind="stable"), NUM_BINS)
    return [ReliabilityBin(float(predictions[p].mean()), float(hits[p].mean()), len(p)) for p in parts if len(p)]


def calibration_error(bins: Sequence[ReliabilityBin]) -> float:
    """The expected calibration error: mean distance of predicted from observed acceptance, weighted by counts."""
    total = sum(b.num_tokens for b in bins)
    return sum(b.num_tokens * abs(b.predicted - b.observed) for b in bins) / total
