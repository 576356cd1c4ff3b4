"""A depth policy from imported rows, by the same model, rule and flags as choose_depth.

Where only end-to-end speedups are known, the cost of a workload is the mean of AL / S over the OTHER workloads: a round
costs the same whatever the text, so that the resulting speedup is a prediction that the workload's own measurement can
test. A single workload has only its own AL / S.

Flags are those of any prediction, and those of numbers that may not fit together, whose thresholds are stated here.
Impossible rows were refused before (checks.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from components.contract import UserError
from components.methods import is_trained
from components.policy import Mixture, Policy, extended, faults_of
from components.rows import ALL, DepthChoice, DepthEval
from components.speedup.bootstrap import Estimate
from components.speedup.imported.acceptance import Acceptance
from components.speedup.imported.checks import NEARLY_FREE, ROUNDED, check_together, explained_factor
from components.speedup.imported.evidence import MeasurementCase, borrowed_table, cases_of
from components.speedup.imported.rows import SourcedRow
from components.speedup.prediction.costs import select_depths
from components.speedup.prediction.flags import (
    MAX_PREDICTION_GAP,
    MIN_COST_RATIO,
    QualityIssue,
    baseline_issues,
    cost_issues,
    depth_issues,
    falling_issues,
    sample_issues,
)
from components.speedup.prediction.mixture import one_depth_for_all, stated_shares
from components.speedup.prediction.predict import Identity, Rule, Speeds, choice_row, depth_rows, predict
from components.speedup.select import Contender, conclude


def policy_from(rows: Sequence[SourcedRow], rule: Rule, mixture: Mapping[str, float], seed: int) -> Policy:
    """The policy for every drafter, batch size, context length and workload in the rows.

    Raises:
        UserError: rows that contradict each other, acceptance without cost, or a mixture of unknown workloads.
    """
    check_together(rows)
    policy = Policy("outside", "", "", "", rule.description, rule.tolerance, [], [], [], [], [], [])
    cases = cases_of(rows)
    results: list[tuple[MeasurementCase, CaseResult]] = []
    for case in cases:
        policy, result = _with_case(policy, case, rule, mixture, seed)
        results.append((case, result))
    faulty = {case.label for case in cases if faults_of(policy, case.label)}
    smallest = {label: min(c.batch_size for c in cases if c.label == label) for label in {c.label for c in cases}}
    contenders = [
        _contender(case, result, case.label in faulty)
        for case, result in results
        if (case.kv_len, case.batch_size) == (None, smallest[case.label])
    ]
    return conclude(_invalidate_faulty(policy, faulty), contenders, rule)


def _invalidate_faulty(policy: Policy, faulty: Collection[str]) -> Policy:
    """The policy with invalid choices for drafters with faults, so that no reader of it finds a speedup to use."""

    def invalid(choice: DepthChoice) -> DepthChoice:
        if choice.draft_key not in faulty:
            return choice
        reasons = [f"{flag.code}: {flag.detail}" for flag in faults_of(policy, choice.draft_key)]
        plain = replace(choice, depth_k=0, speedup_pred=1.0, pred_lo=1.0, pred_hi=1.0, p_beats_no_spec=0.0, loss=None)
        unmeasured = replace(plain, speedup_meas=None, meas_lo=None, meas_hi=None, pred_error=None)
        return replace(unmeasured, verdict="invalid", reasons=reasons)

    return replace(
        policy,
        choices=[invalid(choice) for choice in policy.choices],
        contexts=[invalid(choice) for choice in policy.contexts],
        mixtures=[mixture for mixture in policy.mixtures if mixture.draft_key not in faulty],
    )


def _with_case(
    policy: Policy, case: MeasurementCase, rule: Rule, mixture: Mapping[str, float], seed: int
) -> tuple[Policy, CaseResult]:
    """The policy with one case, and its result over all workloads."""
    names = [ALL, *sorted(case.workloads - {ALL})]
    results = {name: _evaluate_workload(policy, case, name, rule, seed) for name in names}
    pooled = results[ALL]
    if case.kv_len is not None:
        return extended(policy, contexts=[pooled.choice]), pooled
    mixtures, choices = _one_depth_for_all(policy, case, results, rule, mixture)
    return extended(
        policy,
        evals=[e for name in names for e in results[name].evals],
        mixtures=mixtures,
        choices=choices.values(),
        flags=[issue.to_flag(policy.selection_id, case.label, case.method) for issue in issues_of(case, results)],
    ), pooled


def _evaluate_workload(policy: Policy, case: MeasurementCase, workload: str, rule: Rule, seed: int) -> CaseResult:
    acceptance = case.acceptance_of(workload)
    table = case.table or borrowed_table(case, workload)
    depths = sorted({0, *acceptance.depths} & set(table.depths))
    if len(depths) < 2:
        raise UserError(
            f"{case.label}, workload {workload}: no depth has both acceptance and cost; acceptance is known at "
            f"{_depth_list(acceptance.depths)}, cost at {_depth_list(table.depths[1:])}"
        )
    table = select_depths(table, depths)
    tokens, rounds = acceptance.at(depths)
    identity = Identity(policy.selection_id, policy.target_key, case.label, case.method, workload, case.batch_size)
    speeds = predict(tokens, rounds, table, workload, rule, seed)
    evals = [_with_measurement(e, case) for e in depth_rows(speeds, table, identity, case.tree_budget)]
    choice = _choice_with_measurement(choice_row(speeds, identity, rule, case.kv_len), evals)
    if not acceptance.num_prompts:
        choice = replace(choice, reasons=[*choice.reasons, "by figures that carry no interval over prompts"])
    return CaseResult(acceptance, speeds, evals, choice)


def _depth_list(depths: Sequence[int]) -> str:
    return ", ".join(map(str, depths)) or "none"


def _with_measurement(row: DepthEval, case: MeasurementCase) -> DepthEval:
    """The row with its measured speedup, where there is one."""
    measured = case.measured.get((row.workload, row.depth_k))
    return row if measured is None else replace(row, speedup_meas=measured, al_meas=row.al)


def _choice_with_measurement(choice: DepthChoice, evals: Sequence[DepthEval]) -> DepthChoice:
    measured = next((e.speedup_meas for e in evals if e.depth_k == choice.depth_k), None)
    if measured is None or choice.depth_k == 0:
        return choice
    return replace(choice, speedup_meas=measured, pred_error=choice.speedup_pred / measured - 1.0)


def _one_depth_for_all(
    policy: Policy, case: MeasurementCase, results: Mapping[str, CaseResult], rule: Rule, stated: Mapping[str, float]
) -> tuple[list[Mixture], dict[str, DepthChoice]]:
    """The choices of every workload, with the loss of one depth for all of them."""
    names = [name for name in results if name != ALL]
    choices = {name: results[name].choice for name in results}
    shares = stated_shares(stated, names) if stated else {}
    same_depths = len({tuple(result.speeds.depths) for result in results.values()}) == 1
    if shares and not same_depths:
        raise UserError(f"mixture: {case.label} was not measured at the same depths on every workload")
    if not names or not same_depths or (not shares and len(names) < 2):
        return [], choices
    speeds = {name: results[name].speeds for name in names}
    weights = shares or _measured_shares({name: results[name].acceptance for name in names})
    identity = Identity(policy.selection_id, policy.target_key, case.label, case.method, ALL, case.batch_size)
    mixture, choices = one_depth_for_all(speeds, weights, None if shares else choices[ALL], choices, identity, rule)
    return [mixture], choices


def _measured_shares(by_workload: Mapping[str, Acceptance]) -> dict[str, float]:
    """Shares of the counted tokens; equal shares where only lengths are known."""
    tokens = {name: acceptance.num_tokens if acceptance.is_counted else 1.0 for name, acceptance in by_workload.items()}
    return {name: count / sum(tokens.values()) for name, count in tokens.items()}


def _contender(case: MeasurementCase, result: CaseResult, is_faulty: bool) -> Contender:
    depth = 0 if is_faulty else result.choice.depth_k
    speedup = result.speeds.speedup[result.speeds.depths.index(depth)]
    budget = case.tree_budget if depth else None
    verdict = "invalid" if is_faulty else result.choice.verdict
    return Contender(case.label, case.method, depth, budget, case.draft_vocab, speedup, verdict)


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
    if is_trained(case.method) and cheapest.t_draft_ms < NEARLY_FREE * cheapest.t_target_ms:
        detail = (
            f"drafting {cheapest.depth_k} token(s) is said to take {cheapest.t_draft_ms:g} ms beside a plain step of "
            f"{cheapest.t_target_ms:g} ms; a unit mistaken, or left out?"
        )
        share = cheapest.t_draft_ms / cheapest.t_target_ms
        issues.append(QualityIssue("draft_nearly_free", "warning", share, detail))
    return issues
