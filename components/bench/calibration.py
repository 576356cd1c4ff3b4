"""Step `bench.autotune`: chooses the threads and kernels on which plain decoding runs fastest.

That is the baseline which speculation must beat. More threads are not always faster for a small model, and the best
linear kernels depend on the thread count. So each thread count opens its own target (whose kernels are picked at that
count), all decode the same text in turn, and the one with the fastest plain step is used for every arm of the
measurement. Kernels are then picked layer by layer; if the plain ones together still win, they become a second
baseline, the *rival*. Drafters get their kernels last, on those threads.

Of a target above HELD_TWICE bytes there is one at a time: thread counts are compared on one kernel for all layers,
`streamed` where there is one, since PyTorch's plain product of one row hardly gains by a second thread. Then the picked
kernels are timed, then the plain ones, and where these clearly win they are the choice and there is no rival.

The choice is itself a measurement: processes that choose for themselves seldom take the same kernels, and in a noisy
moment other threads, so that predictions would be of another engine than the one that decodes. Measuring steps take the
step's choice as their input `tuning`; without it they choose for themselves, in less time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import torch

from components.bench import clock
from components.bench.clock import quiet_interpreter, threads
from components.bench.prompts import fitting_prompts, open_drafter
from components.bench.settings import Dtype
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.storage.files import read_record
from components.machine import free_ram, give_memory_back
from components.targets.forward.compiled import compiled_functions
from components.targets.forward.linear import HELD_ONCE, HELD_TWICE, can_convolve
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, target_facts
from components.text import kernel_in_words

ROUNDS = 10
TOKENS = 12
SLOW_TOKENS = 3  # of a target whose plain step takes longer than SLOW_STEP_NS
SLOW_STEP_NS = 30_000_000
WORTH_SWITCHING = 0.03  # below this gain fewer threads are used: the choice must not flip from run to run
PEAK_OF_ONE, PEAK_OF_TWO, PEAK_OF_BOTH = 1.1, 2.0, 6  # times its weights: in one layout, in two, two targets at once
TIMED_BYTES = 100_000_000  # of timed weights in all layouts, beside a drafter or a target held several times
CONVOLVED_BYTES = 300_000_000  # more where layers may be convolved: oneDNN's workspace
OTHER_BYTES = 50_000_000  # caches of the trials, pages of the file
WORTH_COMPARING = 0.01  # a rival faster than this is measured beside the baseline


def autotune(
    target: Target,
    prompts: Prompts,
    drafts: list[Draft] | None,
    *,
    dtype: Dtype,
    seconds: float,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.autotune`; its settings are explained in components/bench/steps.py."""
    context = fitting_prompts(target, prompts, "test", TOKENS, ctx)[0].ids
    if ctx.device == "cpu":
        ctx.note(check_memory(target, drafts or [], dtype))
    with quiet_interpreter():
        tuned = choose_engine(
            target,
            drafts or [],
            context,
            dtype=dtype,
            device=ctx.device,
            max_threads=ctx.num_threads,
            seconds=seconds,
            timed=not ctx.rehearsed,
        )
    threads_in_words = "1 thread" if tuned.num_threads == 1 else f"{tuned.num_threads} threads"
    ctx.note(f"{threads_in_words}, {kernel_in_words(tuned.kernel)}")
    return Measurements.of_step(
        ctx,
        {
            "target_key": target.key,
            "dtype": dtype,
            "device": ctx.device,
            "machine_id": machine.machine_id,
            "num_threads": tuned.num_threads,
            "kernel": tuned.kernel,
            "rival": tuned.rival,
            "draft_kernels": dict(tuned.draft_kernels),
            "engines_tried": tuned.tried,
            **clock.conditions(torch.device(ctx.device)),
        },
    )


class Trial(TypedDict):
    """The time of a plain step on one number of threads with its kernels."""

    num_threads: int
    kernel: str
    plain_step_ms: float


class Tuning(NamedTuple):
    """The chosen threads and kernels.

    num_threads: of torch. kernel: the `kernel` of an opened target; see targets/load.py. rival: whether the plain
    kernels are a second baseline. draft_kernels: draft_key -> the `kernel` of an opened drafter.
    """

    num_threads: int
    kernel: str
    rival: bool
    draft_kernels: Mapping[str, str]
    tried: list[Trial]

    def kernel_of(self, draft: Draft) -> str:
        """The kernels of a drafter; "auto" where the choice was made without it."""
        return self.draft_kernels.get(draft.key, "auto")


