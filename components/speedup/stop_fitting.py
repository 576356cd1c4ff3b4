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

Reading a confidence takes time of its own, which every draft token costs that a decision may hang on. Sequences side by
side take one length, by the mean of their survivals: a round is replayed with others drawn from the rounds that start
elsewhere. Where no thresholds earn what reading costs, the rule is the best fixed depth itself.

A drafter that computes all its draft tokens in one pass has computed those of the rule's depth when the rule ends a
chain, while a fixed depth pays for its own draft tokens alone. So the rule's depth is chosen too: the one at which the
best thresholds decode fastest.

Everything is judged on prompts that the rule was not fitted to (FOLDS parts of the prompts, each judged by a rule of
the others). K = depths of the maps, n = rounds, P = prompts, B = sequences side by side.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

from components.rows import AcceptanceMap
from components.speedup.bootstrap import Floats
from components.stop_rule import NEVER, Calibration, StopRule

Integers = NDArray[np.int64]

FOLDS: Final = 5
LEAST_ROUNDS: Final = 50
"""Fewer rounds that reach a depth give no curve of their own; the depth takes that of the one before."""
MOST_FITS: Final = 8
NUM_FITTED: Final = 20  # points at most through which a calibration curve is fitted
NUM_BINS: Final = 10  # of a reliability diagram


class RoundTimes(NamedTuple):
    """What a round takes, ms. draft: [K + 1], by passes. verify: [K + 1], by draft tokens verified, host time included.

    in_one_pass: the drafter computes all its draft tokens at once, so that a chain ended by a rule saves no drafting.
    reading: of one confidence, and the rule's decision. batch_size: sequences side by side, whose rounds these are.
    """

    draft: Floats
    verify: Floats
    in_one_pass: bool = False
    reading: float = 0.0
    batch_size: int = 1

    def of(self, passes: Integers, verified: Integers) -> Floats:
        """The time of rounds that read no confidence, in the shape of `passes`."""
        return np.asarray(self.draft[passes] + self.verify[verified])

    def of_block(self, depth: int) -> RoundTimes:
        """The times of rounds that all draft `depth` tokens, and verify some of them."""
        draft = np.concatenate([[0.0], np.full(depth, self.draft[depth])])
        return self._replace(draft=draft, verify=self.verify[: depth + 1])

    @property
    def draft_steps(self) -> Floats:
        """[K + 1]: what draft token j adds, read as well."""
        steps = np.diff(self.draft, prepend=0.0)
        steps[1:] += self.reading
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


class Lengths(NamedTuple):
    """Of a round that starts at each position, [n] each: passes run, draft tokens verified, confidences read."""

    passes: Integers
    verified: Integers
    read: Integers


Chains = Callable[[Answer], Lengths]


def fixed_chains(depth: int) -> Chains:
    """Every round drafts `depth` tokens."""

    def chains(answer: Answer) -> Lengths:
        depths = np.full(len(answer.accepted), depth)
        return Lengths(depths, depths, np.zeros_like(depths))

    return chains


def rule_chains(
    rule: StopRule, elsewhere: Answer | None = None, batch_size: int = 1, in_one_pass: bool = False
) -> Chains:
    """Rounds as the rule ends them: `StopRule.length` for all positions at once.

    elsewhere: rounds of which a batch has others at its side; needed where batch_size is above 1. in_one_pass: every
    round counts the passes of the rule's depth, as RoundTimes has them.
    """
    others = None if elsewhere is None else survival_of(rule, elsewhere.confidence)

    def chains(answer: Answer) -> Lengths:
        survival = survival_of(rule, answer.confidence)
        if others is not None:
            survival = _side_by_side(survival, others, batch_size, answer)
        depth = survival.shape[1]
        unverified = survival < np.array(rule.verify_from[:depth])
        undrafted = survival < np.array([*rule.draft_from[1:depth], -1.0])  # nothing comes after the last
        ends = unverified | undrafted
        ends[:, -1] = True
        first = ends.argmax(axis=1)
        length = first + 1
        return Lengths(
            np.full_like(length, depth) if in_one_pass else length,
            length - unverified[np.arange(len(first)), first],
            np.minimum(length, min(depth, rule.num_read)),
        )

    return chains


def _side_by_side(own: Floats, others: Floats, batch_size: int, answer: Answer) -> Floats:
    """Means [n, ...] of `own` [n, ...] and batch_size - 1 of `others` [m, ...], drawn anew for each row."""
    stream = np.random.default_rng(zlib.crc32(answer.confidence.tobytes()))
    drawn = stream.integers(len(others), size=(len(own), batch_size - 1))
    return np.asarray((own + others[drawn].sum(axis=1)) / batch_size)


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
    read: Floats  # [P, K + 1]: confidences read, by draft tokens verified

    def by_verified(self, times: RoundTimes) -> Floats:
        """[P, K + 1]: time of each prompt's rounds by draft tokens verified, in the unit of `times`."""
        depths = np.arange(self.counts.shape[1])
        each = times.of(*np.meshgrid(depths, depths, indexing="ij"))  # [K + 1, K + 1]
        return np.asarray((self.counts * each).sum(axis=1) + self.read * times.reading)

    def rate(self, times: RoundTimes) -> float:
        """R: tokens per unit of time over all prompts."""
        return float(self.tokens.sum() / self.by_verified(times).sum())


