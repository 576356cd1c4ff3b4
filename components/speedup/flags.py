"""Reasons to doubt a number, each with a name, its value and what to do: the flags that predictions can raise.

Thresholds are stated here and nowhere else. severity: info (worth knowing), warning (the number may mislead), fault
(the number is wrong or unusable: the verdict becomes "invalid").
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from components.rows import AcceptanceMap, DepthChoice, DepthEval, QualityFlag
from components.speedup.policy import AcceptanceSummary

MIN_PROMPTS = 30
MIN_ROUNDS = 200
MIN_COST_RATIO = 0.98  # a verify pass plus drafts cannot be faster than one plain step, less 2 % noise
MAX_PROXY_GAP = 0.25
MAX_CUT_SHARE = 0.10
MAX_REPEATED_BIGRAMS = 0.5


def prediction_flags(
    session_id: str,
    maps: Sequence[AcceptanceMap],
    evals: Sequence[DepthEval],
    summaries: Sequence[AcceptanceSummary],
    choice: DepthChoice,
) -> list[QualityFlag]:
    """Flags of one drafter on the pooled workload. All arguments are of that drafter and workload."""
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        flags.append(QualityFlag(session_id, choice.draft_key, choice.method, code, severity, float(value), detail))

    drafted = [e for e in evals if e.depth_k > 0]
    cheapest = min(drafted, key=lambda e: e.cost_ratio)
    if cheapest.cost_ratio < MIN_COST_RATIO:
        flag(
            "bad_baseline",
            "fault",
            cheapest.cost_ratio,
            f"a round at depth {cheapest.depth_k} costs less than one plain step; the plain decoding it is compared "
            "with is not the best, or the two were not timed alike",
        )
    num_prompts = summaries[-1].num_prompts
    if num_prompts < MIN_PROMPTS:
        flag("few_prompts", "warning", num_prompts, f"intervals over fewer than {MIN_PROMPTS} prompts are too narrow")
    at_choice = next(s for s in summaries if s.depth_k == (choice.depth_k or drafted[0].depth_k))
    if at_choice.num_rounds < MIN_ROUNDS:
        flag(
            "few_rounds",
            "warning",
            at_choice.num_rounds,
            f"fewer than {MIN_ROUNDS} rounds at depth {at_choice.depth_k}",
        )
    trained = min(m.trained_depth for m in maps)
    if choice.depth_k > trained:
        flag("beyond_trained_depth", "warning", choice.depth_k, f"the drafter is trained for depth {trained}")
    _acceptance_shape(flag, drafted, at_choice)
    if at_choice.num_cut_rounds > MAX_CUT_SHARE * at_choice.num_rounds:
        share = at_choice.num_cut_rounds / at_choice.num_rounds
        flag("tail_rounds", "info", share, "many rounds are cut by the end of short answers; longer answers keep more")
    repeated = sum(m.repeated_bigrams for m in maps) / len(maps)
    if repeated > MAX_REPEATED_BIGRAMS:
        flag("looping_output", "warning", repeated, "share of repeated bigrams; loops make acceptance look good")
    return flags


def _acceptance_shape(
    flag: Callable[[str, str, float, str], None], drafted: Sequence[DepthEval], at_choice: AcceptanceSummary
) -> None:
    """Acceptance that is impossible, falls as drafts get deeper, or is flattered by its training proxy."""
    for before, after in itertools.pairwise(drafted):
        if after.al_hi < before.al_lo:
            flag(
                "al_falls_with_depth",
                "warning",
                after.depth_k,
                f"AL falls from {before.al:.3f} to {after.al:.3f} beyond its interval at depth {after.depth_k}",
            )
    if at_choice.reached and at_choice.reached[0]:
        rate = at_choice.kept[0] / at_choice.reached[0]
        if rate == 0.0:
            flag("nothing_accepted", "warning", rate, "no first draft was ever kept: wrong features or vocabulary?")
        if rate == 1.0 and at_choice.reached[0] >= MIN_ROUNDS:
            flag(
                "everything_accepted", "warning", rate, "every first draft was kept: is verification comparing at all?"
            )
    gap = at_choice.al_proxy / at_choice.al_kept - 1.0
    if abs(gap) > MAX_PROXY_GAP:
        flag(
            "proxy_gap",
            "info",
            gap,
            f"the training metric says AL {at_choice.al_proxy:.2f}, replay says {at_choice.al_kept:.2f} "
            f"(depth {at_choice.depth_k}); trust the replay",
        )
