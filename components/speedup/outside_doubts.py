"""Reasons to doubt what outside rows say: the flags of any prediction, and those of numbers that others put together.

Thresholds of the flags that only outside rows raise are stated here. What cannot be at all is refused before
(outside_checks.py, outside_times.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from components.rows import UNTRAINED, DepthChoice, DepthEval
from components.speedup.bootstrap import Estimate
from components.speedup.evaluate import Speeds
from components.speedup.flags import (
    MAX_PREDICTION_GAP,
    MIN_COST_RATIO,
    Doubt,
    baseline_doubts,
    cost_doubts,
    depth_doubts,
    falling_doubts,
    sample_doubts,
)
from components.speedup.outside_acceptance import Acceptance
from components.speedup.outside_checks import ROUNDED
from components.speedup.outside_evidence import Case
from components.speedup.outside_times import NEARLY_FREE, explained_factor
from components.speedup.policy import ALL

MAX_STEP_UP = 3.0  # times what depth explains, between neighbouring depths of T_verify
MAX_STEP_DOWN = 0.8  # a deeper verification pass as a share of a shallower one


class Worked(NamedTuple):
    """One workload of one case, worked through."""

    acceptance: Acceptance
    speeds: Speeds
    evals: list[DepthEval]
    choice: DepthChoice


def doubts_of(case: Case, worked: Mapping[str, Worked]) -> list[Doubt]:
    """What is doubtful about one case, over all workloads and where they were measured."""
    pooled = worked[ALL]
    depth = pooled.choice.depth_k
    doubts = []
    if case.table is not None:
        drafted = [e for e in pooled.evals if e.depth_k]
        doubts += cost_doubts(drafted) or _below_plain(drafted)
        doubts += _uneven_times(case, drafted)
    for (workload, k), speedup in case.measured.items():
        evals = worked[workload].evals if workload in worked else []
        al = next((e.al for e in evals if e.depth_k == k), None)
        if al is not None:
            doubts += [d._replace(detail=f"workload {workload}: {d.detail}") for d in baseline_doubts(al / speedup, k)]
    doubts += _sample(pooled.acceptance, depth)
    if case.trained_depth is not None:
        doubts += depth_doubts(depth, case.trained_depth)
    doubts += falling_doubts(pooled.speeds)
    for name, one in worked.items():
        if name != ALL or len(worked) == 1:
            doubts += _growing_steps(name, one.speeds)
        gap = one.choice.pred_error
        if gap is not None and abs(gap) > MAX_PREDICTION_GAP:
            said = f"workload {name}: predicted {one.choice.speedup_pred:.2f}x, measured {one.choice.speedup_meas:.2f}x"
            doubts.append(Doubt("prediction_gap", "warning", gap, said))
    return doubts


def _sample(acceptance: Acceptance, depth: int) -> list[Doubt]:
    """What acceptance was measured on, and how it was put together."""
    doubts = []
    if acceptance.num_prompts:
        doubts += sample_doubts(acceptance.num_prompts, acceptance.num_rounds(depth), depth)
    else:
        said = "acceptance is one figure for all prompts: nothing tells how far chance could move it"
        doubts.append(Doubt("no_interval", "warning", 0, said))
    if acceptance.is_prefix:
        said = "taken from the first positions of a deeper run, which understates acceptance length at shallow depths"
        doubts.append(Doubt("prefix_of_deeper_run", "warning", max(acceptance.depths), said))
    lengths = acceptance.lengths.get(depth or acceptance.depths[0], [])
    if len({*lengths}) > 1:
        mean = len(lengths) / sum(1.0 / al for al in lengths)
        said = (
            f"AL {mean:.2f} at depth {depth or acceptance.depths[0]} is a macro mean (harmonic) of {len(lengths)} "
            f"lengths from {min(lengths):.2f} to {max(lengths):.2f}, as if each were of the same number of tokens, "
            f"which no row tells (their plain mean is {sum(lengths) / len(lengths):.2f}); give tokens or rounds "
            "beside al and they are pooled"
        )
        doubts.append(Doubt("macro_mean", "warning", mean, said))
    at_every = len(acceptance.whole_units(acceptance.depths))
    if acceptance.num_prompts > at_every:
        left_out = acceptance.num_prompts - at_every
        said = f"of {acceptance.num_prompts} prompts {left_out} are not told at every depth and may be left out"
        doubts.append(Doubt("prompts_left_out", "warning", left_out, said))
    return doubts


def _growing_steps(workload: str, speeds: Speeds) -> list[Doubt]:
    """A depth that adds more than the one before it, or more than the one token that a draft is.

    Rounds of one run cannot do either; runs of different depths can, a little, on text that repeats itself.
    """
    doubts = []
    points = list(zip(speeds.depths, speeds.al, strict=True))
    steps = [
        (deeper, after.minus_paired(before), deeper - depth)
        for (depth, before), (deeper, after) in itertools.pairwise(points)
    ]
    for deeper, step, positions in steps:
        if step.value > positions + ROUNDED and step.interval()[0] > positions:
            said = (
                f"workload {workload}: AL grows by {step.value:.2f} over {positions} position(s) up to depth {deeper}, "
                "where a draft adds at most one token; the depths were not measured alike, or the text loops"
            )
            doubts.append(Doubt("al_step_above_one", "fault", step.value / positions, said))
    for (_, before, wide), (deeper, after, narrow) in itertools.pairwise(steps):
        grown = _a_position(after, narrow).minus_paired(_a_position(before, wide))
        if grown.value > ROUNDED and grown.interval()[0] > 0.0:
            said = (
                f"workload {workload}: depth {deeper} adds {after.value / narrow:.2f} tokens a position, the depth "
                f"before it {before.value / wide:.2f}; of one run each position adds less than the one before"
            )
            doubts.append(Doubt("al_steps_grow", "warning", grown.value, said))
    return doubts


def _a_position(step: Estimate, positions: int) -> Estimate:
    """What a step over several positions adds at each of them, on average."""
    return Estimate(step.value / positions, step.draws / positions, step.influence / positions)


def _below_plain(drafted: Sequence[DepthEval]) -> list[Doubt]:
    """A verification pass that is quicker than a plain step, though it is given more rows."""
    lowest = min(drafted, key=lambda e: e.t_verify_ms)
    ratio = lowest.t_verify_ms / lowest.t_target_ms
    if ratio >= MIN_COST_RATIO:
        return []
    said = f"T_verify({lowest.depth_k}) is below T_target: more rows in less time; the two were not timed alike"
    return [Doubt("verify_below_plain", "warning", ratio, said)]


def _uneven_times(case: Case, drafted: Sequence[DepthEval]) -> list[Doubt]:
    """Times that jump or fall between depths by more than they explain, and drafts that cost next to nothing."""
    doubts = []
    for before, after in itertools.pairwise(sorted(drafted, key=lambda e: e.depth_k)):
        explained = explained_factor("t_verify", before.depth_k, after.depth_k, case.tree_budget)
        ratio = after.t_verify_ms / before.t_verify_ms
        if not MAX_STEP_DOWN <= ratio <= MAX_STEP_UP * explained:
            said = (
                f"T_verify goes from {before.t_verify_ms:g} ms at depth {before.depth_k} to {after.t_verify_ms:g} ms "
                f"at depth {after.depth_k}; rows explain up to {explained:.3g} times: mistyped, or a disturbed timing"
            )
            doubts.append(Doubt("uneven_verify", "warning", ratio, said))
    cheapest = min(drafted, key=lambda e: e.t_draft_ms)
    if case.method not in UNTRAINED and cheapest.t_draft_ms < NEARLY_FREE * cheapest.t_target_ms:
        said = (
            f"drafting {cheapest.depth_k} token(s) is said to take {cheapest.t_draft_ms:g} ms beside a plain step of "
            f"{cheapest.t_target_ms:g} ms; a unit mistaken, or left out?"
        )
        share = cheapest.t_draft_ms / cheapest.t_target_ms
        doubts.append(Doubt("draft_nearly_free", "warning", share, said))
    return doubts
