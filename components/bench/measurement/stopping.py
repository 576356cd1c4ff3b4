"""Decides when a measurement may end: the best arm so far, and the arms that may still beat it.

For each pair of arms the log of their speed ratio is (acceptance, paired by prompt) - (cost, paired by process):
    d = log S_best - log S_a = (log AL_best - log AL_a) - (mean_s x_best,s - mean_s x_a,s)
x_as is the log of arm a's round over plain decoding in process s, so that plain decoding cancels. Its half-width is
Student's quantile times the root of both variances, with Welch and Satterthwaite's degrees of freedom. Three processes
give a variance two degrees of freedom and t = 4.3; the scatter of processes about what they share is alike for arms, so
it is pooled over all arms but those that clearly scatter more. Sums only: cheap enough to evaluate every second.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.bench.end_to_end.arms import Arm
from components.bench.end_to_end.timed_runs import GroupRun, steady_round_ns
from components.definitions import steady
from components.rows import CostCell
from components.speedup.bootstrap import Floats, ratio_influence, sample_of, student_quantile

PRECISION = 0.03  # half-width of a speed ratio's interval at which arms without a shown difference count as alike
SUSPICIOUS = 8.0  # times the median variance over processes: chance exceeds it in one of 50 arms of three processes
FEW_ARMS, FEW_PROCESSES = 4, 3  # fewer than these do not show which arm is odd
LEVEL = 0.95  # of the intervals
BAND = 0.01  # arms within this share of the best are as good


class Decision(NamedTuple):
    """The arms that the decision waits for ([]: it is settled), and a summary in words."""

    arms: Collection[Arm]
    summary: str


def check_settled(group_runs: Sequence[GroupRun], side_arms: Collection[Arm], precision: float) -> Decision:
    """Which arms need another process, from all that was decoded so far at the smallest batch size.

    Plain decoding is an arm like the others. Acceptance is that of the decoded prompts, on which more processes tell
    nothing new: the question is whether times are known precisely enough.
    """
    size = min(len(group_run.group) for group_run in group_runs)
    smallest = [group_run for group_run in group_runs if len(group_run.group) == size]
    arms = [arm for arm in _arms_of(smallest) if arm not in side_arms and not arm.on_rival]
    cost = _log_costs(smallest, arms, size)
    arms, cost = _with_timed_rounds(arms, cost)
    if not arms:
        return Decision(_arms_of(smallest), "no answer was long enough to time a round")
    tokens, rounds = _counts(smallest, arms)
    # Two equal halves, so that prompts add no variance.
    verdict = settled(cost, np.tile(tokens[:, None] / 2, 2), np.tile(rounds[:, None] / 2, 2), precision=precision)
    best = arms[verdict.best]
    if verdict.is_settled:
        others = [c.half_width for c in verdict.standings if c.state == "equivalent"]
        labels = _equivalent_labels(arms, verdict.standings)
        within = f"; as good as it, within {max(others):.1%}: {labels}" if others else ""
        return Decision([], f"{best.label} is the fastest on these prompts{within}")
    waiting = [arms[index] for index in verdict.arms_to_measure]
    parts = [
        f"{arms[index].label} {standing.by:+.1%} +- {standing.half_width:.1%}"
        for index, standing in enumerate(verdict.standings)
        if standing.state == "open"
    ]
    return Decision(
        waiting, f"{best.label} is the fastest on these prompts so far; slower by, not told apart: {', '.join(parts)}"
    )


def _with_timed_rounds(arms: Sequence[Arm], cost: Floats) -> tuple[list[Arm], Floats]:
    """Drop arms whose answers all ended in their first round, for which more processes measure nothing."""
    is_timed = [not np.isnan(of_one).all() for of_one in cost]
    return [arm for arm, keep in zip(arms, is_timed, strict=True) if keep], cost[is_timed]


def _equivalent_labels(arms: Sequence[Arm], standings: Sequence[ArmStanding]) -> str:
    return ", ".join(arm.label for arm, standing in zip(arms, standings, strict=True) if standing.state == "equivalent")


def _arms_of(group_runs: Sequence[GroupRun]) -> list[Arm]:
    return list(dict.fromkeys(run.arm for group_run in group_runs for run in group_run.runs))


def _log_costs(group_runs: Sequence[GroupRun], arms: Sequence[Arm], size: int) -> Floats:
    """[arms, processes]: log of a round's time over the process's plain step on its quicker kernel."""
    times = {key: ns for key, ns in steady_round_ns(group_runs).items() if not np.isnan(ns)}
    processes = sorted({group_run.process for group_run in group_runs})
    plain = {
        process: min((ns for (p, arm, _), ns in times.items() if p == process and arm.is_plain), default=np.nan)
        for process in processes
    }
    return np.array(
        [
            [np.log((plain[p] if arm.is_plain else times.get((p, arm, size), np.nan)) / plain[p]) for p in processes]
            for arm in arms
        ]
    )


def _counts(group_runs: Sequence[GroupRun], arms: Sequence[Arm]) -> tuple[Floats, Floats]:
    """([arms], [arms]): tokens and rounds of the prompts that all of these arms decoded."""
    counts_of: dict[Arm, dict[str, tuple[int, int]]] = {arm: {} for arm in arms}
    for group_run in group_runs:
        for run in group_run.runs:
            for prompt, decoded in zip(group_run.group, run.decoded, strict=True):
                if run.arm in counts_of:
                    counts_of[run.arm][prompt.prompt_id] = (len(decoded.tokens) - 1, len(decoded.rounds))
    shared = set.intersection(*(set(by_prompt) for by_prompt in counts_of.values()))
    sums = np.array(
        [[sum(by_prompt[name][i] for name in shared) for i in (0, 1)] for by_prompt in counts_of.values()],
        dtype=np.float64,
    )
    return np.maximum(sums[:, 0], 1.0), np.maximum(sums[:, 1], 1.0)


def cost_half_widths(cells: Sequence[CostCell]) -> dict[str, float]:
    """Arm -> half-width of the 95 % interval of a round's cost over a plain step, as a share; {} for one process.

    With several batch sizes or KV lengths, an arm has the width of its worst cell.
    """
    widest: dict[str, float] = {}
    for setting in sorted({(cell.batch_size, cell.kv_len) for cell in cells}):
        at_setting = [cell for cell in cells if (cell.batch_size, cell.kv_len) == setting]
        names, cost = _cost_matrix(at_setting)
        if not names:
            continue
        for name, width in zip(names, half_widths(cost), strict=True):
            if np.isfinite(width):
                widest[name] = max(widest.get(name, 0.0), float(width))
    return widest


def _cost_matrix(cells: Sequence[CostCell]) -> tuple[list[str], Floats]:
    """(names, [arms, processes] log of verify + draft + host over plain step + host)."""
    times = _steady_times(cells)
    processes = sorted({process for process, *_ in times})
    plain = {
        p: min(
            ns + times.get((p, "host", "", 0, 0), 0.0)
            for (q, phase, *_), ns in times.items()
            if (q, phase) == (p, "target_step")
        )
        for p in processes
    }
    arms = sorted({key[2:] for key in times if key[1] == "draft"})
    methods = {cell.draft_key: cell.method for cell in cells}

    def whole(process: int, arm: tuple[str, int, int]) -> float:
        return sum(times.get((process, phase, *arm), np.nan) for phase in ("verify", "draft", "host"))

    cost = np.array([[np.log(whole(p, arm) / plain[p]) for p in processes] for arm in arms])
    return [f"{methods[key]} k={depth}" + (f" tree of {budget}" if budget else "") for key, depth, budget in arms], cost


def _steady_times(cells: Sequence[CostCell]) -> Mapping[tuple[int, str, str, int, int], float]:
    """(process, phase, draft_key, depth, tree budget or 0) -> ns; for plain steps of the quickest kernel."""
    blocks: dict[tuple[int, str, str, int, int], dict[str, list[float]]] = {}
    for c in cells:
        key = (c.process, c.phase, c.draft_key, c.depth_k, c.tree_budget or 0)
        blocks.setdefault(key, {}).setdefault(c.kernel, []).append(c.median_ns)
    return {key: min(steady(times) for times in by_kernel.values()) for key, by_kernel in blocks.items()}


class ArmStanding(NamedTuple):
    """One arm against the best. by: log of the best arm's speed over its own. half_width: of the 95 % interval of `by`,
    infinite with fewer than two prompts or processes. state: best | worse | equivalent | open."""

    by: float
    half_width: float
    state: str


class Settled(NamedTuple):
    """State of a measurement. arms_to_measure: indices of the arms that need more processes, the best among them."""

    is_settled: bool
    best: int
    standings: list[ArmStanding]
    arms_to_measure: list[int]


def settled(cost: Floats, tokens: Floats, rounds: Floats, precision: float = PRECISION) -> Settled:
    """The state of a measurement.

    cost: [arms, processes], log of a round over a plain step in each process; NaN where a process has not timed an arm.
    tokens, rounds: [arms, prompts], of the same prompts for all arms.
    """
    length = tokens.sum(axis=1) / rounds.sum(axis=1)
    scatter = _scatter(cost)
    speed = np.log(length) - scatter.mean
    best = int(speed.argmax())
    influence = ratio_influence(tokens.T, rounds.T).T / length[:, None]
    standings = []
    for a in range(len(cost)):
        if a == best:
            standings.append(ArmStanding(0.0, 0.0, "best"))
            continue
        cost_difference = cost[best] - cost[a]
        shared = ~np.isnan(cost_difference)
        log_ratio = float(np.log(length[best] / length[a]) - cost_difference[shared].mean()) if shared.any() else 0.0
        slope = influence[best] - influence[a]
        sample = sample_of(rounds[a] + rounds[best], slope)
        prompts = float((slope**2).sum()) * sample.inflation
        parts = [
            (prompts, sample.dof),
            _process_variance(cost_difference[shared], scatter, bool(scatter.is_odd[[a, best]].any())),
        ]
        half_width = _half_width(parts) if tokens.shape[1] > 1 and shared.any() else math.inf
        standings.append(ArmStanding(log_ratio, half_width, _state_of(log_ratio, half_width, precision)))
    open_ = [a for a, c in enumerate(standings) if c.state == "open"]
    return Settled(not open_, best, standings, sorted({best, *open_}) if open_ else [])


def half_widths(cost: Floats) -> Floats:
    """[arms]: half-width of the interval of each arm's mean log cost over plain decoding; infinite with one process.

    cost: as in `settled`. The scatter that arms share is that of plain decoding; the rest is pooled over arms.
    """
    scatter = _scatter(cost)
    if cost.shape[1] < 2 or not scatter.dof:
        return np.full(len(cost), math.inf)
    num = (~np.isnan(cost)).sum(axis=1)
    shared = np.nanmean(cost - np.nanmean(cost, axis=1, keepdims=True), axis=0)
    common, dof = float(shared.var(ddof=1)), cost.shape[1] - 1.0
    parts = [[(common / n, dof), (scatter.pooled / n, scatter.dof)] if n > 1 else [(math.inf, 1.0)] for n in num]
    return np.array([_half_width(of_one) for of_one in parts])


class _Scatter(NamedTuple):
    """Scatter of arms over processes. mean: [arms], without effects of processes. pooled: variance of one arm in one
    process about both. dof: its degrees of freedom. is_odd: [arms], whether one scatters far more than the others."""

    mean: Floats
    pooled: float
    dof: float
    is_odd: NDArray[np.bool_]


def _scatter(cost: Floats) -> _Scatter:
    timed = ~np.isnan(cost)
    filled = np.where(timed, cost, 0.0)
    arm, process = np.zeros(cost.shape[0]), np.zeros(cost.shape[1])
    for _ in range(1 if timed.all() else 30):
        arm = np.where(timed, filled - process, 0.0).sum(axis=1) / np.maximum(1, timed.sum(axis=1))
        process = np.where(timed, filled - arm[:, None], 0.0).sum(axis=0) / np.maximum(1, timed.sum(axis=0))
    rest = np.where(timed, filled - arm[:, None] - process, 0.0)
    squares = (rest**2).sum(axis=1)
    can_tell = min(cost.shape[0] / FEW_ARMS, cost.shape[1] / FEW_PROCESSES) >= 1.0
    is_odd = (squares > SUSPICIOUS * np.median(squares)) & can_tell
    whole = float(timed.sum() - cost.shape[0] - timed.any(axis=0).sum() + 1)
    dof = whole * float((~is_odd).mean())
    return _Scatter(arm, float(squares[~is_odd].sum()) / dof if dof >= 1.0 else math.nan, dof, is_odd)


def _process_variance(difference: Floats, scatter: _Scatter, is_odd: bool) -> tuple[float, float]:
    """(variance of the mean difference of two arms, degrees of freedom); infinite with one process."""
    num = len(difference)
    if num < 2 or scatter.dof < 1.0:
        return math.inf, 1.0
    if is_odd:
        return float(difference.var(ddof=1)) / num, num - 1.0
    return 2.0 * scatter.pooled / num, scatter.dof


def _half_width(parts: list[tuple[float, float]]) -> float:
    whole = sum(variance for variance, _ in parts)
    if not math.isfinite(whole):
        return math.inf
    if whole == 0.0:
        return 0.0
    dof = whole**2 / sum(variance**2 / dof for variance, dof in parts)
    return student_quantile((1.0 + LEVEL) / 2.0, dof) * math.sqrt(whole)


def _state_of(by: float, half_width: float, precision: float) -> str:
    if by - half_width > 0.0:
        return "worse"
    return "equivalent" if by + half_width <= BAND or half_width <= precision else "open"