def replay_chains(answers: Sequence[Answer], chains: Chains, depth: int) -> Replayed:
    """Replay every answer: a round at i verifies m draft tokens and the next starts at i + min(accepted, m) + 1."""
    counts, starts = np.zeros((len(answers), depth + 1, depth + 1)), []
    read_by = np.zeros((len(answers), depth + 1))
    for index, answer in enumerate(answers):
        passes, verified, read = chains(answer)
        steps = (np.minimum(answer.accepted, verified) + 1).tolist()
        position, started = 0, []
        while position < len(steps):
            started.append(position)
            position += steps[position]
        rounds = np.array(started, dtype=np.int64)
        np.add.at(counts[index], (passes[rounds], verified[rounds]), 1.0)
        np.add.at(read_by[index], verified[rounds], read[rounds])
        starts.append(rounds)
    return Replayed(starts, np.array([float(len(answer.accepted)) for answer in answers]), counts, read_by)


def best_fixed(answers: Sequence[Answer], times: RoundTimes) -> tuple[int, float]:
    """(the depth from 1 up with the highest rate, that rate)."""
    depth = answers[0].confidence.shape[1]
    rates = [replay_chains(answers, fixed_chains(k), depth).rate(times) for k in range(1, depth + 1)]
    best = int(np.argmax(rates))
    return best + 1, rates[best]


class Fitted(NamedTuple):
    """A rule, and the rounds as it ends them."""

    rule: StopRule
    chains: Chains


def fit_rule(answers: Sequence[Answer], times: RoundTimes) -> Fitted:
    """The rule with the highest rate on these answers; the best fixed depth where no other earns what it reads."""
    if not times.in_one_pass:
        return _fit_thresholds(answers, times)
    depth = answers[0].confidence.shape[1]
    fitted = [_fit_thresholds(_cut(answers, k), times.of_block(k)) for k in range(1, depth + 1)]
    rates = [replay_chains(answers, each.chains, depth).rate(times) for each in fitted]
    best = fitted[int(np.argmax(rates))]
    if times.reading:
        fixed, rate = best_fixed(answers, times)
        if max(rates) <= rate:
            curves = calibrate(rows_at(answers, replay_chains(answers, fixed_chains(fixed), depth).rounds))
            return Fitted(StopRule.of_depth(curves, fixed), fixed_chains(fixed))
    return best


def _cut(answers: Sequence[Answer], depth: int) -> list[Answer]:
    """The answers without what lies deeper."""
    return [Answer(np.minimum(answer.accepted, depth), answer.confidence[:, :depth]) for answer in answers]


def _fit_thresholds(answers: Sequence[Answer], times: RoundTimes) -> Fitted:
    """`fit_rule` at the depth of the answers."""
    depth = answers[0].confidence.shape[1]
    start, rate = best_fixed(answers, times)
    replayed = replay_chains(answers, fixed_chains(start), depth)
    best, best_rate = None, rate if times.reading else 0.0
    for _ in range(MOST_FITS):
        started = rows_at(answers, replayed.rounds)
        curves = calibrate(started)
        if best is None:
            best = Fitted(StopRule.of_depth(curves, start), fixed_chains(start))
        rule = _thresholds(curves, started, times, rate)
        chains = rule_chains(rule, started if times.batch_size > 1 else None, times.batch_size, times.in_one_pass)
        replayed = replay_chains(answers, chains, depth)
        before, rate = rate, replayed.rate(times)
        if rate > best_rate:
            best, best_rate = Fitted(rule, chains), rate
        if abs(rate - before) < 1e-4 * before:
            break
    assert best is not None
    return best


def rows_at(answers: Sequence[Answer], rounds: Sequence[Integers]) -> Answer:
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
    if times.batch_size > 1:
        survival = _side_by_side(survival, survival, times.batch_size, rows)
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
    fitted = [fit_rule([a for i, a in enumerate(answers) if i % folds != fold], times) for fold in range(folds)]
    chains_of = {id(answer): fitted[i % folds].chains for i, answer in enumerate(answers)}
    return lambda answer: chains_of[id(answer)](answer), [each.rule for each in fitted]


def oracle_chains(rate: float, times: RoundTimes, elsewhere: Answer, depth: int) -> Chains:
    """Chains up to `depth` of somebody who knows what will be accepted, at a given rate: a bound for every rule.

    elsewhere: as `rule_chains` takes it.
    """
    lengths = np.arange(depth + 1)
    passes = np.full_like(lengths, depth) if times.in_one_pass else np.maximum(lengths, 1)
    cost = rate * times.of(passes, lengths)
    others = np.minimum(elsewhere.accepted[:, None], lengths)

    def chains(answer: Answer) -> Lengths:
        accepted = np.minimum(answer.accepted[:, None], lengths)
        verified = (_side_by_side(accepted, others, times.batch_size, answer) - cost).argmax(axis=1)
        return Lengths(passes[verified], verified, np.zeros_like(verified))

    return chains


def oracle(answers: Sequence[Answer], times: RoundTimes, rate: float) -> Replayed:
    """The oracle's rounds at its own rate, found from another one; in one pass, with its best depth."""
    deepest = len(times.verify) - 1
    depths = range(1, deepest + 1) if times.in_one_pass else (deepest,)
    return max((_oracle(answers, times, rate, depth) for depth in depths), key=lambda replayed: replayed.rate(times))


def _oracle(answers: Sequence[Answer], times: RoundTimes, rate: float, depth: int) -> Replayed:
    rounds = [np.arange(len(answer.accepted)) for answer in answers]
    for _ in range(1 + MOST_FITS):
        chains = oracle_chains(rate, times, rows_at(answers, rounds), depth)
        replayed = replay_chains(answers, chains, len(times.verify) - 1)
        rate, rounds = replayed.rate(times), replayed.rounds
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
        rule, rows = rules[index % len(rules)], rows_at([answer], [rounds])
        for j in range(min(rule.depth, rows.confidence.shape[1])):
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
