"""Step `speedup.confirm_depth`: end-to-end measurements confirm or refuse a chosen depth, and decide on promotion.

Prediction and measurement together choose the depth again (rechoose.py), which may then be another one. The verdict
follows the measurement (is it faster, is the text the same?); where the two contradict each other it is "undecided",
and names the measurement that is missing. The gate also requires that the prediction came true, because a depth chosen
by a wrong model is right by accident. Where a challenger is compared with a champion, the challenger is evaluated, and
the gate also requires that it is not worse (promotion_rule.py).

An arm is predicted for the very prompts that it decoded, with step costs of the same moment, so that the comparison
tests the model and not the state of the machine: where the end-to-end measurement also timed the phases of its arms,
these costs are used, else those of the choice of depth. End to end often runs fewer prompts; only AL depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from components.contract import Context, DepthPolicy, Draft, Measurements, UserError
from components.outside_json import JsonObject
from components.policy import (
    Gate,
    GateCheck,
    MeasuredArm,
    Policy,
    Winner,
    extended,
    faults_of,
    judged_choice,
    read_policy,
    served_choices,
)
from components.promotion import Margins
from components.refusals import PROMPTS
from components.rows import ALL, CostCell, DepthChoice, DepthEval, QualityFlag, Request, read_rows
from components.speedup.comparison.promotion_rule import champion_checks, with_comparison
from components.speedup.measured import (
    arm_of,
    best_lookup,
    lookup_flags,
    measured_arms,
    measured_flags,
    too_many_ties,
)
from components.speedup.policy_markdown import policy_summary, write_policy
from components.speedup.prediction.costs import Setting, cost_table, round_cost
from components.speedup.rechoose import Posterior, choose_again, pick_drafter

PredictedRow = TypeVar("PredictedRow", DepthEval, DepthChoice)


def confirm_depth(
    policy: DepthPolicy,
    end_to_end: Measurements,
    challenger: Draft | None,
    champion: Draft | None,
    *,
    min_speedup: float,
    max_prediction_gap: float,
    min_over_lookup: float,
    max_loss: float,
    max_acceptance_loss: float,
    num_draws: int,
    ctx: Context,
) -> DepthPolicy:
    """The step `speedup.confirm_depth`; its settings are explained in components/speedup/steps.py."""
    if champion is not None and challenger is None:
        raise UserError("champion: it is compared with a challenger; give `challenger` too")
    result = read_policy(policy.path)
    requests = read_rows(end_to_end.path, Request)
    if not requests:
        raise UserError(f"end_to_end ({end_to_end.key[:12]}): no request rows; run bench.compare_end_to_end")
    measured = measured_arms(requests, num_draws, ctx.seed, result.prompts)
    result = replace(result, arms=[m.arm for m in measured])
    if not result.arms:
        raise UserError(
            "end_to_end: no speculative request shares prompt and dtype with plain decoding; include a plain arm"
        )
    result, posterior = choose_again(result, measured, num_draws, ctx.seed)
    p_faster = {id(m.arm): m.speedup.p_above(1.0) for m in measured}
    result = _with_measurements(result, read_rows(end_to_end.path, CostCell), p_faster)
    flags = [*read_rows(end_to_end.path, QualityFlag), *measured_flags(result, requests, max_prediction_gap)]
    result = extended(result, flags=flags)
    if challenger is not None and champion is not None:
        result = with_comparison(result, requests, (challenger, champion), Margins(max_loss, max_acceptance_loss))
    only_key = challenger.key if challenger is not None else None
    winner = _pick_winner(result, only_key, posterior)
    if winner is not None:
        result = extended(result, flags=lookup_flags(result, winner))
    result = replace(result, winner=Winner(winner.draft_key, winner.method, winner.depth_k) if winner else None)
    result = replace(result, judged=_judged(result, only_key))
    checks = _gate_checks(result, winner, min_speedup, max_prediction_gap)
    checks += [_lookup_check(result, winner, min_over_lookup)] if winner else []
    if challenger is not None and champion is not None:
        checks += champion_checks(result, challenger)
    verdict, reasons = _verdict(result, winner, checks, only_key)
    gate = Gate(all(c.passed for c in checks), checks)
    result = replace(result, gate=gate, verdict=verdict, reasons=reasons)
    spoken_of = winner or (judged_choice(result) if verdict != "invalid" else None)
    result = replace(result, choices=[_with_verdict(c, result, spoken_of) for c in result.choices])
    write_policy(ctx.out, result)
    ctx.note(f"verdict: {result.verdict}; {'; '.join(result.reasons)}")
    return DepthPolicy.of_step(ctx, policy_summary(result))


def _with_measurements(policy: Policy, cells: Sequence[CostCell], p_faster: dict[int, float | None]) -> Policy:
    """The policy with measurements in predicted rows, and predictions for the measured prompts in arms.

    p_faster: id of an arm -> P(speedup > 1) by its measurement.
    """

    def measured(row: PredictedRow) -> PredictedRow:
        arm = arm_of(policy, row) if row.depth_k else None
        if arm is None:
            return row
        columns: JsonObject = {"speedup_meas": arm.speedup, "meas_lo": arm.lo, "meas_hi": arm.hi}
        if isinstance(row, DepthEval):
            columns |= {"al_meas": arm.al, "al_replayed": arm.al_replayed}
        else:
            gap = row.speedup_pred / arm.speedup - 1.0
            columns |= {"pred_error": gap, "p_beats_no_spec": p_faster[id(arm)]}
        return replace(row, **columns)

    return replace(
        policy,
        evals=[measured(row) for row in policy.evals],
        trees=[measured(row) for row in policy.trees],
        choices=[measured(choice) for choice in policy.choices],
        arms=[replace(a, speedup_pred=p) for a, p in zip(policy.arms, predictions_of(policy, cells), strict=True)],
    )


def prediction_gap(policy: Policy, choice: DepthChoice) -> float:
    """predicted / measured - 1 on the same prompts; over all prompts where the measured ones have no maps."""
    arm = arm_of(policy, choice)
    if arm is not None and arm.speedup_pred is not None:
        return arm.speedup_pred / arm.speedup - 1.0
    return choice.pred_error or 0.0


def _pick_winner(policy: Policy, only_key: str | None, posterior: Posterior | None) -> DepthChoice | None:
    """The drafter to serve, of those measured at their chosen depth at the smallest batch size.

    That is the smallest batch size with a chosen depth, be it 0: a depth for a larger batch is not served there.
    only_key: the one drafter that may win, or None. Drafters with faults (their output differs, their numbers are
    impossible) are excluded, unless all have faults.
    """
    candidates = [c for c in served_choices(policy) if c.depth_k > 0 and c.meas_lo is not None]
    candidates = [c for c in candidates if only_key in (None, c.draft_key)]
    without_faults = [c for c in candidates if not faults_of(policy, c.draft_key)]
    return pick_drafter(policy, without_faults or candidates, posterior)


def _judged(policy: Policy, only_key: str | None) -> str:
    """The drafter that the verdict is about: the winner, else the one that may win, else the one of the prediction; if
    that is not served, or another has a depth that was not measured, the surest of those."""
    if policy.winner is not None or only_key is not None:
        return policy.winner.draft_key if policy.winner is not None else str(only_key)
    served = served_choices(policy)
    eligible = [c for c in served if c.depth_k > 0] or served
    if not eligible or policy.judged in {c.draft_key for c in eligible}:
        return policy.judged
    return min(eligible, key=lambda c: (-c.pred_lo, c.draft_key)).draft_key


def _gate_checks(policy: Policy, winner: DepthChoice | None, min_speedup: float, max_gap: float) -> list[GateCheck]:
    """The conditions of promotion, each with its value and limit."""
    if winner is None:
        return [GateCheck("depth_chosen_and_measured", False, 0.0, ">= 1")]
    arms = [a for a in policy.arms if a.draft_key == winner.draft_key and a.workload == ALL]
    divergences, checked = sum(a.divergences for a in arms), sum(a.checked for a in arms)
    over_ties = sum(map(too_many_ties, arms))
    gap = abs(prediction_gap(policy, winner))
    faults = len(faults_of(policy, winner.draft_key))
    low = winner.meas_lo or 0.0
    arm = arm_of(policy, winner)
    num_prompts = arm.num_prompts if arm is not None else 0
    return [
        GateCheck("depth_chosen_and_measured", True, float(winner.depth_k), ">= 1"),
        GateCheck("prompts_measured", num_prompts >= PROMPTS.decide, float(num_prompts), f">= {PROMPTS.decide}"),
        GateCheck("outputs_compared", checked > 0, float(checked), "> 0 requests"),
        GateCheck("identical_output", divergences == 0, float(divergences), "0 divergences outside ties"),
        GateCheck("ties_by_rounding", over_ties == 0, float(over_ties), "0 arms with more ties than rounding makes"),
        GateCheck("measured_lower_bound", low > min_speedup, low, f"> {min_speedup:g}"),
        GateCheck("prediction_gap", gap <= max_gap, gap, f"<= {max_gap:g}"),
        GateCheck("no_faults", faults == 0, float(faults), "0 flags of severity fault"),
    ]


def _lookup_check(policy: Policy, winner: DepthChoice, minimum: float) -> GateCheck:
    """Speed over prompt lookup, which needs no training; every gate shows it, a setting makes it a condition."""
    lookup = best_lookup(policy, winner)
    ratio = winner.speedup_meas / lookup.speedup if lookup is not None and winner.speedup_meas is not None else None
    if not minimum:
        return GateCheck("speedup_over_lookup", True, ratio, "not asked")
    return GateCheck(
        "speedup_over_lookup", (ratio or 0.0) > minimum, ratio or 0.0, f"> {minimum:g}, measured beside it"
    )


def _verdict(
    policy: Policy, winner: DepthChoice | None, checks: list[GateCheck], only_key: str | None
) -> tuple[str, list[str]]:
    """(use | do_not_speculate | undecided | invalid, reasons). only_key: the one drafter that is evaluated."""
    if winner is None:
        choice = judged_choice(policy)
        if choice is None or (policy.verdict == "invalid" and only_key is None):
            return policy.verdict, policy.reasons
        if choice.depth_k > 0:
            return "undecided", [f"{choice.method} at depth {choice.depth_k}, chosen, was not measured end to end"]
        return choice.verdict, [*choice.reasons, *_best_measured(policy, choice)]  # no depth was chosen: it stands
    failed = {c.name for c in checks if not c.passed}
    measured = (
        f"{winner.method} at depth {winner.depth_k} measured {winner.speedup_meas:.2f}x "
        f"[{winner.meas_lo:.2f}, {winner.meas_hi:.2f}], predicted {winner.speedup_pred:.2f}x"
    )
    if failed & {"identical_output", "no_faults"}:
        faults = [f"{f.method} {f.code}: {f.detail}" for f in faults_of(policy, winner.draft_key)]
        return "invalid", [measured, *faults]
    contradiction = contradiction_of(policy, winner)
    reasons = [measured, *([contradiction] if contradiction else [])]
    reasons += [f"gate: {c.refusal()}" for c in checks if not c.passed]
    return _verdict_of_interval(winner, policy), reasons


def _best_measured(policy: Policy, choice: DepthChoice) -> list[str]:
    """The fastest measured depth of a drafter whose choice is plain decoding, in words; [] where none was measured."""
    same = (choice.draft_key, choice.batch_size, ALL)
    arms = [a for a in policy.arms if a.depth_k and a.tree_budget is None]
    arms = [a for a in arms if (a.draft_key, a.batch_size, a.workload) == same]
    fastest = max(arms, key=lambda a: a.speedup, default=None)
    if fastest is None:
        return []
    speedup = f"{fastest.speedup:.2f}x [{fastest.lo:.2f}, {fastest.hi:.2f}]"
    return [f"depth {fastest.depth_k} measured {speedup} on {fastest.num_prompts} prompts"]


def _verdict_of_interval(choice: DepthChoice, policy: Policy) -> str:
    """use | do_not_speculate | undecided by the measured interval; too few prompts, or a contradiction with the
    prediction, leave it undecided."""
    arm = arm_of(policy, choice)
    if arm is None or not arm.is_decisive or choice.meas_lo is None or choice.meas_hi is None:
        return "undecided"
    if contradiction_of(policy, choice) is not None:
        return "undecided"
    return "use" if choice.meas_lo > 1.0 else "do_not_speculate" if choice.meas_hi < 1.0 else "undecided"


def contradiction_of(policy: Policy, choice: DepthChoice) -> str | None:
    """The text of the flag that prediction and measurement of a choice contradict each other; None without one."""
    details = [f.detail for f in policy.flags if (f.code, f.draft_key) == ("undecided_contradiction", choice.draft_key)]
    return details[0] if details else None


def _with_verdict(choice: DepthChoice, policy: Policy, spoken_of: DepthChoice | None) -> DepthChoice:
    """The choice with the verdict of its own measurement; that which the whole policy is about, with the policy's."""
    key = (choice.draft_key, choice.workload, choice.batch_size)
    if spoken_of and key == (spoken_of.draft_key, spoken_of.workload, spoken_of.batch_size):
        return replace(choice, verdict=policy.verdict, reasons=policy.reasons)
    if choice.meas_lo is None or choice.meas_hi is None:
        return choice
    measured = f"measured {choice.speedup_meas:.2f}x [{choice.meas_lo:.2f}, {choice.meas_hi:.2f}]"
    return replace(choice, verdict=_verdict_of_interval(choice, policy), reasons=[*choice.reasons, measured])


