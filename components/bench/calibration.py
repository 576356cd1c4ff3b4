"""Opens the target the way plain decoding runs fastest on this machine: the baseline that speculation must beat.

More threads are not always faster for a small model, and the linear kernels that win differ between them. So each
thread count opens its own target (whose kernels are picked at that count), all of them decode the same text in turn,
and the one with the fastest plain step is used for every arm of the measurement. Kernels are picked layer by layer; if
the plain ones together still win, they become a second baseline, the *rival*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from components.bench.clock import threads
from components.contract import Target
from components.decoding.chain import decode
from components.decoding.session import Session
from components.targets.load import open_target
from components.targets.model import AbstractTarget

ROUNDS = 10
TOKENS = 12
WORTH_SWITCHING = 0.03  # below this gain the first candidate stays: an answer that flips from run to run helps nobody
WORTH_COMPARING = 0.01  # a rival faster than this is measured beside the baseline


class Engine(NamedTuple):
    """A target, the threads it runs on, and what was tried: [{"num_threads", "kernel", "plain_step_ms"}]."""

    target: AbstractTarget
    num_threads: int
    rival: AbstractTarget | None  # plain kernels throughout, where plain decoding is faster on them
    tried: list[dict[str, Any]]


def fastest_engine(
    target: Target,
    context: Sequence[int],
    *,
    dtype: Literal["float32", "bfloat16", "auto"],
    device: str,
    max_threads: int,
    num_threads: int = 0,
) -> Engine:
    """Open `target` for measuring.

    context:     token ids to decode after while timing.
    max_threads: the step's own limit; it and 1 are tried on a CPU.
    num_threads: 0 tries; another number is used as it is, but at most max_threads.
    """
    if num_threads:
        counts = [min(num_threads, max_threads)]
    elif device == "cpu":
        counts = sorted({1, max_threads}, reverse=True)
    else:
        counts = [max_threads]
    candidates = [_open(target, count, dtype, device, "auto") for count in counts]
    times = _step_times(candidates, context)
    best = 0
    for index, step in enumerate(times):
        if step < times[best] * (1 - WORTH_SWITCHING):
            best = index
    tried = [_said(candidate, step) for candidate, step in zip(candidates, times, strict=True)]
    chosen = candidates[best]
    rival = None
    if chosen.target.kernel not in ("plain", "transformers") and device == "cpu":
        plain = _open(target, chosen.num_threads, dtype, device, "plain")
        ours, theirs = _step_times([chosen, plain], context)
        rival = plain.target if theirs < ours * (1 - WORTH_COMPARING) else None
        tried.append(_said(plain, theirs))
    return Engine(chosen.target, chosen.num_threads, rival, tried)


class _Candidate(NamedTuple):
    target: AbstractTarget
    num_threads: int
    session: Session


def _open(
    target: Target,
    num_threads: int,
    dtype: Literal["float32", "bfloat16", "auto"],
    device: str,
    kernel: Literal["auto", "plain"],
) -> _Candidate:
    with threads(num_threads):
        opened = open_target(target, device=device, dtype=dtype, kernel=kernel)
    return _Candidate(opened, num_threads, Session(opened))


def _said(candidate: _Candidate, step_ns: float) -> dict[str, Any]:
    return {
        "num_threads": candidate.num_threads,
        "kernel": candidate.target.kernel,
        "plain_step_ms": round(step_ns / 1e6, 4),
    }


def _step_times(candidates: list[_Candidate], context: Sequence[int]) -> list[float]:
    """Nanoseconds a plain token in the quickest of a few rounds, the candidates taking turns.

    Other work makes rounds longer, never shorter. By the median, a moment of it once made two threads win where one is
    15 % faster, and the prediction was of an engine that nobody decodes on.
    """
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(ROUNDS + 1):
        for index, one in enumerate(candidates):
            with threads(one.num_threads):
                run = decode(one.target, None, context, max_new_tokens=TOKENS, ignore_eos=True, session=one.session)
            times[index].append(run.decode_ns / (TOKENS - 1))
    return [min(one[1:]) for one in times]
