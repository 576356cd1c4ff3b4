"""Opens the target the way plain decoding runs fastest on this machine: the baseline that speculation must beat.

More threads are not always faster for a small model, and the linear kernels that win differ between them. So each
thread count opens its own target (whose kernels are picked at that count), all of them decode the same text in turn,
and the one with the fastest plain step is used for every arm of the measurement. Kernels are picked layer by layer; if
the plain ones together still win, they become a second baseline, the *rival*. A choice that was made before (tuning.py)
is used as it is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from components.bench.clock import threads
from components.bench.tuning import Tuning
from components.contract import Target
from components.decoding.chain import decode
from components.decoding.session import Session
from components.targets.load import open_target
from components.targets.model import AbstractTarget

ROUNDS = 10
TOKENS = 12
WORTH_SWITCHING = 0.03  # below this gain fewer threads stay: an answer that flips from run to run helps nobody
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
    tuning: Tuning | None = None,
    seconds: float = 0.0,
) -> Engine:
    """Open `target` for measuring.

    context:     token ids to decode after while timing.
    max_threads: the step's own limit; it and 1 are tried on a CPU.
    num_threads: 0 tries; another number is used as it is, but at most max_threads.
    tuning:      threads, kernels and rival that were chosen before; nothing is tried then.
    seconds:     that thread counts take turns for, at least; 0 is ROUNDS rounds. With more, the kernels of the chosen
                 count are timed once more, and thoroughly: busy cores slow the others down many times over.
    """
    if tuning is not None:
        return _as_tuned(target, context, tuning, dtype, device)
    if num_threads:
        counts = [min(num_threads, max_threads)]
    elif device == "cpu":
        counts = sorted({1, max_threads})
    else:
        counts = [max_threads]
    candidates = [_open(target, count, dtype, device, "auto") for count in counts]
    rounds = _rounds(candidates, context, seconds if len(counts) > 1 else 0.0)
    tried = [_said(candidate, min(steps)) for candidate, steps in zip(candidates, rounds, strict=True)]
    chosen = candidates[-1 if plainly_faster(rounds[-1], rounds[0]) else 0]
    del candidates  # the others' weights: what follows opens the target once or twice more
    again = device == "cpu" and seconds > 0.0 and chosen.target.kernel != "transformers"
    if again:
        count = chosen.num_threads
        del chosen
        chosen = _open(target, count, dtype, device, "thorough")
    rival = None
    if chosen.target.kernel not in ("plain", "transformers") and device == "cpu":
        plain = _open(target, chosen.num_threads, dtype, device, "plain")
        ours, theirs = (min(steps) for steps in _rounds([chosen, plain], context))
        rival = plain.target if theirs < ours * (1 - WORTH_COMPARING) else None
        tried += [_said(chosen, ours)] if again else []
        tried.append(_said(plain, theirs))
    return Engine(chosen.target, chosen.num_threads, rival, tried)


def _as_tuned(
    target: Target,
    context: Sequence[int],
    tuning: Tuning,
    dtype: Literal["float32", "bfloat16", "auto"],
    device: str,
) -> Engine:
    """Threads, kernels and rival as they were chosen, and how long a plain step takes on them now."""
    kernels = [tuning.kernel, *(["plain"] if tuning.rival else [])]
    opened = [_open(target, tuning.num_threads, dtype, device, kernel) for kernel in kernels]
    rounds = _rounds(opened, context)
    tried = [_said(one, min(steps)) for one, steps in zip(opened, rounds, strict=True)]
    return Engine(opened[0].target, tuning.num_threads, opened[1].target if tuning.rival else None, tried)


def plainly_faster(more: Sequence[float], fewer: Sequence[float]) -> bool:
    """Whether more threads, by the times of their rounds, are worth taking over fewer.

    They have to win by the quickest round, which other work does not reach, and by the median, which shows what other
    work does to them: threads that wait for each other lose most by it. At a tie fewer threads stay.
    """
    return all(of(more) < of(fewer) * (1 - WORTH_SWITCHING) for of in (min, statistics.median))


class _Candidate(NamedTuple):
    target: AbstractTarget
    num_threads: int
    session: Session


def _open(
    target: Target,
    num_threads: int,
    dtype: Literal["float32", "bfloat16", "auto"],
    device: str,
    kernel: str,
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


def _rounds(candidates: list[_Candidate], context: Sequence[int], seconds: float = 0.0) -> list[list[float]]:
    """Nanoseconds a plain token in each of ROUNDS rounds or more, until `seconds` are over, taking turns.

    Other work makes rounds longer, never shorter. By the median alone, a moment of it once made two threads win where
    one is 15 % faster, and by the quickest alone another: the prediction was of an engine that nobody decodes on.
    """
    times: list[list[float]] = [[] for _ in candidates]
    until = time.monotonic() + seconds
    while len(times[-1]) < ROUNDS + 1 or time.monotonic() < until:
        for index, one in enumerate(candidates):
            with threads(one.num_threads):
                run = decode(one.target, None, context, max_new_tokens=TOKENS, ignore_eos=True, session=one.session)
            times[index].append(run.decode_ns / (TOKENS - 1))
    return [one[1:] for one in times]