def predictions_of(policy: Policy, cells: Sequence[CostCell]) -> list[float | None]:
    """The predicted speedup of each of policy.arms; None for a tree, at depth 0, and without maps."""
    ratios: dict[tuple[str, int, str], dict[int, float]] = {}
    predictions: list[float | None] = []
    for arm in policy.arms:
        if arm.tree_budget is not None or arm.depth_k == 0 or arm.al_replayed is None:
            predictions.append(None)  # trees are not replayed by prompt, and depth 0 has no prediction
            continue
        key = (arm.draft_key, arm.batch_size, arm.dtype)
        if key not in ratios:
            ratios[key] = _round_over_plain(cells, *key)
        ratio = ratios[key].get(arm.depth_k)
        predictions.append(
            arm.al_replayed / ratio if ratio is not None else _predict_by_first_costs(policy, arm, arm.al_replayed)
        )
    return predictions


def _round_over_plain(cells: Sequence[CostCell], draft_key: str, batch_size: int, dtype: str) -> dict[int, float]:
    """Depth -> time of a round over a plain step, for completely timed depths; {} without any."""
    drafter_cells = [
        c
        for c in cells
        if (c.batch_size, c.dtype, c.tree_budget) == (batch_size, dtype, None) and c.draft_key in (draft_key, "")
    ]
    timed = {phase: {c.depth_k for c in drafter_cells if c.phase == phase} for phase in ("target_step", "verify")}
    drafted = {c.depth_k for c in drafter_cells if c.phase == "draft" and c.draft_key == draft_key}
    if not timed["target_step"] or not (timed["verify"] & drafted) - {0}:
        return {}
    table = cost_table(drafter_cells, Setting(draft_key, batch_size))
    plain, cycle = round_cost(table.times, table.host_measured)
    return {depth: float(cycle[i] / plain) for i, depth in enumerate(table.depths) if depth}


def _predict_by_first_costs(policy: Policy, arm: MeasuredArm, length: float) -> float | None:
    key = (arm.draft_key, arm.workload, arm.depth_k, arm.batch_size)
    row = next((e for e in policy.evals if (e.draft_key, e.workload, e.depth_k, e.batch_size) == key), None)
    return row.speedup_pred * length / row.al if row is not None else None
