"""Quality flags of an end-to-end comparison that need the runs themselves: load, drift, overshoot, looping text.

Flags that follow from the rows (divergences, too few rounds, prediction gaps) are raised in `speedup`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from components.bench.acceptance_map import repeated_bigrams
from components.bench.timed_runs import TimedRun
from components.rows import UNTRAINED, QualityFlag

MAX_DIFFERENCE = 0.10  # of plain decoding between two processes
MAX_DISTURBED = 0.15  # share of plain decoding's time that other work added
LOAD_OF_OTHERS = 1.0  # load average above the number of cores, which our own threads may fill
MAX_OVERSHOOT_SHARE = 0.05
MAX_REPEATED_BIGRAMS = 0.4


def run_flags(
    runs: Sequence[TimedRun],
    session_id: str,
    load: float | None,
    num_cores: int,
    trained_depths: Mapping[str, int],
) -> list[QualityFlag]:
    """The flags of one session. trained_depths: draft_key -> depth that the drafter is trained for."""
    plain = [run for run in runs if run.arm.is_baseline]
    flags: list[QualityFlag] = []

    def flag(code: str, severity: str, value: float, detail: str) -> None:
        flags.append(QualityFlag(session_id, "", "none", code, severity, value, detail))

    if load is not None and load > num_cores + LOAD_OF_OTHERS:
        flag("loaded_machine", "warning", load, f"load average on {num_cores} cores: other work ran meanwhile")
    difference = difference_of_processes(plain)
    if difference is not None and difference > MAX_DIFFERENCE:
        flag("processes_differ", "info", difference, "plain decoding is faster in one process than in another")
    disturbed = disturbed_share(plain)
    if disturbed > MAX_DISTURBED:
        flag("disturbed", "info", disturbed, "share of plain decoding's time that other work on the machine added")
    repeated = statistics.fmean(repeated_bigrams(run.decoded.tokens) for run in plain)
    if repeated > MAX_REPEATED_BIGRAMS:
        flag("looping_output", "warning", repeated, "share of repeated bigrams; loops flatter every way of drafting")
    return flags + _arm_flags(runs, session_id, trained_depths)


def difference_of_processes(plain: Sequence[TimedRun]) -> float | None:
    """Steady time a token of the slowest process over the quickest, minus 1; None with one process."""
    times: dict[int, list[float]] = {}
    for run in plain:
        if run.batch_size == min(other.batch_size for other in plain):
            total = times.setdefault(run.process, [0.0, 0.0])
            total[0] += run.steady_ns
            total[1] += len(run.decoded.tokens) - 1
    speeds = [ns / tokens for ns, tokens in times.values() if tokens]
    return None if len(speeds) < 2 else max(speeds) / min(speeds) - 1.0


def disturbed_share(plain: Sequence[TimedRun]) -> float:
    """1 - steady time / elapsed time of plain decoding: the share that other work added."""
    return 1.0 - sum(run.steady_ns for run in plain) / max(1, sum(run.decoded.decode_ns for run in plain))


def _arm_flags(runs: Sequence[TimedRun], session_id: str, trained_depths: Mapping[str, int]) -> list[QualityFlag]:
    """Overshoot and depth beyond training, arm by arm."""
    flags = []
    for arm in dict.fromkeys(run.arm for run in runs):
        arm_runs = [run for run in runs if run.arm == arm]
        raw = sum(len(run.decoded.tokens_raw) for run in arm_runs)
        share = sum(run.decoded.overshoot for run in arm_runs) / raw
        if share > MAX_OVERSHOOT_SHARE:
            detail = f"{arm.label}: share of tokens computed past the end and thrown away; longer answers waste less"
            flags.append(QualityFlag(session_id, arm.draft_key, arm.method, "overshoot", "info", share, detail))
        trained = arm.depth if arm.method in UNTRAINED else trained_depths.get(arm.draft_key, arm.depth)
        if arm.depth > trained:
            detail = f"{arm.label}: the drafter is trained for depth {trained}"
            flags.append(
                QualityFlag(session_id, arm.draft_key, arm.method, "beyond_trained_depth", "warning", arm.depth, detail)
            )
    return flags
