"""A depth policy from imported rows, by the same model, rule and flags as choose_depth.

Where only end-to-end speedups are known, the cost of a workload is the mean of AL / S over the OTHER workloads: a round
costs the same whatever the text, so that the resulting speedup is a prediction that the workload's own measurement can
test. A single workload has only its own AL / S.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from components.contract import UserError
from components.rows import ALL, DepthChoice, DepthEval
from components.speedup.conclude import conclude
from components.speedup.costs import select_depths
from components.speedup.evaluate import Identity, Rule, choice_row, depth_rows, predict
from components.speedup.mixture import one_depth_for_all, stated_shares
from components.speedup.outside_acceptance import Acceptance
from components.speedup.outside_checks import check_together
from components.speedup.outside_doubts import CaseResult, issues_of
from components.speedup.outside_evidence import MeasurementCase, borrowed_table, cases_of
from components.speedup.outside_rows import SourcedRow
from components.speedup.policy import Policy, faults_of
from components.speedup.ranking import Contender


def policy_from(rows: Sequence[SourcedRow], rule: Rule, mixture: Mapping[str, float], seed: int) -> Policy:
    """The policy for every drafter, batch size, context length and workload in the rows.

    Raises:
        UserError: rows that contradict each other, acceptance without cost, or a mixture of unknown workloads.
    """
    check_together(rows)
    policy = Policy("outside", "", "", "", rule.description, rule.tolerance, [], [], [], [], [], [])
    cases = cases_of(rows)
    results = [(case, _add_case(policy, case, rule, mixture, seed)) for case in cases]
    faulty = {case.label for case in cases if faults_of(policy, case.label)}
    _invalidate_faulty(policy, faulty)
    smallest = {label: min(c.batch_size for c in cases if c.label == label) for label in {c.label for c in cases}}
    contenders = [
        _contender(case, result, case.label in faulty)
        for case, result in results
        if (case.kv_len, case.batch_size) == (None, smallest[case.label])
    ]
    conclude(policy, contenders, rule)
    return policy


def _invalidate_faulty(policy: Policy, faulty: Collection[str]) -> None:
    """Invalidate choices of drafters with faults, so that no reader of the policy finds a speedup to use."""

    def invalid(choice: DepthChoice) -> DepthChoice:
        if choice.draft_key not in faulty:
            return choice
        reasons = [f"{flag.code}: {flag.detail}" for flag in faults_of(policy, choice.draft_key)]
        plain = replace(choice, depth_k=0, speedup_pred=1.0, pred_lo=1.0, pred_hi=1.0, p_beats_no_spec=0.0, loss=None)
        unmeasured = replace(plain, speedup_meas=None, meas_lo=None, meas_hi=None, pred_error=None)
        return replace(unmeasured, verdict="invalid", reasons=reasons)

    policy.choices = [invalid(choice) for choice in policy.choices]
    policy.contexts = [invalid(choice) for choice in policy.contexts]
    policy.mixtures = [mixture for mixture in policy.mixtures if mixture.draft_key not in faulty]


def _add_case(policy: Policy, case: MeasurementCase, rule: Rule, mixture: Mapping[str, float], seed: int) -> CaseResult:
    """Enter one case into the policy; return its result over all workloads."""
    names = [ALL, *sorted(case.workloads - {ALL})]
    results = {name: _evaluate_workload(policy, case, name, rule, seed) for name in names}
    pooled = results[ALL]
    if case.kv_len is not None:
        policy.contexts.append(pooled.choice)
        return pooled
    policy.evals += [e for name in names for e in results[name].evals]
    _add_choices(policy, case, results, rule, mixture)
    for issue in issues_of(case, results):
        policy.flags.append(issue.to_flag(policy.selection_id, case.label, case.method))
    return pooled


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


def _add_choices(
    policy: Policy, case: MeasurementCase, results: Mapping[str, CaseResult], rule: Rule, stated: Mapping[str, float]
) -> None:
    """Enter the choices of every workload, with the loss of one depth for all of them."""
    names = [name for name in results if name != ALL]
    choices = {name: results[name].choice for name in results}
    shares = stated_shares(stated, names) if stated else {}
    same_depths = len({tuple(result.speeds.depths) for result in results.values()}) == 1
    if shares and not same_depths:
        raise UserError(f"mixture: {case.label} was not measured at the same depths on every workload")
    if names and same_depths and (shares or len(names) > 1):
        speeds = {name: results[name].speeds for name in names}
        weights = shares or _measured_shares({name: results[name].acceptance for name in names})
        identity = Identity(policy.selection_id, policy.target_key, case.label, case.method, ALL, case.batch_size)
        mixture, choice = one_depth_for_all(speeds, weights, None if shares else choices[ALL], choices, identity, rule)
        policy.mixtures.append(mixture)
        choices[choice.workload] = replace(choice, loss=mixture.loss)
        choices |= {name: replace(choices[name], loss=mixture.loss_by_workload[name]) for name in names}
    policy.choices += choices.values()


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
