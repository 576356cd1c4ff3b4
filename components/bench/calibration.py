"""Chooses the threads and kernels on which plain decoding runs fastest: the baseline that speculation must beat.

More threads are not always faster for a small model, and the linear kernels that win differ between them. So each
thread count opens its own target (whose kernels are picked at that count), both decode the same text in turn, and the
one with the fastest plain step is used for every arm of the measurement. A target too large to be held several times
over is opened once, on plain kernels, for that question. Kernels are then picked layer by layer; if the plain ones
together still win, they become a second baseline, the *rival*. Drafters are laid out last, on the threads chosen.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from components.bench.clock import threads
from components.bench.subjects import open_drafter
from components.bench.tuning import Tuning
from components.contract import Draft, Target
from components.decoding.chain import decode
from components.decoding.session import Session
from components.targets.load import open_target, target_facts
from components.targets.model import AbstractTarget

ROUNDS = 10
TOKENS = 12
SLOW_TOKENS = 3  # of a target whose plain step takes longer than SLOW_STEP_NS
SLOW_STEP_NS = 30_000_000
WORTH_SWITCHING = 0.03  # below this gain fewer threads stay: an answer that flips from run to run helps nobody
WORTH_COMPARING = 0.01  # a rival faster than this is measured beside the baseline
HELD_TWICE = 200_000_000  # parameters; above it, a target is not opened once for every thread count

Dtype = Literal["float32", "bfloat16", "auto"]


def choose_engine(
    target: Target,
    drafts: Sequence[Draft],
    context: Sequence[int],
    *,
    dtype: Dtype,
    device: str,
    max_threads: int,
    num_threads: int = 0,
    seconds: float = 0.0,
) -> Tuning:
    """Time plain decoding on the thread counts worth trying, and lay out target and drafters at the best.

    context:     token ids to decode after while timing.
    max_threads: the step's own limit; it and 1 are tried on a CPU.
    num_threads: 0 tries; another number is used as it is, but at most max_threads.
    seconds:     that thread counts take turns for, at least; 0 is ROUNDS rounds. With more, the kernels of the chosen
                 count are timed thoroughly: busy cores slow the others down many times over.
    """
    if num_threads:
        counts = [min(num_threads, max_threads)]
    elif device == "cpu":
        counts = sorted({1, max_threads})
    else:
        counts = [max_threads]
    count = counts[0]
    tried: list[dict[str, Any]] = []
    if len(counts) > 1:
        count, tried = _best_count(target, context, counts, dtype, device, seconds)
    opened = _open(target, count, dtype, device, "thorough" if seconds > 0.0 and device == "cpu" else "auto")
    with threads(count):
        kernels = {draft.key: open_drafter(draft, opened.target, "thorough").kernel for draft in drafts}
    rival = False
    if opened.target.kernel not in ("plain", "transformers") and device == "cpu":
        plain = _open(target, count, dtype, device, "plain")
        ours, theirs = (min(steps) for steps in _rounds([opened, plain], context))
        rival = theirs < ours * (1 - WORTH_COMPARING)
        tried += [_said(opened, ours), _said(plain, theirs)]
    elif not tried:
        tried = [_said(opened, min(_rounds([opened], context)[0]))]
    return Tuning(count, opened.target.kernel, rival, kernels, tried)


def _best_count(
    target: Target, context: Sequence[int], counts: list[int], dtype: Dtype, device: str, seconds: float
) -> tuple[int, list[dict[str, Any]]]:
    """The thread count whose plain step is quickest, and what was tried. Fewer threads stay at a tie."""
    if target_facts(target)["num_params"] > HELD_TWICE:
        once = _open(target, counts[-1], dtype, device, "plain")
        candidates = [once._replace(num_threads=count) for count in counts]
    else:
        candidates = [_open(target, count, dtype, device, "auto") for count in counts]
    rounds = _rounds(candidates, context, seconds)
    tried = [_said(candidate, min(steps)) for candidate, steps in zip(candidates, rounds, strict=True)]
    return counts[-1 if plainly_faster(rounds[-1], rounds[0]) else 0], tried


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


def _open(target: Target, num_threads: int, dtype: Dtype, device: str, kernel: str) -> _Candidate:
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

    A first round warms up; where it was slow, rounds are short ones. Other work makes rounds longer, never shorter. By
    the median alone, a moment of it once made two threads win where one is 15 % faster, and by the quickest alone
    another: the prediction was of an engine that nobody decodes on.
    """
    times: list[list[float]] = [[] for _ in candidates]
    until, tokens = time.monotonic() + seconds, SLOW_TOKENS
    while len(times[-1]) < ROUNDS + 1 or time.monotonic() < until:
        for index, one in enumerate(candidates):
            with threads(one.num_threads):
                run = decode(one.target, None, context, max_new_tokens=tokens, ignore_eos=True, session=one.session)
            times[index].append(run.decode_ns / (tokens - 1))
        if len(times[-1]) == 1:
            tokens = SLOW_TOKENS if min(one[0] for one in times) > SLOW_STEP_NS else TOKENS
    return [one[1:] for one in times]
