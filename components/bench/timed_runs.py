"""Runs every arm on every prompt, interleaved.

Within a repetition prompts (or batches of them) come one after the other; within a prompt the arms take turns in random
order, so that drift of the machine meets all arms alike. Every arm starts a prompt from an empty cache and a new
drafter state. Prompts for warming up are never timed ones.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from components.bench.arms import Arm
from components.bench.subjects import EncodedPrompt
from components.decoding.batch import decode_batch
from components.decoding.chain import Decoded, decode
from components.decoding.session import Session
from components.targets.model import AbstractTarget


@dataclass(frozen=True)
class TimedRun:
    """One generation of one arm, and when it ran. batch_id: shared by those decoded together; None for one alone."""

    arm: Arm
    prompt: EncodedPrompt
    rep: int
    order_index: int
    is_warmup: bool
    decoded: Decoded
    batch_size: int = 1
    batch_id: int | None = None


class _Turn(NamedTuple):
    """One arm on one group of prompts, before it runs."""

    rep: int
    is_warmup: bool
    prompts: list[EncodedPrompt]
    arm: Arm


def run_arms(
    target: AbstractTarget,
    arms: Sequence[Arm],
    warm_up: Sequence[EncodedPrompt],
    prompts: Sequence[EncodedPrompt],
    *,
    batch_sizes: Sequence[int],
    max_new_tokens: int,
    reps: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> list[TimedRun]:
    """All timed runs, in the order in which they ran; warm-up first."""
    timed_texts = {tuple(prompt.ids) for prompt in prompts}
    assert not any(tuple(prompt.ids) in timed_texts for prompt in warm_up), "a warm-up prompt is timed as well"
    capacity = _longest(warm_up, prompts) + max_new_tokens + max(arm.rows_of_pass for arm in arms)
    sessions = {id(one): Session(one, capacity) for one in (target, *(arm.target for arm in arms if arm.target))}
    plan = _plan(arms, warm_up, prompts, batch_sizes, reps, random.Random(seed))
    runs: list[TimedRun] = []
    for number, (rep, is_warmup, group, arm) in enumerate(plan):
        mine = arm.target or target
        decoded = _decode(mine, arm, group, max_new_tokens, sessions[id(mine)])
        batch_id = number if len(group) > 1 else None
        for prompt, one in zip(group, decoded, strict=True):
            runs.append(TimedRun(arm, prompt, rep, len(runs), is_warmup, one, len(group), batch_id))
        progress(number + 1, len(plan))
    return runs


def _plan(
    arms: Sequence[Arm],
    warm_up: Sequence[EncodedPrompt],
    prompts: Sequence[EncodedPrompt],
    batch_sizes: Sequence[int],
    reps: int,
    order: random.Random,
) -> list[_Turn]:
    """Warm-up, then the repetitions; in each, every group of every batch size, and every arm on it in random order."""
    plan: list[_Turn] = []
    for rep, is_warmup, asked in ((0, True, warm_up), *((rep, False, prompts) for rep in range(reps))):
        for batch_size in batch_sizes:
            for group in batches(list(asked), batch_size, fill=is_warmup):
                turns = list(arms)
                order.shuffle(turns)
                plan += [_Turn(rep, is_warmup, group, arm) for arm in turns]
    return plan


def batches(prompts: list[EncodedPrompt], batch_size: int, fill: bool) -> list[list[EncodedPrompt]]:
    """Groups of exactly `batch_size` prompts, of one workload as far as that goes; what is left over is left out.

    fill: give one group even where there are too few, with prompts repeated (for warming up).
    """
    if fill and len(prompts) < batch_size:
        prompts = list(itertools.islice(itertools.cycle(prompts), batch_size))
    if batch_size > 1:
        prompts = sorted(prompts, key=lambda prompt: prompt.workload)
    starts = range(0, len(prompts) - batch_size + 1, batch_size)
    return [prompts[start : start + batch_size] for start in starts]


def _decode(
    target: AbstractTarget, arm: Arm, group: Sequence[EncodedPrompt], max_new_tokens: int, session: Session
) -> list[Decoded]:
    """One turn: what each prompt of the group became."""
    if len(group) > 1 or arm.shape is not None:
        return decode_batch(
            target,
            arm.proposer,
            [prompt.ids for prompt in group],
            max_new_tokens=max_new_tokens,
            depth=arm.depth_of_loop if arm.shape is None else 0,
            shape=arm.shape,
        )
    return [
        decode(
            target,
            arm.proposer,
            group[0].ids,
            max_new_tokens=max_new_tokens,
            depth=arm.depth_of_loop,
            session=session,
        )
    ]


def _longest(*groups: Sequence[EncodedPrompt]) -> int:
    return max(len(prompt.ids) for group in groups for prompt in group)
