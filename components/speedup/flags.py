"""Reasons to doubt a number, each with a name, its value and what to do: the flags that predictions can raise.

Thresholds are stated here and nowhere else. severity: info (worth knowing), warning (the number may mislead), fault
(the number is wrong or unusable: the verdict becomes "invalid").
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from components.rows import UNTRAINED, AcceptanceMap, DepthChoice, DepthEval, QualityFlag
from components.speedup.bootstrap import Estimate
from components.speedup.costs import CostTable
from components.speedup.evaluate import Speeds
from components.speedup.policy import AcceptanceSummary

MIN_PROMPTS = 64  # below it intervals hold, but are too wide to tell depths or drafters apart
MIN_ROUNDS = 200
MIN_COST_RATIO = 0.98  # a verify pass plus drafts cannot be faster than one plain step, less 2 % noise
MAX_PROXY_GAP = 0.25
MAX_CUT_SHARE = 0.10
MAX_REPEATED_BIGRAMS = 0.5
MAX_PREDICTION_GAP = 0.10
MIN_EVEN_SHARE = 0.5  # of the prompts, in what they are worth; lengths that differ twofold leave about 0.8
MAX_BASELINE_GAP = 0.05


class Doubt(NamedTuple):
    """A flag before it says whose it is."""

    code: str
    severity: str
    value: float
    detail: str

    def about(self, session_id: str, draft_key: str, method: str) -> QualityFlag:
        """The flag, as it is stored."""
        return QualityFlag(session_id, draft_key, method, self.code, self.severity, float(self.value), self.detail)


def prediction_flags(
    session_id: str,
    maps: Sequence[AcceptanceMap],
    evals: Sequence[DepthEval],
    speeds: Speeds,
    summaries: Sequence[AcceptanceSummary],
    choice: DepthChoice,
    cost: CostTable,
) -> list[QualityFlag]:
    """Flags of one drafter on the pooled workload. All arguments are of that drafter and workload."""
    drafted = [e for e in evals if e.depth_k > 0]
    at_choice = next(s for s in summaries if s.depth_k == (choice.depth_k or drafted[0].depth_k))
    doubts = cost_doubts(drafted)
    doubts += curve_doubts(cost)
    doubts += sample_doubts(summaries[-1].num_prompts, at_choice.num_rounds, at_choice.depth_k)
    doubts += weight_doubts(speeds.al[speeds.depths.index(at_choice.depth_k)])
    if choice.method not in UNTRAINED:
        doubts += depth_doubts(choice.depth_k, min(m.trained_depth for m in maps))
    doubts += falling_doubts(speeds)
    doubts += _acceptance_doubts(at_choice)
    if at_choice.num_cut_rounds > MAX_CUT_SHARE * at_choice.num_rounds:
        share = at_choice.num_cut_rounds / at_choice.num_rounds
        said = "many rounds are cut by the end of short answers; longer answers keep more"
        doubts.append(Doubt("tail_rounds", "info", share, said))
    doubts += looping_doubts(sum(m.repeated_bigrams for m in maps) / len(maps))
    return [doubt.about(session_id, choice.draft_key, choice.method) for doubt in doubts]


def thread_flags(session_id: str, threads: Mapping[tuple[str, str], int]) -> list[QualityFlag]:
    """Drafters, (draft_key, method), whose step costs were timed on other threads than most: they do not compare.

    Without a common choice (bench.autotune) each measurement takes the threads that decode plainly fastest at its time,
    and with them its own plain step.
    """
    if not threads:
        return []
    usual = min(statistics.multimode(threads.values()))
    said = "its step costs were timed on {} thread(s), most others on {}: measure again, all with one bench.autotune"
    return [
        Doubt("other_threads", "warning", number, said.format(number, usual)).about(session_id, *drafter)
        for drafter, number in sorted(threads.items())
        if number != usual
    ]


def cost_doubts(drafted: Sequence[DepthEval]) -> list[Doubt]:
    """A round that is cheaper than one plain step: the plain decoding it is compared with was not at its best."""
    cheapest = min(drafted, key=lambda e: e.cost_ratio)
    return baseline_doubts(cheapest.cost_ratio, cheapest.depth_k)


def baseline_doubts(cost_ratio: float, depth: int) -> list[Doubt]:
    """The same from a cost ratio, which is AL / speedup: below 1 a speedup exceeds its own acceptance length."""
    if cost_ratio >= 1.0:
        return []
    severity = "fault" if cost_ratio < MIN_COST_RATIO else "warning"
    said = (
        f"a round at depth {depth} costs less than one plain step, so the speedup exceeds the acceptance length; the "
        "plain decoding it is compared with is not the best, or the two were not timed alike"
    )
    return [Doubt("bad_baseline", severity, cost_ratio, said)]


def curve_doubts(cost: CostTable) -> list[Doubt]:
    """Cells that contradict the curve over depth, verification below a plain step, and a single process for all."""
    doubts = []
    for found in cost.contradictions:
        how = "less than a shallower one" if found.falls else "more" if found.by > 0 else "less"
        said = (
            f"a round at depth {found.depth_k} costs {how}{'' if found.falls else ' than the other depths say'}, by "
            f"{abs(found.by):.1%} of its time and beyond chance: measure it again"
        )
        doubts.append(Doubt("cost_cell_contradicts", "warning" if found.falls else "info", found.depth_k, said))
    below = [(float(ratio), k) for ratio, k in zip(cost.verify_over_plain, cost.depths, strict=True) if k]
    ratio, depth = min(below)
    if ratio < 1.0:
        said = f"verifying depth {depth} takes {ratio:.3f} of a plain step, whose work it holds: not timed alike"
        doubts.append(Doubt("verify_below_plain", "warning", ratio, said))
    if cost.num_processes <= 1:
        said = (
            "costs were timed in one process: intervals leave out how fresh processes differ (layout, kernels), which "
            "may be some per cent; time them in three or more"
        )
        doubts.append(Doubt("one_session", "warning", cost.num_processes, said))
    return doubts


def weight_doubts(al: Estimate) -> list[Doubt]:
    """A few prompts that hold most of the rounds: the others hardly count."""
    asked, worth = len(al.influence), al.prompts.effective
    if worth >= MIN_EVEN_SHARE * asked:
        return []
    said = f"a few of the {asked} prompts hold most rounds, so that all are worth {worth:.0f} equal ones"
    return [Doubt("few_prompts_weigh", "warning", worth, said)]


def baseline_flags(session_id: str, plain: Mapping[tuple[str, str], tuple[int, float]]) -> list[QualityFlag]:
    """Drafters, (draft_key, method), timed in another measurement than others, beside a plain step of another time.

    plain: the measurement that each was timed in, and T_target there in ms. Within one they share their baseline.
    """
    fastest = min((ms for _, ms in plain.values()), default=0.0)
    said = "its plain step took {:.3g} ms, in another measurement {:.3g} ms: time all drafters in one"
    return [
        Doubt("other_baseline", "warning", ms, said.format(ms, fastest)).about(session_id, *drafter)
        for drafter, (_, ms) in sorted(plain.items())
        if len({session for session, _ in plain.values()}) > 1 and ms > fastest * (1.0 + MAX_BASELINE_GAP)
    ]


def sample_doubts(num_prompts: int, num_rounds: int, depth: int) -> list[Doubt]:
    """Too little was measured for what is said about it."""
    doubts = []
    if num_prompts < MIN_PROMPTS:
        said = f"fewer than {MIN_PROMPTS} prompts: intervals are wide, and rest on how prompts differ being well known"
        doubts.append(Doubt("few_prompts", "warning", num_prompts, said))
    if num_rounds < MIN_ROUNDS:
        said = f"fewer than {MIN_ROUNDS} rounds at depth {depth}"
        doubts.append(Doubt("few_rounds", "warning", num_rounds, said))
    return doubts


def depth_doubts(depth: int, trained: int) -> list[Doubt]:
    """Deeper than the drafter has learned to draft."""
    said = f"the drafter is trained for depth {trained}"
    return [Doubt("beyond_trained_depth", "warning", depth, said)] if depth > trained else []


def looping_doubts(repeated_bigrams: float) -> list[Doubt]:
    """Loops are easy to guess."""
    said = "share of repeated bigrams; loops make acceptance look good"
    return (
        [Doubt("looping_output", "warning", repeated_bigrams, said)] if repeated_bigrams > MAX_REPEATED_BIGRAMS else []
    )


def falling_doubts(speeds: Speeds) -> list[Doubt]:
    """Acceptance length that falls as drafts get deeper, by more than chance: the paired interval lies above 0.

    Where nothing varied (one figure for all prompts, a single prompt) there is none, and that is said.
    """
    doubts = []
    for (depth, before), (deeper, after) in itertools.pairwise(zip(speeds.depths, speeds.al, strict=True)):
        fall = before.minus_paired(after)
        lo, hi = fall.interval()
        if lo <= 0.0:
            continue
        known = f"95 % interval [{lo:.3f}, {hi:.3f}]" if lo < hi else "no interval: nothing varied"
        said = (
            f"AL falls from {before.value:.3f} at depth {depth} to {after.value:.3f} at depth {deeper}, by "
            f"{fall.value:.3f} ({known}): past its trained depth, or two different measurements"
        )
        doubts.append(Doubt("al_falls_with_depth", "warning", deeper, said))
    return doubts


def _acceptance_doubts(at_choice: AcceptanceSummary) -> list[Doubt]:
    """Acceptance that is impossible, or that its training proxy flatters."""
    doubts = []
    if at_choice.reached and at_choice.reached[0]:
        rate = at_choice.kept[0] / at_choice.reached[0]
        if rate == 0.0:
            said = "no first draft was ever kept: wrong features or vocabulary?"
            doubts.append(Doubt("nothing_accepted", "warning", rate, said))
        if rate == 1.0 and at_choice.reached[0] >= MIN_ROUNDS:
            said = "every first draft was kept: is verification comparing at all?"
            doubts.append(Doubt("everything_accepted", "warning", rate, said))
    proxy, replayed = at_choice.al_proxy, at_choice.al
    if proxy is not None and replayed is not None and abs(proxy / replayed - 1.0) > MAX_PROXY_GAP:
        said = (
            f"the training metric says AL {proxy:.2f}, replay says {replayed:.2f} "
            f"(depth {at_choice.depth_k}); trust the replay"
        )
        doubts.append(Doubt("proxy_gap", "info", proxy / replayed - 1.0, said))
    return doubts
