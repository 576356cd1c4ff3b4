"""Turns timed generations into rows; each output is compared with plain decoding of its prompt and batch size."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from components.bench.identity import NOT_COMPARED, Identity, IdentityChecker, PlainText
from components.bench.timed_runs import TimedRun
from components.rows import Request, Round
from components.targets.model import AbstractTarget


@dataclass(frozen=True)
class Conditions:
    """Columns that all requests of one session share."""

    session_id: str
    target_key: str
    dtype: str
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
