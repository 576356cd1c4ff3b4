"""When may a measurement end? What is known so far, put to components/speedup/settled.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.bench.arms import Arm
from components.bench.timed_runs import GroupRun, steady_round_ns
from components.rows import CostCell
from components.speedup.bootstrap import Floats
from components.speedup.settled import Contender, half_widths, settled
from components.speedup.steady import steady


class Open(NamedTuple):
    """The arms that the decision waits for, none where it is settled; and in words what is known."""

    arms: Collection[Arm]
    said: str


def open_arms(found: Sequence[GroupRun], side_arms: Collection[Arm], precision: float) -> Open:
    """Which arms need another process, from all that was decoded so far at the smallest batch size.

    Plain decoding is a contender like the others. Acceptance is of the prompts decoded, and no process tells more about
    it: what is asked here is whether time is known well enough, prompt by prompt as it is.
    """
    size = min(len(group_run.group) for group_run in found)
    mine = [group_run for group_run in found if len(group_run.group) == size]
    arms = [arm for arm in _arms_of(mine) if arm not in side_arms and not arm.on_rival]
    cost = _log_costs(mine, arms, size)
    arms, cost = _timed_at_all(arms, cost)
    if not arms:
        return Open(_arms_of(mine), "no answer was long enough to time a round")
    tokens, rounds = _counts(mine, arms)
    # Two halves that are alike: prompts then add no variance.
    where = settled(cost, np.tile(tokens[:, None] / 2, 2), np.tile(rounds[:, None] / 2, 2), precision=precision)
    best = arms[where.best]
    if where.is_settled:
        others = [c.half_width for c in where.contenders if c.state == "equivalent"]
        within = f"; as good as it, within {max(others):.1%}: {_named(arms, where.contenders)}" if others else ""
        return Open([], f"{best.label} is the fastest{within}")
    waiting = [arms[index] for index in where.more]
    parts = [
        f"{arms[index].label} {contender.by:+.1%} +- {contender.half_width:.1%}"
        for index, contender in enumerate(where.contenders)
        if contender.state == "open"
    ]
    return Open(waiting, f"{best.label} is the fastest so far; slower by, not told apart: {', '.join(parts)}")


def _timed_at_all(arms: Sequence[Arm], cost: Floats) -> tuple[list[Arm], Floats]:
    """Without the arms whose answers all ended in their first round: more of them would tell no more."""
    known = [not np.isnan(of_one).all() for of_one in cost]
    return [arm for arm, is_known in zip(arms, known, strict=True) if is_known], cost[known]


def _named(arms: Sequence[Arm], contenders: Sequence[Contender]) -> str:
    return ", ".join(arm.label for arm, one in zip(arms, contenders, strict=True) if one.state == "equivalent")


def _arms_of(found: Sequence[GroupRun]) -> list[Arm]:
    return list(dict.fromkeys(run.arm for group_run in found for run in group_run.runs))


def _log_costs(found: Sequence[GroupRun], arms: Sequence[Arm], size: int) -> Floats:
    """[arms, processes]: log of a round over the plain step of the process on its quicker kernel."""
    times = {key: ns for key, ns in steady_round_ns(found).items() if not np.isnan(ns)}
    processes = sorted({group_run.process for group_run in found})
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


def _counts(found: Sequence[GroupRun], arms: Sequence[Arm]) -> tuple[Floats, Floats]:
    """([arms], [arms]): tokens and rounds over the prompts that all of these arms decoded."""
    told: dict[Arm, dict[str, tuple[int, int]]] = {arm: {} for arm in arms}
    for group_run in found:
        for run in group_run.runs:
            for prompt, one in zip(group_run.group, run.decoded, strict=True):
                if run.arm in told:
                    told[run.arm][prompt.prompt_id] = (len(one.tokens) - 1, len(one.rounds))
    shared = set.intersection(*(set(by_prompt) for by_prompt in told.values()))
    sums = np.array([[sum(of[name][i] for name in shared) for i in (0, 1)] for of in told.values()], dtype=np.float64)
    return np.maximum(sums[:, 0], 1.0), np.maximum(sums[:, 1], 1.0)


def cost_half_widths(cells: Sequence[CostCell]) -> dict[str, float]:
    """Arm by arm, half the width of the 95 % interval of a round's cost over a plain step, a share; {} of one process.

    Where several batch sizes or KV lengths were timed, an arm is as uncertain as its worst cell.
    """
    widest: dict[str, float] = {}
    for setting in sorted({(cell.batch_size, cell.kv_len) for cell in cells}):
        mine = [cell for cell in cells if (cell.batch_size, cell.kv_len) == setting]
        names, cost = _cost_matrix(mine)
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
    """(process, phase, draft_key, depth, tree budget or 0) -> ns; of plain steps those of the quickest kernel."""
    blocks: dict[tuple[int, str, str, int, int], dict[str, list[float]]] = {}
    for c in cells:
        key = (c.process, c.phase, c.draft_key, c.depth_k, c.tree_budget or 0)
        blocks.setdefault(key, {}).setdefault(c.kernel, []).append(c.median_ns)
    return {key: min(steady(times) for times in by_kernel.values()) for key, by_kernel in blocks.items()}
