"""Turns timed generations into rows and flags; each output is compared with plain decoding of its prompt and batch.

Quality flags here are those that need the runs themselves: load, drift, overshoot, looping text. Flags that follow from
the rows (divergences, too few rounds, prediction gaps) are raised in `speedup`.
"""

from __future__ import annotations

import array
import hashlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.bench.acceptance import repeated_bigrams
from components.bench.end_to_end.identity import NOT_COMPARED, Identity, IdentityChecker, PlainText
from components.bench.end_to_end.timed_runs import TimedRun
from components.bench.settings import Dtype
from components.methods import is_trained
from components.rows import QualityFlag, Request, Round
from components.targets.interface import AbstractTarget

MAX_DIFFERENCE = 0.10  # of plain decoding between two processes
MAX_DISTURBED = 0.15  # share of plain decoding's time that other work added
LOAD_OF_OTHERS = 1.0  # load average above the number of cores, which our own threads may fill
MAX_OVERSHOOT_SHARE = 0.05
MAX_REPEATED_BIGRAMS = 0.4


@dataclass(frozen=True)
class Conditions:
    """Columns that all requests of one session share."""

    session_id: str
    target_key: str
    dtype: Dtype
    num_threads: int


def request_rows(runs: Sequence[TimedRun], target: AbstractTarget, shared: Conditions) -> list[Request]:
    """One row a run. Every arm is compared with the first plain run of the same prompt at its batch size."""
    plain: dict[tuple[str, int], list[int]] = {}
    for run in runs:
        if run.arm.is_baseline:
            plain.setdefault((run.prompt.prompt_id, run.batch_size), run.decoded.tokens)
    checker = IdentityChecker(target)
    rows = []
    for run in runs:
        identity, plain_text = NOT_COMPARED, None
        if not run.arm.is_baseline:
            expected = plain[run.prompt.prompt_id, run.batch_size]
            plain_text = checker.check_plain(run.prompt.ids, expected)
            identity = checker.compare(run.prompt.ids, expected, run.decoded.tokens, run.arm.rows_of_pass)
        rows.append(_request(run, identity, plain_text, shared))
    return rows


def round_rows(runs: Sequence[TimedRun], shared: Conditions) -> list[Round]:
    """The rounds of speculative runs; plain decoding has one token a round and gets no rows."""
    return [
        Round(_request_id(run, shared), number, *facts)
        for run in runs
        if run.arm.depth > 0
        for number, facts in enumerate(run.decoded.rounds)
    ]


def _request(run: TimedRun, identity: Identity, plain: PlainText | None, shared: Conditions) -> Request:
    decoded = run.decoded
    return Request(
        session_id=shared.session_id,
        request_id=_request_id(run, shared),
        target_key=shared.target_key,
        draft_key=run.arm.draft_key,
        method=run.arm.method,
        depth_k=run.arm.depth,
        prompt_id=run.prompt.prompt_id,
        workload=run.prompt.workload,
        batch_size=run.batch_size,
        rep=run.rep,
        order_index=run.order_index,
        is_warmup=False,
        status=decoded.status,
        prompt_tokens=decoded.prompt_tokens,
        tokens_kept=len(decoded.tokens),
        tokens_raw=len(decoded.tokens_raw),
        num_rounds=len(decoded.rounds),
        num_drafted=sum(r.drafted for r in decoded.rounds),
        num_accepted=sum(r.accepted for r in decoded.rounds),
        ttft_ns=decoded.ttft_ns,
        decode_ns=round(run.steady_ns),
        output_sha256=sha256_of_tokens(decoded.tokens),
        identical=identity.identical,
        first_divergence=identity.first_divergence,
        tie=identity.tie,
        dtype=shared.dtype,
        kernel=run.kernel,
        num_threads=shared.num_threads,
        temperature=0.0,
        tree_budget=run.arm.tree_budget,
        batch_id=None if run.batch_id is None else f"{shared.session_id}-batch-{run.batch_id:06d}",
        process=run.process,
        elapsed_ns=decoded.decode_ns,
        first_wrong=identity.first_wrong,
        divergence_shortfall=identity.shortfall,
        divergence_noise=identity.noise,
        tie_chance=None if plain is None else plain.tie_chance,
        rounded_tokens=identity.num_rounded,
        rounded_expected=identity.rounded_expected,
    )


def rounded(value: float | None, digits: int) -> float | None:
    """The value rounded to `digits` decimals; None stays None."""
    return None if value is None else round(value, digits)


def sha256_of_tokens(tokens: Sequence[int]) -> str:
    """A digest of token ids as little-endian int64."""
    numbers = array.array("q", tokens)
    if array.array("H", [1]).tobytes()[0] == 0:
        numbers.byteswap()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _request_id(run: TimedRun, shared: Conditions) -> str:
    return f"{shared.session_id}-{run.order_index:06d}"


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
        trained = trained_depths.get(arm.draft_key, arm.depth) if is_trained(arm.method) else arm.depth
        if arm.depth > trained:
            detail = f"{arm.label}: the drafter is trained for depth {trained}"
            flags.append(
                QualityFlag(session_id, arm.draft_key, arm.method, "beyond_trained_depth", "warning", arm.depth, detail)
            )
    return flags
