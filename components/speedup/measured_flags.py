"""Reasons to doubt an end-to-end measurement, or the depth it was asked to confirm. Severities as in flags.py."""

from __future__ import annotations

from collections.abc import Sequence

from components.rows import DepthChoice, DepthEval, QualityFlag, Request
from components.speedup.flags import MAX_PREDICTION_GAP, MIN_PROMPTS, MIN_ROUNDS, Doubt
from components.speedup.measured import arm_of
from components.speedup.policy import ALL, MeasuredArm, Policy
from components.speedup.ties import Ties

MAX_LOADED_TAX = 0.03
MAX_AL_GAP = 0.05
MIN_DRAFTED_SHARE = 0.7
NOT_OF_ONE_LENGTH = ("ngram", "lookahead")  # methods that draft what they have found, up to the depth
WORTH_SAYING = 0.01  # a better depth than the chosen one by less than this is not worth a flag


def measured_flags(policy: Policy, requests: Sequence[Request], max_prediction_gap: float) -> list[QualityFlag]:
    """Flags over all arms and choices, pooled over workloads."""
    flags = [flag for arm in policy.arms if arm.workload == ALL for flag in _arm_flags(policy, arm)]
    failed = sum(r.status == "error" for r in requests)
    if failed:
        flags.append(
            QualityFlag(policy.selection_id, "", "", "failed_requests", "warning", failed, "requests ended in an error")
        )
    drafting = [choice for choice in policy.choices if choice.workload == ALL and choice.depth_k > 0]
    for choice in drafting:
        flags += _choice_flags(policy, choice, max_prediction_gap)
    for drafter in dict.fromkeys((choice.draft_key, choice.method) for choice in drafting):  # once, not a batch size
        flags += _thread_flags(policy, drafter, requests)
    return flags


def _arm_flags(policy: Policy, arm: MeasuredArm) -> list[QualityFlag]:
    """What a single arm shows about itself."""
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        detail = f"depth {arm.depth_k}: {detail}"
        flags.append(QualityFlag(policy.selection_id, arm.draft_key, arm.method, code, severity, float(value), detail))

    if arm.divergences:
        flag(
            "not_identical",
            "fault",
            arm.divergences,
            f"of {arm.checked} outputs differ from plain decoding beyond a tie",
        )
    if arm.ties:
        flag("ties", "info", arm.ties, f"of {arm.checked} outputs part from plain decoding at a tie of two tokens")
    if too_many_ties(arm):
        said = (
            f"of prompts part from plain decoding at a tie (at most {arm.tied_share_limit:.3f}), "
            f"{arm.rounded_tokens or 0:g} tokens are less likely than another (at most "
            f"{arm.rounded_tokens_limit or 0:.1f}): more than rounding explains"
        )
        flag("too_many_ties", "fault", arm.tied_share or 0.0, said)
    if arm.depth_k == 0 and arm.hi < 1.0 - MAX_LOADED_TAX:
        flag(
            "loaded_tax",
            "warning",
            1.0 - arm.speedup,
            f"share of speed lost to a drafter that drafts nothing [{1 - arm.hi:.3f}, {1 - arm.lo:.3f}]",
        )
    if arm.depth_k > 0 and arm.al is not None and arm.speedup > arm.al:
        flag(
            "bad_baseline",
            "fault" if arm.lo > arm.al else "warning",
            arm.speedup,
            f"faster than its own AL of {arm.al:.2f}: plain decoding was not at its best",
        )
    if (
        arm.num_rounds >= MIN_ROUNDS
        and arm.draft_acceptance_rate is not None
        and arm.al is not None
        and arm.method not in NOT_OF_ONE_LENGTH
        and arm.tree_budget is None
    ):
        # accepted / rounds is about AL - 1; over the rate it gives the drafts of a round.
        drafted = (arm.al - 1.0) / arm.draft_acceptance_rate if arm.draft_acceptance_rate else None
        if drafted is not None and drafted < MIN_DRAFTED_SHARE * arm.depth_k:
            flag("depth_not_respected", "warning", drafted, f"drafts a round where {arm.depth_k} were asked for")
    return flags


def too_many_ties(arm: MeasuredArm) -> bool:
    """Whether more of an arm's outputs part from plain decoding at ties than rounding explains."""
    return Ties(arm.tied_share, arm.tied_share_limit, arm.rounded_tokens, arm.rounded_tokens_limit).too_many


