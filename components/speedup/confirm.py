"""Confirm or refuse a chosen depth with what was measured end to end, and say whether the drafter may be promoted.

Prediction and measurement together choose the depth (rechoose.py), which may then be another one. The verdict follows
the measurement (is it faster, is the text the same?), and is "undecided" with what is missing where the two contradict
each other; the gate asks for more: that the prediction came true, because a depth picked by a wrong model is right by
accident. Where a challenger meets a champion, the challenger is judged, and the gate also asks that it is not worse
(champion.py).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, UserError
from components.promotion import MAX_ACCEPTANCE_LOSS, MAX_SLOWDOWN, Margins
from components.rows import CostCell, DepthChoice, QualityFlag, Request, read_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.speedup.policy import GateCheck, Policy
    from components.speedup.rechoose import Posterior


def confirm_depth(
    policy: DepthPolicy,
    end_to_end: Measurements,
    challenger: Draft | None = None,
    champion: Draft | None = None,
    *,
    min_speedup: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0,
    max_prediction_gap: Annotated[float, Field(gt=0.0, le=10.0)] = 0.15,
    min_over_lookup: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0,
    max_loss: Annotated[float, Field(ge=0.0, lt=0.5)] = MAX_SLOWDOWN,
    max_acceptance_loss: Annotated[float, Field(ge=0.0, lt=0.5)] = MAX_ACCEPTANCE_LOSS,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> DepthPolicy:
    """Add measured speedups to a policy, name the winning drafter, and check the promotion gate.

    Args:
        policy: the depths that the speedup model chose.
        end_to_end: timed requests of plain and speculative decoding on the same prompts; with step costs of the same
            moment, where it has them, which predictions are then judged with.
        challenger: the drafter to judge; without it the best of those measured.
        champion: the drafter that serves now, measured in the same session; the challenger must not be worse than it is
            at the depth it serves, which the policy knows when speedup.choose_depth was given `champion`.
        min_speedup: what the lower 95 % bound of measured speedup must exceed (1.0 = plain decoding).
        max_prediction_gap: largest |predicted / measured - 1| that the gate lets through (0.15 = 15 %); beyond 10 % it
            is flagged in any case.
        min_over_lookup: what measured speedup over prompt lookup must exceed (1.0 = faster than it); 0 does not ask.
        max_loss: share of the champion's decoding speed by which a challenger may lie below it and still count as not
            worse (0.02 = 2 %): the lower end of the 95 % interval of its speed ratio must reach 1 - max_loss.
        max_acceptance_loss: the same of acceptance length over all prompts; of one workload it is twice that.
        num_draws: draws of prompts and processes behind each interval.
    """
    from components.speedup.champion import challenge, champion_checks
    from components.speedup.measured import measured_arms
    from components.speedup.measured_flags import lookup_flags, measured_flags
    from components.speedup.policy import headline, read_policy, write_policy
    from components.speedup.rechoose import choose_again

    if champion is not None and challenger is None:
        raise UserError("champion: it is compared with a challenger; give `challenger` too")
    found = read_policy(policy.path)
    requests = read_rows(end_to_end.path, Request)
    if not requests:
        raise UserError(f"end_to_end ({end_to_end.key[:12]}): no request rows; run bench.compare_end_to_end")
    measured = measured_arms(requests, num_draws, ctx.seed, found.prompts)
    found.arms = [one.arm for one in measured]
    if not found.arms:
        raise UserError(
            "end_to_end: no speculative request shares prompt and dtype with plain decoding; include a plain arm"
        )
    posterior = choose_again(found, measured, num_draws, ctx.seed)
    _enter_measurements(
        found, read_rows(end_to_end.path, CostCell), {id(m.arm): m.speedup.p_above(1.0) for m in measured}
    )
    found.flags += read_rows(end_to_end.path, QualityFlag)
    found.flags += measured_flags(found, requests, max_prediction_gap)
    if challenger is not None and champion is not None:
        challenge(found, requests, (challenger, champion), Margins(max_loss, max_acceptance_loss))
    winner = _pick_winner(found, challenger.key if challenger is not None else None, posterior)
    found.flags += lookup_flags(found, winner) if winner else []
    found.winner = (
        {"draft_key": winner.draft_key, "method": winner.method, "depth_k": winner.depth_k} if winner else None
    )
    checks = _gate(found, winner, min_speedup, max_prediction_gap)
    checks += [_over_lookup(found, winner, min_over_lookup)] if winner else []
    if challenger is not None and champion is not None:
        checks += champion_checks(found, challenger)
    found.gate = {"passed": all(c.passed for c in checks), "checks": [dataclasses.asdict(c) for c in checks]}
    found.verdict, found.reasons = _verdict(found, winner, checks, challenger.key if challenger is not None else None)
    found.choices = [_with_verdict(c, found, winner) for c in found.choices]
    write_policy(ctx.out, found)
    ctx.note(f"verdict: {found.verdict}; {'; '.join(found.reasons)}")
    return DepthPolicy.made(ctx, headline(found))


def _enter_measurements(policy: Policy, cells: Sequence[CostCell], p_faster: dict[int, float | None]) -> None:
    """Put measured numbers beside the predicted ones, and predictions for the measured prompts beside the measured.

    p_faster: id of an arm -> P(speedup > 1) as measured.
    """
    from components.speedup.measured import arm_of
    from components.speedup.same_moment import predictions_of

    for rows in (policy.evals, policy.trees):
        for i, row in enumerate(rows):
            found = arm_of(policy, row) if row.depth_k else None
            if found:
                rows[i] = dataclasses.replace(
                    row,
                    al_meas=found.al,
                    al_replayed=found.al_replayed,
                    speedup_meas=found.speedup,
                    meas_lo=found.lo,
                    meas_hi=found.hi,
                )
    for i, choice in enumerate(policy.choices):
        found = arm_of(policy, choice) if choice.depth_k else None
        if found:
            policy.choices[i] = dataclasses.replace(
                choice,
                speedup_meas=found.speedup,
                meas_lo=found.lo,
                meas_hi=found.hi,
                pred_error=choice.speedup_pred / found.speedup - 1.0,
                p_beats_no_spec=p_faster[id(found)],
            )
    predicted = predictions_of(policy, cells)
    policy.arms = [
        dataclasses.replace(arm, speedup_pred=said) for arm, said in zip(policy.arms, predicted, strict=True)
    ]


def prediction_gap(policy: Policy, choice: DepthChoice) -> float:
    """predicted / measured - 1 on the same prompts; over all prompts where the measured ones have no maps."""
    from components.speedup.measured import arm_of

    arm = arm_of(policy, choice)
    if arm is not None and arm.speedup_pred is not None:
        return arm.speedup_pred / arm.speedup - 1.0
    return choice.pred_error or 0.0


def _pick_winner(policy: Policy, only: str | None, posterior: Posterior | None) -> DepthChoice | None:
    """The drafter to serve, of those measured at their chosen depth at the smallest batch size.

    That is the smallest that a depth was chosen for, be it 0: what a larger batch is drafted with is not served at it.
    only: the one drafter that may win, or None. A drafter at fault (its output differs, its numbers are impossible)
    wins only if every one is.
    """
    from components.speedup.policy import at_smallest_batch, faults_of
    from components.speedup.rechoose import pick_drafter

    pooled = [c for c in at_smallest_batch(policy) if c.depth_k > 0 and c.meas_lo is not None]
    pooled = [c for c in pooled if only in (None, c.draft_key)]
    sound = [c for c in pooled if not faults_of(policy, c.draft_key)]
    return pick_drafter(policy, sound or pooled, posterior)


def _gate(policy: Policy, winner: DepthChoice | None, min_speedup: float, max_gap: float) -> list[GateCheck]:
    """What promotion asks for, each condition with its value and limit."""
    from components.speedup.bootstrap import LEAST_PROMPTS
    from components.speedup.measured import arm_of
    from components.speedup.measured_flags import too_many_ties
    from components.speedup.policy import ALL, GateCheck, faults_of

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
        GateCheck("prompts_measured", num_prompts >= LEAST_PROMPTS, float(num_prompts), f">= {LEAST_PROMPTS}"),
        GateCheck("outputs_compared", checked > 0, float(checked), "> 0 requests"),
        GateCheck("identical_output", divergences == 0, float(divergences), "0 divergences outside ties"),
        GateCheck("ties_by_rounding", over_ties == 0, float(over_ties), "0 arms with more ties than rounding makes"),
        GateCheck("measured_lower_bound", low > min_speedup, low, f"> {min_speedup:g}"),
        GateCheck("prediction_gap", gap <= max_gap, gap, f"<= {max_gap:g}"),
        GateCheck("no_faults", faults == 0, float(faults), "0 flags of severity fault"),
    ]


def _over_lookup(policy: Policy, winner: DepthChoice, least: float) -> GateCheck:
    """How much faster than prompt lookup, which needs no training; seen in every gate, asked for only by a setting."""
    from components.speedup.measured_flags import best_lookup
    from components.speedup.policy import GateCheck

    lookup = best_lookup(policy, winner)
    ratio = winner.speedup_meas / lookup.speedup if lookup is not None and winner.speedup_meas is not None else None
    if not least:
        return GateCheck("speedup_over_lookup", True, ratio, "not asked")
    return GateCheck("speedup_over_lookup", (ratio or 0.0) > least, ratio or 0.0, f"> {least:g}, measured beside it")


def _verdict(
    policy: Policy, winner: DepthChoice | None, checks: list[GateCheck], only: str | None
) -> tuple[str, list[str]]:
    """use | do_not_speculate | undecided | invalid, and why, in words. only: the one drafter that is judged."""
    from components.speedup.policy import ALL, at_smallest_batch, faults_of

    if winner is None:
        if any(c.depth_k > 0 and only in (None, c.draft_key) for c in at_smallest_batch(policy)):
            return "undecided", ["the chosen depth was not measured end to end"]
        # Nothing was chosen: the prediction's own verdict and reasons stand.
        for c in policy.choices:
            if (c.draft_key, c.workload) == (only, ALL):
                return c.verdict, c.reasons
        return ("do_not_speculate" if policy.verdict == "use" else policy.verdict), policy.reasons
    failed = {c.name for c in checks if not c.passed}
    measured = (
        f"{winner.method} at depth {winner.depth_k} measured {winner.speedup_meas:.2f}x "
        f"[{winner.meas_lo:.2f}, {winner.meas_hi:.2f}], predicted {winner.speedup_pred:.2f}x"
    )
    if failed & {"identical_output", "no_faults"}:
        faults = [f"{f.method} {f.code}: {f.detail}" for f in faults_of(policy, winner.draft_key)]
        return "invalid", [measured, *faults]
    missing = contradiction_of(policy, winner)
    reasons = [measured, *([missing] if missing else [])]
    reasons += [f"gate: {c.name} is {c.value:.3g}, asked {c.limit}" for c in checks if not c.passed]
    return _by_its_interval(winner, policy), reasons


def _by_its_interval(choice: DepthChoice, policy: Policy) -> str:
    """use | do_not_speculate | undecided, by the measured interval; too few prompts decide nothing, and nor does a
    measurement that its prediction contradicts."""
    from components.speedup.measured import arm_of

    arm = arm_of(policy, choice)
    if arm is None or not arm.is_decisive or choice.meas_lo is None or choice.meas_hi is None:
        return "undecided"
    if contradiction_of(policy, choice) is not None:
        return "undecided"
    return "use" if choice.meas_lo > 1.0 else "do_not_speculate" if choice.meas_hi < 1.0 else "undecided"


def contradiction_of(policy: Policy, choice: DepthChoice) -> str | None:
    """What is missing where prediction and measurement contradict each other about a choice, in words."""
    said = [f.detail for f in policy.flags if (f.code, f.draft_key) == ("undecided_contradiction", choice.draft_key)]
    return said[0] if said else None


def _with_verdict(choice: DepthChoice, policy: Policy, winner: DepthChoice | None) -> DepthChoice:
    """A choice with the verdict that its own measurement supports."""
    if winner and (choice.draft_key, choice.workload, choice.batch_size) == (
        winner.draft_key,
        winner.workload,
        winner.batch_size,
    ):
        return dataclasses.replace(choice, verdict=policy.verdict, reasons=policy.reasons)
    if choice.meas_lo is None or choice.meas_hi is None:
        return choice
    why = f"measured {choice.speedup_meas:.2f}x [{choice.meas_lo:.2f}, {choice.meas_hi:.2f}]"
    return dataclasses.replace(choice, verdict=_by_its_interval(choice, policy), reasons=[*choice.reasons, why])
