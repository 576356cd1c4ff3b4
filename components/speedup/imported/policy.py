"""A depth policy from imported rows, by the same model, rule and flags as choose_depth.

Where only end-to-end speedups are known, the cost of a workload is the mean of AL / S over the OTHER workloads: a round
costs the same whatever the text, so that the resulting speedup is a prediction that the workload's own measurement can
test. A single workload has only its own AL / S.

Flags are those of any prediction, and those of numbers that may not fit together, whose thresholds are stated here.
Impossible rows were refused before (checks.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from components.contract import UserError
from components.methods import is_trained
from components.policy import Policy, extended, faults_of
from components.rows import ALL, DepthChoice, DepthEval, PredictionKey
from components.speedup.bootstrap import Estimate
from components.speedup.choose import Contender, conclude
from components.speedup.imported.checks import NEARLY_FREE, ROUNDED, check_together, explained_factor
from components.speedup.imported.evidence import Acceptance, MeasurementCase, borrowed_table, cases_of
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
from components.speedup.prediction.predict import Evaluated, Rule, Speeds, evaluate, one_depth_for_all


def policy_from(rows: Sequence[SourcedRow], rule: Rule, mixture: Mapping[str, float], seed: int) -> Policy:
    """The policy for every drafter, batch size, context length and workload in the rows.

    Raises:
        UserError: rows that contradict each other, acceptance without cost, or a mixture of unknown workloads.
    """
    check_together(rows)
    policy = Policy("outside", "", "", "", rule.description, rule.tolerance, [], [], [], [], [], [])
    cases = cases_of(rows)
    pooled: list[Evaluated] = []
    for case in cases:
        policy, result = _with_case(policy, case, rule, mixture, seed)
        pooled.append(result)
    # No reader of the policy finds a speedup to use in a drafter with faults.
    policy = replace(
        policy,
        choices=[_without_faults(policy, choice) for choice in policy.choices],
        contexts=[_without_faults(policy, choice) for choice in policy.contexts],
        mixtures=[mixture for mixture in policy.mixtures if not faults_of(policy, mixture.draft_key)],
    )
    smallest = {label: min(c.batch_size for c in cases if c.label == label) for label in {c.label for c in cases}}
    contenders = [
        Contender.of(result._replace(choice=_without_faults(policy, result.choice)), case.tree_budget, case.draft_vocab)
        for case, result in zip(cases, pooled, strict=True)
        if (case.kv_len, case.batch_size) == (None, smallest[case.label])
    ]
    return conclude(policy, contenders, rule)


def _without_faults(policy: Policy, choice: DepthChoice) -> DepthChoice:
    """The choice; for a drafter with faults an invalid one of depth 0."""
    reasons = [f"{flag.code}: {flag.detail}" for flag in faults_of(policy, choice.draft_key)]
    if not reasons:
        return choice
    not_measured: dict[str, Any] = dict.fromkeys(("loss", "speedup_meas", "meas_lo", "meas_hi", "pred_error"))
    plain = replace(choice, depth_k=0, speedup_pred=1.0, pred_lo=1.0, pred_hi=1.0, p_beats_no_spec=0.0, **not_measured)
    return replace(plain, verdict="invalid", reasons=reasons)


def _with_case(
    policy: Policy, case: MeasurementCase, rule: Rule, mixture: Mapping[str, float], seed: int
) -> tuple[Policy, Evaluated]:
    """The policy with one case, and its result over all workloads."""
    results: dict[str, Evaluated] = {}
    acceptance = {name: case.acceptance_of(name) for name in [ALL, *sorted(case.workloads - {ALL})]}
    identity = PredictionKey(policy.selection_id, policy.target_key, case.label, case.method, ALL, case.batch_size)
    for name in acceptance:
        results[name] = _evaluate_workload(case, acceptance[name], replace(identity, workload=name), rule, seed)
    if case.kv_len is not None:
        return extended(policy, contexts=[results[ALL].choice]), results[ALL]
    # Shares of the counted tokens; equal shares where only lengths are known.
    tokens = {name: of_one.num_tokens if of_one.is_counted else 1.0 for name, of_one in acceptance.items()}
    mixtures, choices = one_depth_for_all(results, mixture, tokens, identity, rule)
    issues = issues_of(case, acceptance[ALL], results)
    return extended(
        policy,
        evals=[e for result in results.values() for e in result.evals],
        mixtures=mixtures,
        choices=choices.values(),
        flags=[issue.to_flag(policy.selection_id, case.label, case.method) for issue in issues],
    ), results[ALL]


def _evaluate_workload(
    case: MeasurementCase, acceptance: Acceptance, identity: PredictionKey, rule: Rule, seed: int
) -> Evaluated:
    """The result on one workload, with its measured speedups where there are any."""
    workload = identity.workload
    table = case.table or borrowed_table(case, workload)
    depths = sorted({0, *acceptance.depths} & set(table.depths))
    if len(depths) < 2:
        raise UserError(
            f"{case.label}, workload {workload}: no depth has both acceptance and cost; acceptance is known at "
            f"{_depth_list(acceptance.depths)}, cost at {_depth_list(table.depths[1:])}"
        )
    table = select_depths(table, depths)
    result = evaluate(
        acceptance.at(depths), table, identity, rule, seed, tree_budget=case.tree_budget, kv_len=case.kv_len
    )
    measured = {depth: speedup for (name, depth), speedup in case.measured.items() if name == workload}
    evals = [
        replace(e, speedup_meas=measured[e.depth_k], al_meas=e.al) if e.depth_k in measured else e for e in result.evals
    ]
    choice = result.choice
    if choice.depth_k and (at_choice := measured.get(choice.depth_k)) is not None:
        choice = replace(choice, speedup_meas=at_choice, pred_error=choice.speedup_pred / at_choice - 1.0)
    if not acceptance.num_prompts:
        choice = replace(choice, reasons=[*choice.reasons, "by figures that carry no interval over prompts"])
    return result._replace(evals=evals, choice=choice)


def _depth_list(depths: Sequence[int]) -> str:
    return ", ".join(map(str, depths)) or "none"


MAX_STEP_UP = 3.0  # factor beyond what depth explains, between neighbouring depths of T_verify
MAX_STEP_DOWN = 0.8  # a deeper verification pass as a share of a shallower one


def issues_of(case: MeasurementCase, acceptance: Acceptance, results: Mapping[str, Evaluated]) -> list[QualityIssue]:
    """The issues of one case: over all workloads, whose acceptance is given, and of each where that is possible."""
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
    issues += _sample_issues(acceptance, depth)
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
