"""Confirm or refuse a chosen depth with what was measured end to end, and say whether the drafter may be promoted.

The verdict follows the measurement (is it faster, is the text the same?); the gate asks for more: that the prediction
which chose the depth came true, because a depth picked by a wrong model is right by accident. Where a challenger meets
a champion, the challenger is judged, and the gate also asks that it is not worse (champion.py).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.contract import Context, DepthPolicy, Draft, Measurements, UserError
from components.rows import DepthChoice, QualityFlag, Request, read_rows

if TYPE_CHECKING:
    from components.speedup.policy import GateCheck, MeasuredArm, Policy


def confirm_depth(
    policy: DepthPolicy,
    end_to_end: Measurements,
    challenger: Draft | None = None,
    champion: Draft | None = None,
    *,
    min_speedup: Annotated[float, Field(ge=0.0, le=100.0)] = 1.0,
    max_prediction_gap: Annotated[float, Field(gt=0.0, le=10.0)] = 0.15,
    min_over_lookup: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0,
    max_loss: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.02,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    ctx: Context,
) -> DepthPolicy:
    """Add measured speedups to a policy, name the winning drafter, and check the promotion gate.

    Args:
        policy: the depths that the speedup model chose.
        end_to_end: timed requests of plain and speculative decoding on the same prompts.
        challenger: the drafter to judge; without it the best of those measured.
        champion: the drafter that serves now, measured in the same session; the challenger must not be worse.
        min_speedup: what the lower 95 % bound of measured speedup must exceed (1.0 = plain decoding).
        max_prediction_gap: largest |predicted / measured - 1| that the gate lets through (0.15 = 15 %); beyond 10 % it
            is flagged in any case.
        min_over_lookup: what measured speedup over prompt lookup must exceed (1.0 = faster than it); 0 does not ask.
        max_loss: share of the champion's decoding speed and acceptance length by which a challenger may lie below it
            and still count as not worse (0.02 = 2 %): the lower 95 % bound of its speed ratio must reach 1 - max_loss,
            and no workload's acceptance may lie below that as a whole interval.
        num_draws: resamples of prompts behind each interval.
    """
    from components.speedup.champion import challenge, champion_checks
    from components.speedup.measured import measured_arms
    from components.speedup.measured_flags import lookup_flags, measured_flags
    from components.speedup.policy import headline, read_policy, write_policy

    if champion is not None and challenger is None:
        raise UserError("champion: it is compared with a challenger; give `challenger` too")
    found = read_policy(policy.path)
    requests = read_rows(end_to_end.path, Request)
    if not requests:
        raise UserError(f"end_to_end ({end_to_end.key[:12]}): no request rows; run bench.compare_end_to_end")
    found.arms = measured_arms(requests, num_draws, ctx.seed, found.prompts)
    if not found.arms:
        raise UserError(
            "end_to_end: no speculative request shares prompt and dtype with plain decoding; include a plain arm"
        )
    _enter_measurements(found)
    found.flags += read_rows(end_to_end.path, QualityFlag)
    found.flags += measured_flags(found, requests, max_prediction_gap)
    if challenger is not None and champion is not None:
        challenge(found, requests, (challenger, champion), max_loss, num_draws, ctx.seed)
    winner = _pick_winner(found, challenger.key if challenger is not None else None)
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


def _enter_measurements(policy: Policy) -> None:
    """Put measured numbers beside the predicted ones, and predictions for the measured prompts beside the measured."""
    from components.speedup.measured import arm_of

    for i, arm in enumerate(policy.arms):
        policy.arms[i] = dataclasses.replace(arm, speedup_pred=_same_prompts(policy, arm))
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
            )


def _same_prompts(policy: Policy, arm: MeasuredArm) -> float | None:
    """The prediction for the very prompts that an arm decoded: prompts differ, and end to end often runs fewer of them.

    Only AL depends on the prompts, so S = S_pred * AL(these prompts) / AL(all prompts).
    """
    if arm.tree_budget is not None or arm.depth_k == 0:
        return None  # a tree was not replayed prompt by prompt, and a drafter that is off was not predicted
    for e in policy.evals:
        same = (e.draft_key, e.workload, e.depth_k, e.batch_size) == (
            arm.draft_key,
            arm.workload,
            arm.depth_k,
            arm.batch_size,
        )
        if same and arm.al_replayed is not None:
            return e.speedup_pred * arm.al_replayed / e.al
    return None


def prediction_gap(policy: Policy, choice: DepthChoice) -> float:
    """predicted / measured - 1 on the same prompts; over all prompts where the measured ones have no maps."""
    from components.speedup.measured import arm_of

    arm = arm_of(policy, choice)
    if arm is not None and arm.speedup_pred is not None:
        return arm.speedup_pred / arm.speedup - 1.0
    return choice.pred_error or 0.0


def _pick_winner(policy: Policy, only: str | None) -> DepthChoice | None:
    """The drafter whose chosen depth has the best measured lower bound, at the smallest batch size.

    That is the smallest that a depth was chosen for, be it 0: what a larger batch is drafted with is not served at it.
    only: the one drafter that may win, or None. A drafter at fault (its output differs, its numbers are impossible)
    wins only if every one is.
    """
    from components.speedup.policy import at_smallest_batch, faults_of

    pooled = [c for c in at_smallest_batch(policy) if c.depth_k > 0 and c.meas_lo is not None]
    pooled = [c for c in pooled if only in (None, c.draft_key)]
    sound = [c for c in pooled if not faults_of(policy, c.draft_key)]
    return max(sound or pooled, key=lambda c: (c.meas_lo or 0.0, c.draft_key), default=None)


def _gate(policy: Policy, winner: DepthChoice | None, min_speedup: float, max_gap: float) -> list[GateCheck]:
    """What promotion asks for, each condition with its value and limit."""
    from components.speedup.bootstrap import LEAST_PROMPTS
    from components.speedup.measured import arm_of
    from components.speedup.policy import ALL, GateCheck, faults_of

    if winner is None:
        return [GateCheck("depth_chosen_and_measured", False, 0.0, ">= 1")]
    arms = [a for a in policy.arms if a.draft_key == winner.draft_key and a.workload == ALL]
    divergences, checked = sum(a.divergences for a in arms), sum(a.checked for a in arms)
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
    reasons = [measured, *(f"gate: {c.name} is {c.value:.3g}, asked {c.limit}" for c in checks if not c.passed)]
    return _by_its_interval(winner, policy), reasons


def _by_its_interval(choice: DepthChoice, policy: Policy) -> str:
    """use | do_not_speculate | undecided, by the measured interval; fewer than LEAST_PROMPTS prompts decide nothing."""
    from components.speedup.bootstrap import LEAST_PROMPTS
    from components.speedup.measured import arm_of

    arm = arm_of(policy, choice)
    if arm is None or arm.num_prompts < LEAST_PROMPTS or choice.meas_lo is None or choice.meas_hi is None:
        return "undecided"
    return "use" if choice.meas_lo > 1.0 else "do_not_speculate" if choice.meas_hi < 1.0 else "undecided"


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
