"""Runs every arm on every prompt, interleaved, and turns each generation into rows.

Within a repetition prompts come one after the other; within a prompt the arms take turns in random order, so that drift
of the machine meets all arms alike. Every arm starts a prompt from an empty cache and a new drafter state.
"""

from __future__ import annotations

import array
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from components.bench.arms import Arm
from components.bench.identity import Identity, compare
from components.bench.subjects import EncodedPrompt
from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.rows import Request, Round
from components.targets.model import AbstractTarget


@dataclass(frozen=True)
class TimedRun:
    """One generation of one arm, and when it ran."""

    arm: Arm
    prompt: EncodedPrompt
    rep: int
    order_index: int
    is_warmup: bool
    decoded: Decoded


@dataclass(frozen=True)
class Conditions:
    """What all requests of one session share."""

    session_id: str
    target_key: str
    dtype: str
    num_threads: int


def run_arms(
    target: AbstractTarget,
    arms: Sequence[Arm],
    warm_up: Sequence[EncodedPrompt],
    prompts: Sequence[EncodedPrompt],
    *,
    max_new_tokens: int,
    reps: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[TimedRun]:
    """All timed runs, in the order in which they ran; warm-up first."""
    order = random.Random(seed)
    capacity = _longest(warm_up, prompts) + max_new_tokens + max(arm.depth for arm in arms) + 1
    sessions = {id(one): Session(one, capacity) for one in (target, *(arm.target for arm in arms if arm.target))}
    plan: list[tuple[int, bool, EncodedPrompt, Arm]] = []
    for rep, is_warmup, asked in ((0, True, warm_up), *((rep, False, prompts) for rep in range(reps))):
        for prompt in asked:
            turns = list(arms)
            order.shuffle(turns)
            plan += [(rep, is_warmup, prompt, arm) for arm in turns]
    runs = []
    for index, (rep, is_warmup, prompt, arm) in enumerate(plan):
        mine = arm.target or target
        decoded = decode(
            mine,
            arm.proposer,
            prompt.ids,
            max_new_tokens=max_new_tokens,
            depth=arm.depth,
            session=sessions[id(mine)],
        )
        runs.append(TimedRun(arm, prompt, rep, index, is_warmup, decoded))
        progress(index + 1, len(plan))
    return runs


def request_rows(runs: Sequence[TimedRun], target: AbstractTarget, noise: float, shared: Conditions) -> list[Request]:
    """One row a run. Every arm is compared with the first plain run of the same prompt."""
    plain: dict[tuple[str, bool], list[int]] = {}
    for run in runs:
        if run.arm.is_baseline:
            plain.setdefault((run.prompt.prompt_id, run.is_warmup), run.decoded.tokens)
    session = Session(target)
    judged: dict[tuple[str, tuple[int, ...]], Identity] = {}
    rows = []
    for run in runs:
        verdict = Identity(None, None, None, None)
        if not run.arm.is_baseline:
            expected = plain[run.prompt.prompt_id, run.is_warmup]
            key = (run.prompt.prompt_id, tuple(run.decoded.tokens))
            if key not in judged:
                judged[key] = compare(target, session, run.prompt.ids, run.decoded.tokens, expected, noise)
            verdict = judged[key]
        rows.append(_request(run, verdict, target, shared))
    return rows


def round_rows(runs: Sequence[TimedRun], shared: Conditions) -> list[Round]:
    """The rounds of speculative runs; plain decoding has one token a round and needs no rows to say so."""
    return [
        Round(_request_id(run, shared), number, *facts)
        for run in runs
        if run.arm.depth > 0 and not run.is_warmup
        for number, facts in enumerate(run.decoded.rounds)
    ]


def _request(run: TimedRun, verdict: Identity, target: AbstractTarget, shared: Conditions) -> Request:
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
        batch_size=1,
        rep=run.rep,
        order_index=run.order_index,
        is_warmup=run.is_warmup,
        status=decoded.status,
        prompt_tokens=decoded.prompt_tokens,
        tokens_kept=len(decoded.tokens),
        tokens_raw=len(decoded.tokens_raw),
        num_rounds=len(decoded.rounds),
        num_drafted=sum(r.drafted for r in decoded.rounds),
        num_accepted=sum(r.accepted for r in decoded.rounds),
        ttft_ns=decoded.ttft_ns,
        decode_ns=decoded.decode_ns,
        output_sha256=sha256_of_tokens(decoded.tokens),
        identical=verdict.identical,
        first_divergence=verdict.first_divergence,
        divergence_margin=verdict.margin,
        tie=verdict.tie,
        dtype=shared.dtype,
        kernel=(run.arm.target or target).kernel,
        num_threads=shared.num_threads,
        temperature=0.0,
    )


def sha256_of_tokens(tokens: Sequence[int]) -> str:
    """A digest of token ids as little-endian int64."""
    numbers = array.array("q", tokens)
    if array.array("H", [1]).tobytes()[0] == 0:
        numbers.byteswap()
    return hashlib.sha256(numbers.tobytes()).hexdigest()


def _request_id(run: TimedRun, shared: Conditions) -> str:
    return f"{shared.session_id}-{run.order_index:06d}"


def _longest(*groups: Sequence[EncodedPrompt]) -> int:
    return max(len(prompt.ids) for group in groups for prompt in group)