def _thread_flags(policy: Policy, drafter: tuple[str, str], requests: Sequence[Request]) -> list[QualityFlag]:
    """Whether a drafter, (draft_key, method), decoded on the threads that its step costs were timed on."""
    timed = policy.threads.get(drafter[0])
    decoded = {r.num_threads for r in requests if r.draft_key == drafter[0] and r.engine is None}
    if timed is None or decoded <= {timed}:
        return []
    other = min(decoded - {timed})
    said = f"step costs were timed on {timed} thread(s), decoding on {other}: what was predicted is another engine"
    doubt = Doubt("predicted_on_other_threads", "warning", timed, said)
    return [doubt.about(policy.selection_id, *drafter)]


def _choice_flags(policy: Policy, choice: DepthChoice, max_prediction_gap: float) -> list[QualityFlag]:
    """What measurement says about the depth that was chosen for one drafter."""
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        flags.append(
            QualityFlag(policy.selection_id, choice.draft_key, choice.method, code, severity, float(value), detail)
        )

    if choice.speedup_meas is None or choice.pred_error is None:
        flag("not_measured", "warning", choice.depth_k, "the chosen depth was not measured end to end")
        return flags
    arm = arm_of(policy, choice)
    assert arm is not None, "speedup_meas comes from an arm"
    predicted = choice.speedup_pred if arm.speedup_pred is None else arm.speedup_pred
    if abs(predicted / arm.speedup - 1.0) > min(MAX_PREDICTION_GAP, max_prediction_gap):
        detail = f"predicted {predicted:.2f}x for the measured prompts, measured {arm.speedup:.2f}x"
        flag("prediction_gap", "warning", predicted / arm.speedup - 1.0, detail)
    mine = [
        e
        for e in policy.evals
        if (e.draft_key, e.workload, e.batch_size) == (choice.draft_key, ALL, choice.batch_size) and e.speedup_meas
    ]
    chosen = next((e for e in mine if e.depth_k == choice.depth_k), None)
    best = max(mine, key=lambda e: e.speedup_meas or 0.0, default=None)
    if chosen and best and _gain(best, chosen) > WORTH_SAYING:
        detail = f"depth {best.depth_k} measured {best.speedup_meas:.2f}x, the chosen one {chosen.speedup_meas:.2f}x"
        flag("better_depth_measured", "info", _gain(best, chosen), detail)
    if arm.al is not None and arm.al_replayed is not None and abs(arm.al / arm.al_replayed - 1.0) > MAX_AL_GAP:
        detail = f"AL {arm.al:.2f} while decoding, {arm.al_replayed:.2f} replayed from the maps of the same prompts"
        flag("replay_mismatch", "warning", arm.al / arm.al_replayed - 1.0, detail)
    if arm.num_processes == 1:
        said = "decoded in one process: intervals leave out how fresh processes differ; decode in three or more"
        flag("one_session", "warning", 1, said)
    if arm.num_prompts < MIN_PROMPTS:
        flag("few_prompts_measured", "warning", arm.num_prompts, f"end to end on fewer than {MIN_PROMPTS} prompts")
    return flags


def _gain(best: DepthEval, chosen: DepthEval) -> float:
    """How much faster the best measured depth is than the chosen one."""
    return (best.speedup_meas or 0.0) / (chosen.speedup_meas or 1.0) - 1.0


def best_lookup(policy: Policy, winner: DepthChoice) -> MeasuredArm | None:
    """The fastest arm of prompt lookup on the winner's prompts; None when it was not measured."""
    lookups = [
        a for a in policy.arms if a.method == "ngram" and a.workload == ALL and a.batch_size == winner.batch_size
    ]
    return max(lookups, key=lambda a: a.speedup, default=None)


def lookup_flags(policy: Policy, winner: DepthChoice) -> list[QualityFlag]:
    """Prompt lookup needs no training: a drafter that does not beat it is not worth its weights."""
    best = best_lookup(policy, winner)
    if best is None or winner.speedup_meas is None or best.speedup <= winner.speedup_meas:
        return []
    detail = (
        f"prompt lookup (depth {best.depth_k}) measured {best.speedup:.2f}x on the same prompts, without any drafter"
    )
    return [
        QualityFlag(
            policy.selection_id, winner.draft_key, winner.method, "slower_than_lookup", "warning", best.speedup, detail
        )
    ]
