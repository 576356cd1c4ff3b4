"""Quality flags of predictions: reasons to doubt a number, each with a code, a value and a remedy.

Their thresholds are stated here. severity: info (worth knowing), warning (the number may mislead), fault (the number is
wrong or unusable: the verdict becomes "invalid").
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from components.methods import is_trained
from components.policy import AcceptanceSummary
from components.refusals import PROMPTS
from components.rows import AcceptanceMap, DepthEval, QualityFlag
from components.speedup.bootstrap import Estimate
from components.speedup.prediction.costs import CostTable
from components.speedup.prediction.predict import Evaluated, Speeds

MIN_ROUNDS = 200
MIN_COST_RATIO = 0.98  # a verify pass plus drafts cannot be faster than one plain step, less 2 % noise
MAX_PROXY_GAP = 0.25
MAX_CUT_SHARE = 0.10
MAX_REPEATED_BIGRAMS = 0.5
MAX_PREDICTION_GAP = 0.10
MIN_EVEN_SHARE = 0.5  # effective over real number of prompts; twofold different lengths give about 0.8
MAX_BASELINE_GAP = 0.05


class QualityIssue(NamedTuple):
    """A quality flag without its drafter and session."""

    code: str
    severity: str
    value: float
    detail: str

    def to_flag(self, session_id: str, draft_key: str, method: str) -> QualityFlag:
        """The flag as a row."""
        return QualityFlag(session_id, draft_key, method, self.code, self.severity, float(self.value), self.detail)


def prediction_flags(
    session_id: str,
    maps: Sequence[AcceptanceMap],
    result: Evaluated,
    summaries: Sequence[AcceptanceSummary],
    cost: CostTable,
) -> list[QualityFlag]:
    """Flags of one drafter over all workloads; all arguments describe that drafter."""
    speeds, evals, choice = result
    drafted = [e for e in evals if e.depth_k > 0]
    at_choice = next(s for s in summaries if s.depth_k == (choice.depth_k or drafted[0].depth_k))
    issues = cost_issues(drafted)
    issues += curve_issues(cost)
    issues += sample_issues(summaries[-1].num_prompts, at_choice.num_rounds, at_choice.depth_k)
    issues += weight_issues(speeds.al[speeds.depths.index(at_choice.depth_k)])
    if is_trained(choice.method):
        issues += depth_issues(choice.depth_k, min(m.trained_depth for m in maps))
    issues += falling_issues(speeds)
    issues += _acceptance_issues(at_choice)
    if at_choice.num_cut_rounds > MAX_CUT_SHARE * at_choice.num_rounds:
        share = at_choice.num_cut_rounds / at_choice.num_rounds
        detail = "many rounds are cut by the end of short answers; longer answers keep more"
        issues.append(QualityIssue("tail_rounds", "info", share, detail))
    issues += looping_issues(sum(m.repeated_bigrams for m in maps) / len(maps))
    return [issue.to_flag(session_id, choice.draft_key, choice.method) for issue in issues]


def thread_flags(session_id: str, threads: Mapping[tuple[str, str], int]) -> list[QualityFlag]:
    """Flags of drafters whose step costs were timed on another number of threads than most: they do not compare.

    threads: (draft_key, method) -> threads. Without a common choice (bench.autotune) each measurement uses the number
    that decodes plainly fastest at its time, and its plain step depends on it.
    """
    if not threads:
        return []
    usual = min(statistics.multimode(threads.values()))
    detail = "its step costs were timed on {} thread(s), most others on {}: measure again, all with one bench.autotune"
    return [
        QualityIssue("other_threads", "warning", number, detail.format(number, usual)).to_flag(session_id, *drafter)
        for drafter, number in sorted(threads.items())
        if number != usual
    ]


def cost_issues(drafted: Sequence[DepthEval]) -> list[QualityIssue]:
    """A round cheaper than one plain step: the plain decoding in the comparison was not at its best."""
    cheapest = min(drafted, key=lambda e: e.cost_ratio)
    return baseline_issues(cheapest.cost_ratio, cheapest.depth_k)


def baseline_issues(cost_ratio: float, depth: int) -> list[QualityIssue]:
    """The same from a cost ratio, AL / speedup: below 1 a speedup exceeds its acceptance length."""
    if cost_ratio >= 1.0:
        return []
    severity = "fault" if cost_ratio < MIN_COST_RATIO else "warning"
    detail = (
        f"a round at depth {depth} costs less than one plain step, so the speedup exceeds the acceptance length; the "
        "plain decoding it is compared with is not the best, or the two were not timed alike"
    )
    return [QualityIssue("bad_baseline", severity, cost_ratio, detail)]


def curve_issues(cost: CostTable) -> list[QualityIssue]:
    """Cells that contradict the curve over depth, verification below a plain step, and a single process for all."""
    issues = []
    for depth, by, falls in cost.contradictions:
        how = "less than a shallower one" if falls else f"{'more' if by > 0 else 'less'} than the other depths say"
        detail = (
            f"a round at depth {depth} costs {how}, by {abs(by):.1%} of its time and beyond chance: measure it again"
        )
        issues.append(QualityIssue("cost_cell_contradicts", "warning" if falls else "info", depth, detail))
    below = [(float(ratio), k) for ratio, k in zip(cost.verify_over_plain, cost.depths, strict=True) if k]
    ratio, depth = min(below)
    if ratio < 1.0:
        detail = f"verifying depth {depth} takes {ratio:.3f} of a plain step, whose work it holds: not timed alike"
        issues.append(QualityIssue("verify_below_plain", "warning", ratio, detail))
    if cost.num_processes <= 1:
        detail = (
            "costs were timed in one process: intervals leave out how fresh processes differ (layout, kernels), which "
            "may be some per cent; time them in three or more"
        )
        issues.append(QualityIssue("one_session", "warning", cost.num_processes, detail))
    return issues


def weight_issues(al: Estimate) -> list[QualityIssue]:
    """A few prompts hold most of the rounds: the others hardly count."""
    num_prompts, effective = len(al.influence), al.prompts.effective
    if effective >= MIN_EVEN_SHARE * num_prompts:
        return []
    detail = f"a few of the {num_prompts} prompts hold most rounds, so that all are worth {effective:.0f} equal ones"
    return [QualityIssue("few_prompts_weigh", "warning", effective, detail)]


def baseline_flags(session_id: str, plain: Mapping[tuple[str, str], tuple[int, float]]) -> list[QualityFlag]:
    """Flags of drafters whose measurement has a slower plain step than the measurement of another drafter.

    plain: (draft_key, method) -> (index of the measurement, T_target in ms). Within one the baseline is shared.
    """
    fastest = min((ms for _, ms in plain.values()), default=0.0)
    detail = "its plain step took {:.3g} ms, in another measurement {:.3g} ms: time all drafters in one"
    return [
        QualityIssue("other_baseline", "warning", ms, detail.format(ms, fastest)).to_flag(session_id, *drafter)
        for drafter, (_, ms) in sorted(plain.items())
        if len({session for session, _ in plain.values()}) > 1 and ms > fastest * (1.0 + MAX_BASELINE_GAP)
    ]


def sample_issues(num_prompts: int, num_rounds: int, depth: int) -> list[QualityIssue]:
    """Too few prompts or rounds were measured."""
    issues = []
    if num_prompts < PROMPTS.warn:
        detail = (
            f"fewer than {PROMPTS.warn} prompts: intervals are wide, and rest on how prompts differ being well known"
        )
        issues.append(QualityIssue("few_prompts", "warning", num_prompts, detail))
    if num_rounds < MIN_ROUNDS:
        detail = f"fewer than {MIN_ROUNDS} rounds at depth {depth}"
        issues.append(QualityIssue("few_rounds", "warning", num_rounds, detail))
    return issues


def depth_issues(depth: int, trained: int) -> list[QualityIssue]:
    """The depth exceeds the trained depth of the drafter."""
    detail = f"the drafter is trained for depth {trained}"
    return [QualityIssue("beyond_trained_depth", "warning", depth, detail)] if depth > trained else []


def looping_issues(repeated_bigrams: float) -> list[QualityIssue]:
    """The answers repeat themselves; loops are easy to draft."""
    detail = "share of repeated bigrams; loops make acceptance look good"
    return (
        [QualityIssue("looping_output", "warning", repeated_bigrams, detail)]
        if repeated_bigrams > MAX_REPEATED_BIGRAMS
        else []
    )


def falling_issues(speeds: Speeds) -> list[QualityIssue]:
    """Acceptance length falls with depth by more than chance: the paired interval of the fall lies above 0.

    Where nothing varies (one figure for all prompts, a single prompt) the text says that there is no interval.
    """
    issues = []
    for (depth, before), (deeper, after) in itertools.pairwise(zip(speeds.depths, speeds.al, strict=True)):
        fall = before.minus_paired(after)
        lo, hi = fall.interval()
        if lo <= 0.0:
            continue
        interval = f"95 % interval [{lo:.3f}, {hi:.3f}]" if lo < hi else "no interval: nothing varied"
        detail = (
            f"AL falls from {before.value:.3f} at depth {depth} to {after.value:.3f} at depth {deeper}, by "
            f"{fall.value:.3f} ({interval}): past its trained depth, or two different measurements"
        )
        issues.append(QualityIssue("al_falls_with_depth", "warning", deeper, detail))
    return issues


def _acceptance_issues(at_choice: AcceptanceSummary) -> list[QualityIssue]:
    """Implausible acceptance, or a training proxy far from the replay."""
    issues = []
    if at_choice.reached and at_choice.reached[0]:
        rate = at_choice.kept[0] / at_choice.reached[0]
        if rate == 0.0:
            detail = "no first draft was ever kept: wrong features or vocabulary?"
            issues.append(QualityIssue("nothing_accepted", "warning", rate, detail))
        if rate == 1.0 and at_choice.reached[0] >= MIN_ROUNDS:
            detail = "every first draft was kept: is verification comparing at all?"
            issues.append(QualityIssue("everything_accepted", "warning", rate, detail))
    proxy, replayed = at_choice.al_proxy, at_choice.al
    if proxy is not None and replayed is not None and abs(proxy / replayed - 1.0) > MAX_PROXY_GAP:
        detail = (
            f"the training metric says AL {proxy:.2f}, replay says {replayed:.2f} "
            f"(depth {at_choice.depth_k}); trust the replay"
        )
        issues.append(QualityIssue("proxy_gap", "info", proxy / replayed - 1.0, detail))
    return issues
