"""A depth policy from somebody else's rows: the same model, rule and flags as choose_depth, whatever was measured.

Where only end-to-end speedups are known, the cost of a workload is the mean of AL / S over the OTHER workloads: a round
costs the same whatever the text, so that speedup is a prediction, and the workload's own measurement stands beside it.
With a single workload its own AL / S is all there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from components.contract import UserError
from components.rows import DepthChoice, DepthEval
from components.speedup.conclude import conclude
from components.speedup.costs import only_depths
from components.speedup.evaluate import Identity, Rule, Speeds, choice_row, depth_rows, predict
from components.speedup.flags import (
    MAX_PREDICTION_GAP,
    Doubt,
    baseline_doubts,
    cost_doubts,
    depth_doubts,
    falling_doubts,
    sample_doubts,
)
from components.speedup.mixture import one_depth_for_all, stated_shares
from components.speedup.outside_evidence import Acceptance, Case, borrowed_table, cases_of
from components.speedup.outside_rows import Placed
from components.speedup.policy import ALL, Policy
from components.speedup.ranking import Entrant


class Worked(NamedTuple):
    """One workload of one case, worked through."""

    acceptance: Acceptance
    speeds: Speeds
    evals: list[DepthEval]
    choice: DepthChoice


def policy_from(rows: Sequence[Placed], rule: Rule, mixture: Mapping[str, float], seed: int) -> Policy:
    """The policy of every drafter, batch size, context and workload that the rows tell of.

    Raises:
        UserError: acceptance without cost, cost without acceptance, or a mixture of unknown workloads.
    """
    policy = Policy("outside", "", "", "", rule.words, rule.tolerance, [], [], [], [], [], [])
    entrants: list[Entrant] = []
    cases = cases_of(rows)
    for case in cases:
        found = _work(policy, case, rule, mixture, seed)
        if (case.kv_len, case.batch_size) == (None, min(c.batch_size for c in cases if c.label == case.label)):
            entrants.append(_entrant(case, found))
    conclude(policy, entrants, rule)
    return policy


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
    for doubt in _doubts(case, worked):
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
    return Worked(acceptance, speeds, evals, _confirmed(choice_row(speeds, who, rule, case.kv_len), evals))


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


def _entrant(case: Case, found: Worked) -> Entrant:
    depth = found.choice.depth_k
    speedup = found.speeds.speedup[found.speeds.depths.index(depth)]
    budget = case.tree_budget if depth else None
    return Entrant(case.label, case.method, depth, budget, case.draft_vocab, speedup, found.choice.verdict)


def _doubts(case: Case, worked: Mapping[str, Worked]) -> list[Doubt]:
    """What is doubtful about one case, over all workloads and where they were measured."""
    pooled = worked[ALL]
    depth = pooled.choice.depth_k
    doubts = []
    if case.table is not None:
        doubts += cost_doubts([e for e in pooled.evals if e.depth_k])
    for (workload, k), speedup in case.measured.items():
        evals = worked[workload].evals if workload in worked else []
        al = next((e.al for e in evals if e.depth_k == k), None)
        if al is not None:
            doubts += [d._replace(detail=f"workload {workload}: {d.detail}") for d in baseline_doubts(al / speedup, k)]
    if pooled.acceptance.num_prompts:
        doubts += sample_doubts(pooled.acceptance.num_prompts, pooled.acceptance.num_rounds(depth), depth)
    else:
        said = "acceptance is one figure for all prompts: nothing tells how far chance could move it"
        doubts.append(Doubt("no_interval", "warning", 0, said))
    if pooled.acceptance.is_prefix:
        said = "taken from the first positions of a deeper run, which understates acceptance length at shallow depths"
        doubts.append(Doubt("prefix_of_deeper_run", "warning", max(pooled.acceptance.depths), said))
    if case.trained_depth is not None:
        doubts += depth_doubts(depth, case.trained_depth)
    doubts += falling_doubts(pooled.speeds)
    for name, one in worked.items():
        gap = one.choice.pred_error
        if gap is not None and abs(gap) > MAX_PREDICTION_GAP:
            said = f"workload {name}: predicted {one.choice.speedup_pred:.2f}x, measured {one.choice.speedup_meas:.2f}x"
            doubts.append(Doubt("prediction_gap", "warning", gap, said))
    return doubts
