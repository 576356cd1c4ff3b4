"""Measured speedup of every end-to-end arm: kept tokens over time, paired by prompt with the best plain decoding.

Formulas and conventions are those of components/definitions.py: `speedup` is over prompts that both decoded in one
process, dtype, temperature and batch size. Prompts and processes both vary: see comparison/paired.py.

Outputs that differ from plain decoding at a tie have limits: those that the measured rounding noise explains. A single
tie looks like a verifier that is lenient within the noise, but the number of ties does not. Two counts are compared
with the expectation from rounding alone: prompts whose output differs from plain decoding at all, and tokens with a
likelier alternative. On the built-in target, with outputs of 96 tokens: in float32 none of 120 differed (expected:
fewer than one in 10,000), so the first count decides; in bfloat16 58 to 75 % differ (expected 78 %), so that it cannot,
and the second decides: 0.6 to 1.1 % of tokens (expected 1.1 to 1.2 %).

Quality flags are those of an end-to-end measurement, and of the depths that it confirms; severities as in flags.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from components import definitions
from components.definitions import has_decoding, timed_pairs
from components.methods import is_trained
from components.policy import MeasuredArm, Policy, PromptCounts
from components.refusals import PROMPTS
from components.rows import ALL, DepthChoice, DepthEval, QualityFlag, Request, grouped
from components.speedup.bootstrap import Estimate
from components.speedup.comparison.paired import SpeedRatio, speed_ratio
from components.speedup.prediction.flags import MAX_PREDICTION_GAP, MIN_ROUNDS, QualityIssue


class ArmKey(NamedTuple):
    """Two requests with this key in common are repetitions of one arm."""

    method: str
    draft_key: str
    depth_k: int
    tree_budget: int  # 0 for a chain, so that keys can be sorted
    batch_size: int
    dtype: str
    kernel: str


class ArmEstimate(NamedTuple):
    """An arm with its speedup as an estimate, and the prompts behind it."""

    arm: MeasuredArm
    speedup: Estimate
    prompts: list[str]


def measured_arms(
    requests: Sequence[Request], num_draws: int, seed: int, replayed: Sequence[PromptCounts] = ()
) -> list[ArmEstimate]:
    """Every speculative arm at temperature 0, pooled and by workload, over the best plain kernel of its dtype.

    replayed: replayed counts of the same drafters by prompt, for MeasuredArm.al_replayed.
    """
    counts = {(c.draft_key, c.prompt_id): c for c in replayed}
    rows = [r for r in requests if has_decoding(r) and r.temperature == 0.0]
    by_arm = grouped(
        rows,
        lambda r: ArmKey(r.method, r.draft_key, r.depth_k, r.tree_budget or 0, r.batch_size, r.dtype, r.kernel),
    )
    processes = sorted({r.process for r in rows})
    arms = []
    for key, arm_requests in sorted(by_arm.items()):
        if key.method == "none":
            continue
        plain = definitions.best_plain(r for r in rows if (r.dtype, r.batch_size) == (key.dtype, key.batch_size))
        for workload in [ALL, *sorted({r.workload for r in arm_requests} - {ALL})]:
            of_workload = [r for r in arm_requests if workload in (ALL, r.workload)]
            ratio = speed_ratio(timed_pairs(of_workload), timed_pairs(plain), processes, num_draws, seed)
            if ratio is not None:
                arms.append(
                    ArmEstimate(
                        _measure_arm(key, workload, (of_workload, plain), ratio, counts), ratio.ratio, ratio.prompts
                    )
                )
    return arms


def _measure_arm(
    key: ArmKey,
    workload: str,
    requests: tuple[list[Request], list[Request]],
    ratio: SpeedRatio,
    counts: dict[tuple[str, str], PromptCounts],
) -> MeasuredArm:
    """One arm on one workload. requests: those of the arm, and those of plain decoding."""
    shared, speedup = ratio.prompts, ratio.ratio
    drafted, plain = ([r for r in rows if r.prompt_id in set(shared)] for rows in requests)
    lo, hi = speedup.interval()
    # Maps of chains do not describe a tree.
    prompt_counts = [None if key.tree_budget else counts.get((key.draft_key, prompt_id)) for prompt_id in shared]
    replayed = al_replayed(prompt_counts, key.depth_k)
    rounds = definitions.round_counts(drafted)
    compared = [r for r in drafted if r.identical is not None]
    ties = sum(not r.identical and bool(r.tie) for r in compared)
    return MeasuredArm(
        draft_key=key.draft_key,
        method=key.method,
        workload=workload,
        depth_k=key.depth_k,
        batch_size=key.batch_size,
        dtype=key.dtype,
        kernel=key.kernel,
        num_prompts=len(shared),
        num_requests=len(drafted),
        num_rounds=rounds.rounds,
        tokens_per_s=definitions.tokens_per_s(drafted) or 0.0,
        plain_tokens_per_s=definitions.tokens_per_s(plain) or 0.0,
        al=definitions.al_of(drafted),
        al_replayed=replayed,
        draft_acceptance_rate=definitions.draft_acceptance_rate(rounds.accepted, rounds.drafted),
        speedup=speedup.value,
        lo=lo,
        hi=hi,
        checked=len(compared),
        ties=ties,
        divergences=sum(not r.identical for r in compared) - ties,
        tree_budget=key.tree_budget or None,
        num_processes=ratio.num_processes,
        is_decisive=speedup.is_decisive,
        **ties_of(compared)._asdict(),
    )


def arm_of(policy: Policy, row: DepthEval | DepthChoice) -> MeasuredArm | None:
    """The measured arm of a predicted row; of several, that in the dtype and kernel of the step costs."""
    budget = row.tree_budget if isinstance(row, DepthEval) else None
    arm_key = (row.draft_key, row.method, row.workload, row.depth_k, row.batch_size, budget)
    arms = [
        a for a in policy.arms if (a.draft_key, a.method, a.workload, a.depth_k, a.batch_size, a.tree_budget) == arm_key
    ]
    return max(arms, key=lambda a: _nearness(policy, a), default=None)


def best_of(
    policy: Policy, measured: Sequence[ArmEstimate], chain: tuple[str, int], batch_size: int
) -> ArmEstimate | None:
    """The same for a chain (draft_key, depth) over all workloads, as an estimate."""
    arm_key = (*chain, ALL, batch_size, None)
    runs = [
        m
        for m in measured
        if (m.arm.draft_key, m.arm.depth_k, m.arm.workload, m.arm.batch_size, m.arm.tree_budget) == arm_key
    ]
    return max(runs, key=lambda m: _nearness(policy, m.arm), default=None)


def _nearness(policy: Policy, arm: MeasuredArm) -> tuple[bool, bool, float]:
    return arm.dtype == policy.dtype, arm.kernel == policy.kernel, arm.tokens_per_s


def al_replayed(counts: Sequence[PromptCounts | None], depth: int) -> float | None:
    """AL of a set of prompts by their maps; None unless each has counts at this depth."""
    replayed = [c for c in counts if c is not None and depth in c.depths]
    if len(replayed) < len(counts):
        return None
    return definitions.al(sum(c.tokens for c in replayed), sum(c.rounds[c.depths.index(depth)] for c in replayed))


MAX_LOADED_TAX = 0.03
MAX_AL_GAP = 0.05
MIN_DRAFTED_SHARE = 0.7
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
        and is_trained(arm.method)  # others draft what they find, up to the depth
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


SLACK: Final = 1.5
"""Factor on the expected number: its model of noise is normal, and true noise has heavier tails."""

FALSE_ALARM: Final = 1e-4
"""The largest share of correct arms beyond the limit. A single tie is never too many."""


class Ties(NamedTuple):
    """The ties of one arm. Outputs of one prompt differ at the same places, so a prompt counts once, as their mean."""

    tied_share: float | None = None  # share of prompts whose output differs at a tie; None: not compared
    tied_share_limit: float | None = None  # the most that rounding explains; None: not known
    rounded_tokens: float | None = None  # tokens with a likelier alternative, within the noise
    rounded_tokens_limit: float | None = None

    @property
    def too_many(self) -> bool:
        """Whether rounding alone does not explain the differences from plain decoding."""
        pairs = ((self.tied_share, self.tied_share_limit), (self.rounded_tokens, self.rounded_tokens_limit))
        return any(value is not None and limit is not None and value > limit for value, limit in pairs)


def ties_of(compared: Iterable[Request]) -> Ties:
    """The ties of one arm's outputs that were compared with plain decoding."""
    by_prompt = grouped(compared, lambda request: request.prompt_id)
    if not by_prompt:
        return Ties()
    num_prompts, outputs = len(by_prompt), list(by_prompt.values())
    tied = sum(_mean([float(bool(r.tie)) for r in rows]) for rows in outputs)
    chances = [_mean([r.tie_chance for r in rows if r.tie_chance is not None]) for rows in outputs]
    limit = _count_limit(sum(chances)) if all(r.tie_chance is not None for rows in outputs for r in rows) else None
    share_limit = None if limit is None else min(1.0, limit / num_prompts)
    if any(r.rounded_tokens is None or r.rounded_expected is None for rows in outputs for r in rows):
        return Ties(tied / num_prompts, share_limit)
    rounded = sum(_mean([float(r.rounded_tokens or 0) for r in rows]) for rows in outputs)
    expected = sum(_mean([r.rounded_expected or 0.0 for r in rows]) for rows in outputs)
    return Ties(tied / num_prompts, share_limit, rounded, _count_limit(expected))


def _count_limit(expected: float) -> float:
    """The smallest count, 1 or more, that chance exceeds with a probability of at most FALSE_ALARM.

    expected: mean of a sum of independent events; Poisson's law is the one with the heaviest tail.
    """
    rate, count = max(SLACK * expected, 1e-12), 0
    passed = -math.expm1(-rate)
    while count < 1 or passed > FALSE_ALARM:
        count += 1
        passed -= math.exp(count * math.log(rate) - rate - math.lgamma(count + 1.0))
    return float(count)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