def resolve_tuning(
    tuning: Measurements | None,
    target: Target,
    drafts: Sequence[Draft],
    context: Sequence[int],
    dtype: Dtype,
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Tuning:
    """The choice read from `tuning`, or else one timed here, decoding after the token ids of `context`."""
    tuned = read_tuning(tuning, target, drafts, dtype, num_threads, ctx, machine)
    if tuned is not None:
        return tuned
    if ctx.device == "cpu":
        check_memory(target, drafts, dtype)
    with quiet_interpreter():
        return choose_engine(
            target,
            drafts,
            context,
            dtype=dtype,
            device=ctx.device,
            max_threads=ctx.num_threads,
            num_threads=num_threads,
            timed=not ctx.rehearsed,
        )


def read_tuning(
    tuning: Measurements | None,
    target: Target,
    drafts: Sequence[Draft],
    dtype: str,
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Tuning | None:
    """Read the choice of `bench.autotune` for this target, dtype and machine; None for tuning None.

    num_threads: the step's own setting, 0 for none.
    Raises UserError for a choice made for something else, or one beside the step's own num_threads.
    """
    if tuning is None:
        return None
    label, facts = f"tuning ({tuning.key[:12]})", tuning.info
    needed = {"target_key": target.key, "dtype": dtype, "device": ctx.device, "machine_id": machine.machine_id}
    if not {*needed, "num_threads", "kernel", "rival"} <= facts.keys():
        raise UserError(f"{label}: these measurements choose no threads: give what bench.autotune makes")
    if num_threads:
        raise UserError(
            f"num_threads: {num_threads} is asked for, and {label} chose {facts['num_threads']}: leave one of them out"
        )
    for name, value in needed.items():
        if facts[name] != value:
            stated_text, needed_text = str(facts[name])[:12], str(value)[:12]
            raise UserError(
                f"{label}: it was made for {name} {stated_text}, and this step has {needed_text}: "
                f"give a bench.autotune of the same {name}"
            )
    if facts["num_threads"] > ctx.num_threads:
        raise UserError(
            f"{label}: it chose {facts['num_threads']} threads, and this step may use {ctx.num_threads}: allow as many"
        )
    kernels = dict(facts.get("draft_kernels", {}))
    for draft in drafts:
        if draft.key not in kernels:
            ctx.note(f"{label} chose no kernels for {draft.key[:12]}: each process picks its own; give it to autotune")
    return Tuning(int(facts["num_threads"]), str(facts["kernel"]), bool(facts["rival"]), kernels, [])


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
    timed: bool = True,
) -> Tuning:
    """Time plain decoding on the thread counts worth trying, and choose kernels of target and drafters at the best.

    context:     token ids to decode after while timing.
    max_threads: the step's own limit; it and 1 are tried on a CPU.
    num_threads: 0 tries; another number is used as it is, but at most max_threads.
    seconds:     the least time for which thread counts take turns; 0 is ROUNDS rounds. Above 0, the kernels of the
                 chosen count are timed thoroughly.
    timed:       False times nothing and chooses one thread and PyTorch's own kernels.
    """
    if not timed:
        return Tuning(1, "plain", False, {draft.key: "plain" for draft in drafts}, [])
    if num_threads:
        counts = [min(num_threads, max_threads)]
    elif device == "cpu":
        counts = sorted({1, max_threads})
    else:
        counts = [max_threads]
    count = counts[0]
    tried: list[Trial] = []
    if len(counts) > 1:
        count, tried = _best_count(target, context, counts, dtype, device, seconds)
    candidate = _open(target, count, dtype, device, "thorough" if seconds > 0.0 and device == "cpu" else "auto")
    with threads(count):
        kernels = {draft.key: _kernel_of(draft, candidate.target) for draft in drafts}
    kernel, rival = candidate.target.kernel, False
    if kernel not in ("plain", "transformers") and device == "cpu":
        if _is_held_once(target, dtype):
            tuned = _time_rounds([candidate], context)[0]
            tried.append(_trial_facts(candidate, min(tuned)))
            del candidate  # before the next one is opened
            plain = _open(target, count, dtype, device, "plain")
            on_plain = _time_rounds([plain], context)[0]
            kernel = "plain" if clearly_faster(on_plain, tuned) else kernel
        else:
            plain = _open(target, count, dtype, device, "plain")
            tuned, on_plain = _time_rounds([candidate, plain], context)
            tried.append(_trial_facts(candidate, min(tuned)))
            rival = min(on_plain) < min(tuned) * (1 - WORTH_COMPARING)
        tried.append(_trial_facts(plain, min(on_plain)))
    elif not tried:
        tried = [_trial_facts(candidate, min(_time_rounds([candidate], context)[0]))]
    return Tuning(count, kernel, rival, kernels, tried)


def peak_of_choice(target: Target, drafts: Sequence[Draft], dtype: Dtype) -> int:
    """Bytes of memory that choosing threads and kernels takes on a CPU, at most: one drafter is opened at a time."""
    itemsize = getattr(torch, dtype).itemsize
    sizes = [int(read_record(draft.path)["num_parameters"]) for draft in drafts]
    largest = [(4 + itemsize) * size + timed_bytes() for size in sizes if size]
    return peak_of_weights(int(target_facts(target)["num_params"]) * itemsize) + max(largest, default=0)


def peak_of_weights(weights: int) -> int:
    """As `peak_of_choice`, of a target of so many bytes alone. benchmarks/opening.py measures it."""
    share = PEAK_OF_ONE if weights > HELD_ONCE else PEAK_OF_TWO if weights > HELD_TWICE else PEAK_OF_BOTH
    return int(share * weights) + (OTHER_BYTES if weights > HELD_TWICE else timed_bytes())


def timed_bytes() -> int:
    """Bytes that timing the kernels of one model takes beside it, at most."""
    return TIMED_BYTES + CONVOLVED_BYTES if can_convolve() else TIMED_BYTES


def check_memory(target: Target, drafts: Sequence[Draft], dtype: Dtype) -> str:
    """What a choice of threads and kernels will take in memory on a CPU, in words.

    Raises UserError where less is free.
    """
    peak, free = peak_of_choice(target, drafts, dtype), free_ram()
    of = "the target and its drafters" if drafts else "the target"
    said = f"choosing threads and kernels of {of} in {dtype} takes up to {peak / 1e9:.2f} GB of memory"
    if peak > free:
        smaller = "take dtype: bfloat16, or " if dtype == "float32" else ""
        raise UserError(f"{said}, and {free / 1e9:.2f} GB are free: {smaller}a machine with more, or end what holds it")
    return f"{said}, and {free / 1e9:.1f} GB are free"


def _is_held_once(target: Target, dtype: Dtype) -> bool:
    """Whether a target is too large to be held in memory several times."""
    return int(target_facts(target)["num_params"]) * getattr(torch, dtype).itemsize > HELD_TWICE


def _best_count(
    target: Target, context: Sequence[int], counts: list[int], dtype: Dtype, device: str, seconds: float
) -> tuple[int, list[Trial]]:
    """The thread count with the quickest plain step (at a tie the smaller one), and facts of all trials."""
    if _is_held_once(target, dtype):
        once = _open(target, counts[-1], dtype, device, "plain" if compiled_functions() is None else "streamed")
        candidates = [once._replace(num_threads=count) for count in counts]
    else:
        candidates = [_open(target, count, dtype, device, "auto") for count in counts]
    rounds = _time_rounds(candidates, context, seconds)
    tried = [_trial_facts(candidate, min(steps)) for candidate, steps in zip(candidates, rounds, strict=True)]
    return counts[-1 if clearly_faster(rounds[-1], rounds[0]) else 0], tried


def clearly_faster(more: Sequence[float], fewer: Sequence[float]) -> bool:
    """Whether more threads, by the times of their rounds, are worth taking over fewer.

    They have to win by the quickest round, which other work on the machine does not affect, and by the median, which
    shows its effect: threads that wait for each other lose most by it. At a tie fewer threads win.
    """
    return all(typical(more) < typical(fewer) * (1 - WORTH_SWITCHING) for typical in (min, statistics.median))


class _Candidate(NamedTuple):
    target: AbstractTarget
    num_threads: int
    session: Session


def _open(target: Target, num_threads: int, dtype: Dtype, device: str, kernel: str) -> _Candidate:
    gc.collect()  # a model of transformers that nobody holds is a circle, and would stay beside this one
    with threads(num_threads):
        model = open_target(target, device=device, dtype=dtype, kernel=kernel)
    return _Candidate(model, num_threads, Session(model))


def _kernel_of(draft: Draft, target: AbstractTarget) -> str:
    """The kernels that a drafter picks; nothing of it is in memory afterwards."""
    kernel = open_drafter(draft, target, "thorough").kernel
    gc.collect()  # an opened drafter is a circle, and the interpreter collects none while it times
    give_memory_back()
    return kernel


def _trial_facts(candidate: _Candidate, step_ns: float) -> Trial:
    return {
        "num_threads": candidate.num_threads,
        "kernel": candidate.target.kernel,
        "plain_step_ms": round(step_ns / 1e6, 4),
    }


def _time_rounds(candidates: list[_Candidate], context: Sequence[int], seconds: float = 0.0) -> list[list[float]]:
    """Nanoseconds a plain token in each of ROUNDS rounds or more, until `seconds` are over, taking turns.

    A first round warms up; if it was slow, rounds are short. Other work makes rounds longer, never shorter: by the
    median alone, or by the quickest alone, a moment of it once made two threads win where one is 15 % faster.
    """
    times: list[list[float]] = [[] for _ in candidates]
    until, tokens = time.monotonic() + seconds, SLOW_TOKENS
    while len(times[-1]) < ROUNDS + 1 or time.monotonic() < until:
        for index, candidate in enumerate(candidates):
            with threads(candidate.num_threads):
                session = candidate.session
                run = decode(session.target, None, context, max_new_tokens=tokens, ignore_eos=True, session=session)
            times[index].append(run.decode_ns / (tokens - 1))
        if len(times[-1]) == 1:
            tokens = SLOW_TOKENS if min(steps[0] for steps in times) > SLOW_STEP_NS else TOKENS
    return [steps[1:] for steps in times]
