"""Quality flags of an end-to-end measurement, and of the depths that it confirms. Severities as in flags.py."""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import ALL, DepthChoice, DepthEval, QualityFlag, Request
from components.speedup.bootstrap import PROMPTS
from components.speedup.flags import MAX_PREDICTION_GAP, MIN_ROUNDS, QualityIssue
from components.speedup.measured import arm_of
from components.speedup.policy import MeasuredArm, Policy
from components.speedup.ties import Ties

MAX_LOADED_TAX = 0.03
MAX_AL_GAP = 0.05
MIN_DRAFTED_SHARE = 0.7
VARIABLE_LENGTH_METHODS = ("ngram", "lookahead")  # they draft what they find, up to the depth
MIN_GAIN = 0.01  # of a better depth than the chosen one; less raises no flag


def measured_flags(policy: Policy, requests: Sequence[Request], max_prediction_gap: float) -> list[QualityFlag]:
    """Flags of all arms and choices over all workloads."""
    flags = [flag for arm in policy.arms if arm.workload == ALL for flag in _arm_flags(policy, arm)]
    failed = sum(r.status == "error" for r in requests)
    if failed:
        issue = QualityIssue("failed_requests", "warning", failed, "requests ended in an error")
        flags.append(issue.to_flag(policy.selection_id, "", ""))
    drafting = [choice for choice in policy.choices if choice.workload == ALL and choice.depth_k > 0]
    for choice in drafting:
        flags += _choice_flags(policy, choice, max_prediction_gap)
    for drafter in dict.fromkeys((choice.draft_key, choice.method) for choice in drafting):  # once, not a batch size
        flags += _thread_flags(policy, drafter, requests)
    return flags


def _arm_flags(policy: Policy, arm: MeasuredArm) -> list[QualityFlag]:
    """Flags of a single arm."""
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        detail = f"depth {arm.depth_k}: {detail}"
        flags.append(QualityFlag(policy.selection_id, arm.draft_key, arm.method, code, severity, float(value), detail))

    if arm.divergences:
        detail = f"of {arm.checked} outputs differ from plain decoding beyond a tie"
        flag("not_identical", "fault", arm.divergences, detail)
    if arm.ties:
        flag("ties", "info", arm.ties, f"of {arm.checked} outputs part from plain decoding at a tie of two tokens")
    if too_many_ties(arm):
        detail = (
            f"of prompts part from plain decoding at a tie (at most {arm.tied_share_limit:.3f}), "
            f"{arm.rounded_tokens or 0:g} tokens are less likely than another (at most "
            f"{arm.rounded_tokens_limit or 0:.1f}): more than rounding explains"
        )
        flag("too_many_ties", "fault", arm.tied_share or 0.0, detail)
    if arm.depth_k == 0 and arm.hi < 1.0 - MAX_LOADED_TAX:
        detail = f"share of speed lost to a drafter that drafts nothing [{1 - arm.hi:.3f}, {1 - arm.lo:.3f}]"
        flag("loaded_tax", "warning", 1.0 - arm.speedup, detail)
    if arm.depth_k > 0 and arm.al is not None and arm.speedup > arm.al:
        detail = f"faster than its own AL of {arm.al:.2f}: plain decoding was not at its best"
        flag("bad_baseline", "fault" if arm.lo > arm.al else "warning", arm.speedup, detail)
    if (
        arm.num_rounds >= MIN_ROUNDS
        and arm.draft_acceptance_rate is not None
        and arm.al is not None
        and arm.method not in VARIABLE_LENGTH_METHODS
        and arm.tree_budget is None
    ):
        # accepted / rounds is about AL - 1; divided by the acceptance rate it is the number of drafts a round.
        drafted = (arm.al - 1.0) / arm.draft_acceptance_rate if arm.draft_acceptance_rate else None
        if drafted is not None and drafted < MIN_DRAFTED_SHARE * arm.depth_k:
            flag("depth_not_respected", "warning", drafted, f"drafts a round where {arm.depth_k} were asked for")
    return flags


def too_many_ties(arm: MeasuredArm) -> bool:
    """Whether more outputs of an arm differ from plain decoding at ties than rounding explains."""
    return Ties(arm.tied_share, arm.tied_share_limit, arm.rounded_tokens, arm.rounded_tokens_limit).too_many


