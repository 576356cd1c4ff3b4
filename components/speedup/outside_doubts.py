"""Quality flags of imported rows: those of any prediction, and those of numbers that may not fit together.

Thresholds of the latter are stated here. Impossible rows were refused before (outside_checks.py, outside_times.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from components.rows import ALL, UNTRAINED, DepthChoice, DepthEval
from components.speedup.bootstrap import Estimate
from components.speedup.evaluate import Speeds
from components.speedup.flags import (
    MAX_PREDICTION_GAP,
    MIN_COST_RATIO,
    QualityIssue,
    baseline_issues,
    cost_issues,
    depth_issues,
    falling_issues,
    sample_issues,
)
from components.speedup.outside_acceptance import Acceptance
from components.speedup.outside_checks import ROUNDED
from components.speedup.outside_evidence import MeasurementCase
from components.speedup.outside_times import NEARLY_FREE, explained_factor

MAX_STEP_UP = 3.0  # factor beyond what depth explains, between neighbouring depths of T_verify
MAX_STEP_DOWN = 0.8  # a deeper verification pass as a share of a shallower one


class CaseResult(NamedTuple):
    """Acceptance, speeds, rows and choice of one workload of one case."""

    acceptance: Acceptance
    speeds: Speeds
    evals: list[DepthEval]
    choice: DepthChoice


def issues_of(case: MeasurementCase, results: Mapping[str, CaseResult]) -> list[QualityIssue]:
    """The issues of one case: over all workloads, and of each where that is possible. results: by workload."""
    pooled = results[ALL]
    depth = pooled.choice.depth_k
    issues = []
    if case.table is not None:
        drafted = [e for e in pooled.evals if e.depth_k]
        issues += cost_issues(drafted) or _below_plain_issues(drafted)
        issues += _uneven_time_issues(case, drafted)
    for (workload, k), speedup in case.measured.items():
        evals = results[workload].evals if workload in results else []
        al = next((e.al for e in evals if e.depth_k == k), None)
        if al is not None:
            issues += [d._replace(detail=f"workload {workload}: {d.detail}") for d in baseline_issues(al / speedup, k)]
    issues += _sample_issues(pooled.acceptance, depth)
    if case.trained_depth is not None:
        issues += depth_issues(depth, case.trained_depth)
    issues += falling_issues(pooled.speeds)
    for name, result in results.items():
        if name != ALL or len(results) == 1:
            issues += _growing_step_issues(name, result.speeds)
        gap = result.choice.pred_error
        if gap is not None and abs(gap) > MAX_PREDICTION_GAP:
            choice = result.choice
            detail = f"workload {name}: predicted {choice.speedup_pred:.2f}x, measured {choice.speedup_meas:.2f}x"
            issues.append(QualityIssue("prediction_gap", "warning", gap, detail))
    return issues


def _sample_issues(acceptance: Acceptance, depth: int) -> list[QualityIssue]:
    """Issues of the sample behind acceptance, and of how its rows were combined."""
    issues = []
    if acceptance.num_prompts:
        issues += sample_issues(acceptance.num_prompts, acceptance.num_rounds(depth), depth)
    else:
        detail = "acceptance is one figure for all prompts: nothing tells how far chance could move it"
        issues.append(QualityIssue("no_interval", "warning", 0, detail))
    if acceptance.is_prefix:
        detail = "taken from the first positions of a deeper run, which understates acceptance length at shallow depths"
        issues.append(QualityIssue("prefix_of_deeper_run", "warning", max(acceptance.depths), detail))
    lengths = acceptance.lengths.get(depth or acceptance.depths[0], [])
    if len({*lengths}) > 1:
        mean = len(lengths) / sum(1.0 / al for al in lengths)
        detail = (
            f"AL {mean:.2f} at depth {depth or acceptance.depths[0]} is a macro mean (harmonic) of {len(lengths)} "
            f"lengths from {min(lengths):.2f} to {max(lengths):.2f}, as if each were of the same number of tokens, "
            f"which no row tells (their plain mean is {sum(lengths) / len(lengths):.2f}); give tokens or rounds "
            "beside al and they are pooled"
        )
        issues.append(QualityIssue("macro_mean", "warning", mean, detail))
    at_every = len(acceptance.whole_units(acceptance.depths))
    if acceptance.num_prompts > at_every:
        left_out = acceptance.num_prompts - at_every
        detail = f"of {acceptance.num_prompts} prompts {left_out} are not told at every depth and may be left out"
        issues.append(QualityIssue("prompts_left_out", "warning", left_out, detail))
    return issues


def _growing_step_issues(workload: str, speeds: Speeds) -> list[QualityIssue]:
    """Issues of a depth that adds more tokens than the depth before it, or more than one token a draft.

    Rounds of one run can do neither; runs at different depths can, a little, on text that repeats itself.
    """
    issues = []
    points = list(zip(speeds.depths, speeds.al, strict=True))
    steps = [
        (deeper, after.minus_paired(before), deeper - depth)
        for (depth, before), (deeper, after) in itertools.pairwise(points)
    ]
    for deeper, step, positions in steps:
        if step.value > positions + ROUNDED and step.interval()[0] > positions:
            detail = (
                f"workload {workload}: AL grows by {step.value:.2f} over {positions} position(s) up to depth {deeper}, "
                "where a draft adds at most one token; the depths were not measured alike, or the text loops"
            )
            issues.append(QualityIssue("al_step_above_one", "fault", step.value / positions, detail))
    for (_, before, wide), (deeper, after, narrow) in itertools.pairwise(steps):
        grown = _per_position(after, narrow).minus_paired(_per_position(before, wide))
        if grown.value > ROUNDED and grown.interval()[0] > 0.0:
            detail = (
                f"workload {workload}: depth {deeper} adds {after.value / narrow:.2f} tokens a position, the depth "
                f"before it {before.value / wide:.2f}; of one run each position adds less than the one before"
            )
            issues.append(QualityIssue("al_steps_grow", "warning", grown.value, detail))
    return issues


def _per_position(step: Estimate, positions: int) -> Estimate:
    """The average gain of each position in a step over several."""
    return Estimate(step.value / positions, step.draws / positions, step.influence / positions)


def _below_plain_issues(drafted: Sequence[DepthEval]) -> list[QualityIssue]:
    """A verification pass is quicker than a plain step, in spite of more rows."""
    lowest = min(drafted, key=lambda e: e.t_verify_ms)
    ratio = lowest.t_verify_ms / lowest.t_target_ms
    if ratio >= MIN_COST_RATIO:
        return []
    detail = f"T_verify({lowest.depth_k}) is below T_target: more rows in less time; the two were not timed alike"
    return [QualityIssue("verify_below_plain", "warning", ratio, detail)]


def _uneven_time_issues(case: MeasurementCase, drafted: Sequence[DepthEval]) -> list[QualityIssue]:
    """Times jump or fall between depths by more than depth explains, or drafts cost next to nothing."""
    issues = []
    for before, after in itertools.pairwise(sorted(drafted, key=lambda e: e.depth_k)):
        explained = explained_factor("t_verify", before.depth_k, after.depth_k, case.tree_budget)
        ratio = after.t_verify_ms / before.t_verify_ms
        if not MAX_STEP_DOWN <= ratio <= MAX_STEP_UP * explained:
            detail = (
                f"T_verify goes from {before.t_verify_ms:g} ms at depth {before.depth_k} to {after.t_verify_ms:g} ms "
                f"at depth {after.depth_k}; rows explain up to {explained:.3g} times: mistyped, or a disturbed timing"
            )
            issues.append(QualityIssue("uneven_verify", "warning", ratio, detail))
    cheapest = min(drafted, key=lambda e: e.t_draft_ms)
    if case.method not in UNTRAINED and cheapest.t_draft_ms < NEARLY_FREE * cheapest.t_target_ms:
        detail = (
            f"drafting {cheapest.depth_k} token(s) is said to take {cheapest.t_draft_ms:g} ms beside a plain step of "
            f"{cheapest.t_target_ms:g} ms; a unit mistaken, or left out?"
        )
        share = cheapest.t_draft_ms / cheapest.t_target_ms
        issues.append(QualityIssue("draft_nearly_free", "warning", share, detail))
    return issues
