"""Decides when a measurement may end, by components/speedup/settled.py on the runs so far."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.bench.arms import Arm
from components.bench.timed_runs import GroupRun, steady_round_ns
from components.rows import CostCell
from components.speedup.bootstrap import Floats
from components.speedup.settled import ArmStanding, half_widths, settled
from components.speedup.steady import steady


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
        return Decision([], f"{best.label} is the fastest{within}")
    waiting = [arms[index] for index in verdict.arms_to_measure]
    parts = [
        f"{arms[index].label} {standing.by:+.1%} +- {standing.half_width:.1%}"
        for index, standing in enumerate(verdict.standings)
        if standing.state == "open"
    ]
    return Decision(waiting, f"{best.label} is the fastest so far; slower by, not told apart: {', '.join(parts)}")


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
