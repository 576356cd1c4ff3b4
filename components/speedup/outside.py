"""A depth policy from somebody else's rows: the same model, rule and flags as choose_depth, whatever was measured.

Where only end-to-end speedups are known, the cost of a workload is the mean of AL / S over the OTHER workloads: a round
costs the same whatever the text, so that speedup is a prediction, and the workload's own measurement stands beside it.
With a single workload its own AL / S is all there is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from components.contract import UserError
from components.rows import DepthChoice, DepthEval
from components.speedup.conclude import conclude
from components.speedup.costs import only_depths
from components.speedup.evaluate import Identity, Rule, choice_row, depth_rows, predict
from components.speedup.mixture import one_depth_for_all, stated_shares
from components.speedup.outside_acceptance import Acceptance
from components.speedup.outside_checks import check_together
from components.speedup.outside_doubts import Worked, doubts_of
from components.speedup.outside_evidence import Case, borrowed_table, cases_of
from components.speedup.outside_rows import Placed
from components.speedup.policy import ALL, Policy, faults_of
from components.speedup.ranking import Entrant


def policy_from(rows: Sequence[Placed], rule: Rule, mixture: Mapping[str, float], seed: int) -> Policy:
    """The policy of every drafter, batch size, context and workload that the rows tell of.

    Raises:
        UserError: rows that contradict each other, acceptance without cost, or a mixture of unknown workloads.
    """
    check_together(rows)
    policy = Policy("outside", "", "", "", rule.words, rule.tolerance, [], [], [], [], [], [])
    cases = cases_of(rows)
    worked = [(case, _work(policy, case, rule, mixture, seed)) for case in cases]
    faulty = {case.label for case in cases if faults_of(policy, case.label)}
    _withdraw(policy, faulty)
    smallest = {label: min(c.batch_size for c in cases if c.label == label) for label in {c.label for c in cases}}
    entrants = [
        _entrant(case, found, case.label in faulty)
        for case, found in worked
        if (case.kv_len, case.batch_size) == (None, smallest[case.label])
    ]
    conclude(policy, entrants, rule)
    return policy


def _withdraw(policy: Policy, faulty: Collection[str]) -> None:
    """Take back what was chosen from numbers at fault: nothing that reads the policy may find a speedup to use."""

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


def _work(policy: Policy, case: Case, rule: Rule, mixture: Mapping[str, float], seed: int) -> Worked:
    """Enter one case into the policy; gives what holds over all its workloads."""
    names = [ALL, *sorted(case.workloads - {ALL})]
    worked = {name: _workload(policy, case, name, rule, seed) for name in names}
    pooled = worked[ALL]
    if case.kv_len is not None:
        policy.contexts.append(pooled.choice)
        return pooled
    policy.evals += [e for name in names for e in worked[name].evals]
    _add_choices(policy, case, worked, rule, mixture)
    for doubt in doubts_of(case, worked):
        policy.flags.append(doubt.about(policy.selection_id, case.label, case.method))
    return pooled


def _workload(policy: Policy, case: Case, workload: str, rule: Rule, seed: int) -> Worked:
    acceptance = case.acceptance_of(workload)
    table = case.table or borrowed_table(case, workload)
    depths = sorted({0, *acceptance.depths} & set(table.depths))
    if len(depths) < 2:
        raise UserError(
            f"{case.label}, workload {workload}: no depth has both acceptance and cost; acceptance is known at "
            f"{_listed(acceptance.depths)}, cost at {_listed(table.depths[1:])}"
        )
    table = only_depths(table, depths)
    tokens, rounds = acceptance.at(depths)
    who = Identity(policy.selection_id, policy.target_key, case.label, case.method, workload, case.batch_size)
    speeds = predict(tokens, rounds, table, workload, rule, seed)
    evals = [_measured(e, case) for e in depth_rows(speeds, table, who, case.tree_budget)]
    choice = _confirmed(choice_row(speeds, who, rule, case.kv_len), evals)
    if not acceptance.num_prompts:
        choice = replace(choice, reasons=[*choice.reasons, "by figures that carry no interval over prompts"])
    return Worked(acceptance, speeds, evals, choice)


def _listed(depths: Sequence[int]) -> str:
    return ", ".join(map(str, depths)) or "none"


def _measured(row: DepthEval, case: Case) -> DepthEval:
    """The row with the speedup that was measured, where one was."""
    found = case.measured.get((row.workload, row.depth_k))
    return row if found is None else replace(row, speedup_meas=found, al_meas=row.al)


def _confirmed(choice: DepthChoice, evals: Sequence[DepthEval]) -> DepthChoice:
    measured = next((e.speedup_meas for e in evals if e.depth_k == choice.depth_k), None)
    if measured is None or choice.depth_k == 0:
        return choice
    return replace(choice, speedup_meas=measured, pred_error=choice.speedup_pred / measured - 1.0)


def _add_choices(
    policy: Policy, case: Case, worked: Mapping[str, Worked], rule: Rule, stated: Mapping[str, float]
) -> None:
    """Choices of every workload, with what one depth for all of them loses."""
    names = [name for name in worked if name != ALL]
    choices = {name: worked[name].choice for name in worked}
    shares = stated_shares(stated, names) if stated else {}
    same_depths = len({tuple(one.speeds.depths) for one in worked.values()}) == 1
    if shares and not same_depths:
        raise UserError(f"mixture: {case.label} was not measured at the same depths on every workload")
    if names and same_depths and (shares or len(names) > 1):
        speeds = {name: worked[name].speeds for name in names}
        weights = shares or _measured_shares({name: worked[name].acceptance for name in names})
        who = Identity(policy.selection_id, policy.target_key, case.label, case.method, ALL, case.batch_size)
        mixture, chosen = one_depth_for_all(speeds, weights, None if shares else choices[ALL], choices, who, rule)
        policy.mixtures.append(mixture)
        choices[chosen.workload] = replace(chosen, loss=mixture.loss)
        choices |= {name: replace(choices[name], loss=mixture.loss_by_workload[name]) for name in names}
    policy.choices += choices.values()


def _measured_shares(by_workload: Mapping[str, Acceptance]) -> dict[str, float]:
    """Shares of the tokens that were counted; the same for each where only lengths were told."""
    tokens = {name: found.num_tokens if found.is_counted else 1.0 for name, found in by_workload.items()}
    return {name: count / sum(tokens.values()) for name, count in tokens.items()}


def _entrant(case: Case, found: Worked, is_faulty: bool) -> Entrant:
    depth = 0 if is_faulty else found.choice.depth_k
    speedup = found.speeds.speedup[found.speeds.depths.index(depth)]
    budget = case.tree_budget if depth else None
    verdict = "invalid" if is_faulty else found.choice.verdict
    return Entrant(case.label, case.method, depth, budget, case.draft_vocab, speedup, verdict)
