"""The rule of promotion: what is asked of a challenger beside the champion, on the numbers of the one comparison.

The challenger need not be shown to be faster; it must be shown not to be slower (by more than `margins.speed`), and not
to be accepted less over all prompts (`margins.acceptance`) nor in any workload (twice that). That a loss was not shown
is no evidence, so that acceptance is asked as speed is: with few prompts an equal challenger may fail for want of
evidence, and more prompts are the remedy. Its text must be that of plain decoding, its weights may not grow beyond
measure. Registry and confirm_depth ask the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from components.promotion import Check, Evidence, Margins
from components.speedup.bootstrap import LEAST_PROMPTS
from components.speedup.pairing import Comparison, compare_ways, identity_of
from components.speedup.policy import ALL


class Compared(Protocol):
    """What the rule needs of a comparison: paired.Ratio, or the row of one (PairedComparison)."""

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
    """What the gate lets through. max_growth: share of the champion's bytes that the weights may grow by."""

    margins: Margins = field(default_factory=Margins)
    max_growth: float = 0.5


def is_kept(found: Compared) -> tuple[bool, str]:
    """Whether a speed or an acceptance length is shown to be not worse, and what was asked, in words.

    Fewer than LEAST_PROMPTS prompts show nothing: then nothing is asked of one workload, but all of them together must
    show it.
    """
    asked = f"lower bound >= {1.0 - found.margin:g}"
    if found.num_prompts >= LEAST_PROMPTS:
        return found.verdict in ("better", "not_worse"), asked
    if found.workload == ALL:
        return False, f"{asked} of {LEAST_PROMPTS} prompts"
    return True, f"not asked of {found.num_prompts} prompts"


def judge(evidence: Evidence, limits: Limits | None = None) -> list[Check]:
    """Every check of the promotion gate against the champion."""
    limits = limits or Limits()
    ways = evidence.challenger, evidence.champion
    found = compare_ways(evidence.measured, *ways, limits.margins, same_target=evidence.same_target)
    return [*_speed(found), _identity(evidence, found), *_acceptance(evidence, found), _size(evidence, limits)]


def _speed(found: Comparison) -> list[Check]:
    speed = next(iter(found.of("decode_speed", "speedup")), None)
    where = "no such runs"
    if found.timed is not None:
        here, there = found.timed
        where = "both in one run" if here.measurement == there.measurement else "each in its own run"
    num = speed.num_prompts if speed is not None else 0
    asked = f">= {LEAST_PROMPTS} prompts on one machine, {where}"
    both = Check("prompts_measured_for_both", num >= LEAST_PROMPTS, float(num), None, None, asked)
    if speed is None:
        why = next((note for note in found.notes if note.startswith("speed not")), "")
        return [both, Check("speed_against_champion", False, None, None, None, why)]
    passed, asked = is_kept(speed)
    return [both, Check("speed_against_champion", passed, speed.ratio, speed.lo, speed.hi, asked)]


def _identity(evidence: Evidence, found: Comparison) -> Check:
    """In the measurement that speaks for it: what an older one found, a newer one may have mended."""
    compared, differ = (0, 0)
    if found.timed is not None:
        compared, differ = identity_of(evidence.measured, evidence.challenger, found.timed[0])
    asked = f"0 of {compared} outputs differ outside ties"
    return Check("identical_output", compared > 0 and differ == 0, float(differ), None, None, asked)


def _acceptance(evidence: Evidence, found: Comparison) -> list[Check]:
    """Nothing is asked where the champion or the challenger decodes plainly."""
    if evidence.challenger.is_plain or evidence.champion.is_plain:
        return []
    ratios = found.of("acceptance_length")
    if not ratios or found.depths is None:
        why = next((note for note in found.notes if note.startswith("acceptance length not")), "")
        return [Check(f"acceptance[{ALL}]", False, None, None, None, why)]
    checks = []
    for ratio in ratios:
        passed, asked = is_kept(ratio)
        at = f", at depth {found.depths[0]}" if ratio.num_prompts >= LEAST_PROMPTS else ""
        checks.append(Check(f"acceptance[{ratio.workload}]", passed, ratio.ratio, ratio.lo, ratio.hi, asked + at))
    return checks


def _size(evidence: Evidence, limits: Limits) -> Check:
    new, old = evidence.challenger_bytes, evidence.champion_bytes
    if new is None or not old:
        return Check("size", True, None, None, None, "sizes are not known")
    most = 1.0 + limits.max_growth
    return Check("size", new <= old * most, new / old, None, None, f"<= {most:.2f}")