def _thread_flags(policy: Policy, drafter: tuple[str, str], requests: Sequence[Request]) -> list[QualityFlag]:
    """A flag where a drafter (draft_key, method) decoded on other threads than its step costs were timed on."""
    timed = policy.threads.get(drafter[0])
    decoded = {r.num_threads for r in requests if r.draft_key == drafter[0] and r.engine is None}
    if timed is None or decoded <= {timed}:
        return []
    other = min(decoded - {timed})
    detail = f"step costs were timed on {timed} thread(s), decoding on {other}: what was predicted is another engine"
    issue = QualityIssue("predicted_on_other_threads", "warning", timed, detail)
    return [issue.to_flag(policy.selection_id, *drafter)]


def _choice_flags(policy: Policy, choice: DepthChoice, max_prediction_gap: float) -> list[QualityFlag]:
    """Flags of the depth chosen for one drafter, by its measurement."""
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        issue = QualityIssue(code, severity, value, detail)
        flags.append(issue.to_flag(policy.selection_id, choice.draft_key, choice.method))

    if choice.speedup_meas is None or choice.pred_error is None:
        flag("not_measured", "warning", choice.depth_k, "the chosen depth was not measured end to end")
        return flags
    arm = arm_of(policy, choice)
    assert arm is not None, "speedup_meas comes from an arm"
    predicted = choice.speedup_pred if arm.speedup_pred is None else arm.speedup_pred
    if abs(predicted / arm.speedup - 1.0) > min(MAX_PREDICTION_GAP, max_prediction_gap):
        detail = f"predicted {predicted:.2f}x for the measured prompts, measured {arm.speedup:.2f}x"
        flag("prediction_gap", "warning", predicted / arm.speedup - 1.0, detail)
    measured_evals = [
        e
        for e in policy.evals
        if (e.draft_key, e.workload, e.batch_size) == (choice.draft_key, ALL, choice.batch_size) and e.speedup_meas
    ]
    at_choice = next((e for e in measured_evals if e.depth_k == choice.depth_k), None)
    best = max(measured_evals, key=lambda e: e.speedup_meas or 0.0, default=None)
    if at_choice and best and _gain(best, at_choice) > MIN_GAIN:
        detail = f"depth {best.depth_k} measured {best.speedup_meas:.2f}x, the chosen one {at_choice.speedup_meas:.2f}x"
        flag("better_depth_measured", "info", _gain(best, at_choice), detail)
    if arm.al is not None and arm.al_replayed is not None and abs(arm.al / arm.al_replayed - 1.0) > MAX_AL_GAP:
        detail = f"AL {arm.al:.2f} while decoding, {arm.al_replayed:.2f} replayed from the maps of the same prompts"
        flag("replay_mismatch", "warning", arm.al / arm.al_replayed - 1.0, detail)
    if arm.num_processes == 1:
        detail = "decoded in one process: intervals leave out how fresh processes differ; decode in three or more"
        flag("one_session", "warning", 1, detail)
    if arm.num_prompts < PROMPTS.warn:
        flag("few_prompts_measured", "warning", arm.num_prompts, f"end to end on fewer than {PROMPTS.warn} prompts")
    return flags


def _gain(best: DepthEval, at_choice: DepthEval) -> float:
    """Speed of the best measured depth over the chosen one, minus 1."""
    return (best.speedup_meas or 0.0) / (at_choice.speedup_meas or 1.0) - 1.0


def best_lookup(policy: Policy, winner: DepthChoice) -> MeasuredArm | None:
    """The fastest arm of prompt lookup at the winner's batch size; None where not measured."""
    lookups = [
        a for a in policy.arms if a.method == "ngram" and a.workload == ALL and a.batch_size == winner.batch_size
    ]
    return max(lookups, key=lambda a: a.speedup, default=None)


def lookup_flags(policy: Policy, winner: DepthChoice) -> list[QualityFlag]:
    """A flag where prompt lookup, which needs no training, beats the winner."""
    best = best_lookup(policy, winner)
    if best is None or winner.speedup_meas is None or best.speedup <= winner.speedup_meas:
        return []
    detail = (
        f"prompt lookup (depth {best.depth_k}) measured {best.speedup:.2f}x on the same prompts, without any drafter"
    )
    issue = QualityIssue("slower_than_lookup", "warning", best.speedup, detail)
    return [issue.to_flag(policy.selection_id, winner.draft_key, winner.method)]
