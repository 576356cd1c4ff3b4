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
from components.speedup.evaluate import Speeds
from components.speedup.policy import AcceptanceSummary

MIN_PROMPTS = 64  # below it even the bias-corrected interval covers less than it says
MIN_ROUNDS = 200
MIN_COST_RATIO = 0.98  # a verify pass plus drafts cannot be faster than one plain step, less 2 % noise
MAX_PROXY_GAP = 0.25
MAX_CUT_SHARE = 0.10
MAX_REPEATED_BIGRAMS = 0.5
MAX_PREDICTION_GAP = 0.10


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
) -> list[QualityFlag]:
    """Flags of one drafter on the pooled workload. All arguments are of that drafter and workload."""
    drafted = [e for e in evals if e.depth_k > 0]
    at_choice = next(s for s in summaries if s.depth_k == (choice.depth_k or drafted[0].depth_k))
    doubts = cost_doubts(drafted)
    doubts += sample_doubts(summaries[-1].num_prompts, at_choice.num_rounds, at_choice.depth_k)
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


def sample_doubts(num_prompts: int, num_rounds: int, depth: int) -> list[Doubt]:
    """Too little was measured for what is said about it."""
    doubts = []
    if num_prompts < MIN_PROMPTS:
        said = f"intervals over fewer than {MIN_PROMPTS} prompts are too narrow"
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
