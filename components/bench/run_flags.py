"""Reasons to doubt an end-to-end comparison that only the runs themselves show.

What the numbers of a finished comparison say (divergences, too few rounds, prediction gaps) is flagged where they are
judged, in `speedup`; here stands what would be lost with the runs: order, drift, overshoot, the text.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from components.bench.acceptance_map import repeated_bigrams
from components.bench.timed_runs import TimedRun
from components.rows import UNTRAINED, QualityFlag

MAX_DRIFT = 0.05
LOAD_OF_OTHERS = 1.0  # load average beyond the cores that our own threads may fill
MAX_OVERSHOOT_SHARE = 0.05
MAX_REPEATED_BIGRAMS = 0.4


def run_flags(runs: Sequence[TimedRun], session_id: str, load: float | None, num_cores: int) -> list[QualityFlag]:
    """Flags of one session; thresholds above."""
    timed = [run for run in runs if not run.is_warmup]
    plain = [run for run in timed if run.arm.is_baseline]
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        flags.append(QualityFlag(session_id, "", "none", code, severity, value, detail))

    if load is not None and load > num_cores + LOAD_OF_OTHERS:
        flag("loaded_machine", "warning", load, f"load average on {num_cores} cores: other work ran meanwhile")
    drift = plain_drift(plain)
    if drift is not None and abs(drift) > MAX_DRIFT:
        flag("plain_drift", "warning", drift, "plain decoding of the same prompts changed speed between repetitions")
    repeated = statistics.fmean(repeated_bigrams(run.decoded.tokens) for run in plain)
    if repeated > MAX_REPEATED_BIGRAMS:
        flag("looping_output", "warning", repeated, "share of repeated bigrams; loops flatter every way of drafting")
    return flags + _arm_flags(timed, session_id)


def plain_drift(plain: Sequence[TimedRun]) -> float | None:
    """Time of the last repetition over the first, minus 1, on the same prompts; None with one repetition."""
    by_rep: dict[int, int] = {}
    for run in plain:
        by_rep[run.rep] = by_rep.get(run.rep, 0) + run.decoded.decode_ns
    reps = sorted(by_rep)
    return None if len(reps) < 2 else by_rep[reps[-1]] / by_rep[reps[0]] - 1.0


def _arm_flags(timed: Sequence[TimedRun], session_id: str) -> list[QualityFlag]:
    """Overshoot and depth beyond training, arm by arm."""
    flags = []
    for arm in dict.fromkeys(run.arm for run in timed):
        mine = [run for run in timed if run.arm == arm]
        raw = sum(len(run.decoded.tokens_raw) for run in mine)
        share = sum(run.decoded.overshoot for run in mine) / raw
        if share > MAX_OVERSHOOT_SHARE:
            detail = f"{arm.label}: share of tokens computed past the end and thrown away; longer answers waste less"
            flags.append(QualityFlag(session_id, arm.draft_key, arm.method, "overshoot", "info", share, detail))
        trained = arm.depth if arm.method in UNTRAINED else getattr(arm.proposer, "num_steps", arm.depth)
        if arm.depth > trained:
            detail = f"{arm.label}: the drafter is trained for depth {trained}"
            flags.append(
                QualityFlag(session_id, arm.draft_key, arm.method, "beyond_trained_depth", "warning", arm.depth, detail)
            )
    return flags
