"""The rule of promotion: conditions on a challenger, checked on its comparison with the champion.

The challenger need not be shown to be faster; it must be shown not to be slower (by more than `margins.speed`), and its
drafts not to be accepted less over all prompts (`margins.acceptance`) nor in any workload (twice that). A loss that was
not shown is no evidence of equality: with few prompts an equal challenger may fail, and more prompts are the remedy.
Its text must be that of plain decoding, and its weights may not grow beyond a limit. The registry and confirm_depth use
the same conditions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from components.promotion import Check, Evidence, Margins
from components.rows import ALL
from components.speedup.bootstrap import PROMPTS
from components.speedup.pairing import Comparison, compare_ways, identity_of


class PairedRatio(Protocol):
    """The columns of a comparison that the rule needs: paired.Ratio has them, and PairedComparison."""

    @property
    def workload(self) -> str: ...
    @property
    def margin(self) -> float: ...
    @property
    def num_prompts(self) -> int: ...
    @property
    def verdict(self) -> str: ...


@dataclass(frozen=True)
class Limits:
    """Limits of the gate. max_growth: allowed growth of the weights, a share of the champion's bytes."""

    margins: Margins = field(default_factory=Margins)
    max_growth: float = 0.5


def is_kept(ratio: PairedRatio) -> tuple[bool, str]:
    """(whether a speed or an acceptance length is shown to be not worse, the limit as text).

    Fewer than PROMPTS.decide prompts show nothing: one workload then passes, all workloads together do not.
    """
    limit = f"lower bound >= {1.0 - ratio.margin:g}"
    if ratio.num_prompts >= PROMPTS.decide:
        return ratio.verdict in ("better", "not_worse"), limit
    if ratio.workload == ALL:
        return False, f"{limit} of {PROMPTS.decide} prompts"
    return True, f"not asked of {ratio.num_prompts} prompts"


def judge(evidence: Evidence, limits: Limits | None = None) -> list[Check]:
    """Every check of the promotion gate against the champion."""
    limits = limits or Limits()
    ways = evidence.challenger, evidence.champion
    comparison = compare_ways(evidence.measured, *ways, limits.margins, same_target=evidence.same_target)
    return [
        *_speed_checks(comparison),
        _identity_check(evidence, comparison),
        *_acceptance_checks(evidence, comparison),
        _size_check(evidence, limits),
    ]


def _speed_checks(comparison: Comparison) -> list[Check]:
    speed = next(iter(comparison.of("decode_speed", "speedup")), None)
    runs = "no such runs"
    if comparison.timed_in is not None:
        context_a, context_b = comparison.timed_in
        runs = "both in one run" if context_a.measurement == context_b.measurement else "each in its own run"
    num = speed.num_prompts if speed is not None else 0
    limit = f">= {PROMPTS.decide} prompts on one machine, {runs}"
    both = Check("prompts_measured_for_both", num >= PROMPTS.decide, float(num), None, None, limit)
    if speed is None:
        reason = next((note for note in comparison.notes if note.startswith("speed not")), "")
        return [both, Check("speed_against_champion", False, None, None, None, reason)]
    passed, limit = is_kept(speed)
    return [both, Check("speed_against_champion", passed, speed.ratio, speed.lo, speed.hi, limit)]


def _identity_check(evidence: Evidence, comparison: Comparison) -> Check:
    """Identity in the measurement of speed; differences in older measurements may have been repaired since."""
    compared, differ = (0, 0)
    if comparison.timed_in is not None:
        compared, differ = identity_of(evidence.measured, evidence.challenger, comparison.timed_in[0])
    limit = f"0 of {compared} outputs differ outside ties"
    return Check("identical_output", compared > 0 and differ == 0, float(differ), None, None, limit)


def _acceptance_checks(evidence: Evidence, comparison: Comparison) -> list[Check]:
    """Checks of acceptance; none where the champion or the challenger decodes plainly."""
    if evidence.challenger.is_plain or evidence.champion.is_plain:
        return []
    ratios = comparison.of("acceptance_length")
    if not ratios or comparison.depths is None:
        reason = next((note for note in comparison.notes if note.startswith("acceptance length not")), "")
        return [Check(f"acceptance[{ALL}]", False, None, None, None, reason)]
    checks = []
    for ratio in ratios:
        passed, limit = is_kept(ratio)
        at = f", at depth {comparison.depths[0]}" if ratio.num_prompts >= PROMPTS.decide else ""
        checks.append(Check(f"acceptance[{ratio.workload}]", passed, ratio.ratio, ratio.lo, ratio.hi, limit + at))
    return checks


def _size_check(evidence: Evidence, limits: Limits) -> Check:
    new, old = evidence.challenger_bytes, evidence.champion_bytes
    if new is None or not old:
        return Check("size", True, None, None, None, "sizes are not known")
    most = 1.0 + limits.max_growth
    return Check("size", new <= old * most, new / old, None, None, f"<= {most:.2f}")
