"""Runs every arm on every prompt, in turns, in several fresh processes, until the decision is settled or time is spent.

A process loads everything anew and takes the prompts that were decoded least often so far. On a prompt (or a batch) the
arms take turns of some tens of milliseconds (slices.py). Each arm starts a prompt with an empty cache and drafter
state. Warm-up prompts are never timed ones.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from components.bench import clock
from components.bench.clock import slices_stat
from components.bench.end_to_end.arms import PLAIN, Arm
from components.bench.measurement.process import FIRST_SHARE, Measuring
from components.bench.measurement.round_kinds import by_kind
from components.bench.measurement.slices import ArmRun, WholeSlice, seconds_a_token, slice_length
from components.bench.prompts import EncodedPrompt
from components.decoding.chain import Decoded

WARM_UP_TOKENS = 24
MIN_GROUPS = 1
"""Prompts (or batches) that each process decodes regardless of the time budget."""
MIN_GROUPS_IN_ALL = 4
"""The same over all processes together: the decision needs as many."""
EXTENSION = 2.0
"""Most time for an open decision, over the time budget."""
SIDE_GROUPS = 3
"""Prompts (or batches) on which side arms run, in each of the least number of processes."""


@dataclass(frozen=True)
class TimedRun:
    """One generation of one arm. batch_id: shared by those decoded together; None for one alone.

    steady_ns: decode_ns if each round had taken the arm's steady time in this process; see steady_share.
    rep: how often the process had decoded this prompt before.
    """

    arm: Arm
    prompt: EncodedPrompt
    rep: int
    order_index: int
    decoded: Decoded
    process: int
    kernel: str
    steady_ns: float
    batch_size: int = 1
    batch_id: int | None = None


class GroupRun(NamedTuple):
    """The runs of all arms on one prompt (or batch) in one process. number: of the group in that process, from 1."""

    process: int
    number: int
    group: list[EncodedPrompt]
    runs: list[ArmRun]
    kernels: dict[bool, str]  # keyed by Arm.on_rival


@dataclass
class StudyPlan:
    """The measurements to make. side_arms take no part in the decision and run on few prompts."""

    arms: list[Arm]
    side_arms: frozenset[Arm]
    prompts: list[EncodedPrompt]
    warm_up: list[EncodedPrompt]
    batch_sizes: list[int]
    max_new_tokens: int


@dataclass
class Study:
    """A running measurement.

    open_process: opens process number n. find_open_arms: from the runs so far, the arms that the decision waits for
    (none: it is settled), and a summary in words.
    """

    plan: StudyPlan
    open_process: Callable[[int], Measuring]
    find_open_arms: Callable[[Sequence[GroupRun]], tuple[Collection[Arm], str]]
    progress: Callable[[float, float], None]
    note: Callable[[str], None]
    group_runs: list[GroupRun] = field(default_factory=list)
    conditions: clock.Conditions | None = None
    num_processes: int = 0
    stop_reason: str = ""

    def run(self, seconds: float, num_processes: int) -> None:
        """Measure in at least `num_processes` processes; then go on while the decision is open and time is left.

        First every prompt is decoded by every arm, as far as there is time, since speeds depend on the prompts. A
        decision that is open when the time is spent gets as much again, once.
        """
        arms: Collection[Arm] = self.plan.arms
        spent, share = 0.0, FIRST_SHARE * seconds / num_processes
        while not self.stop_reason:
            spent += self._one_process(arms, share, spent, seconds, num_processes)
            if self.num_processes < num_processes:
                continue
            num_left = self._num_left()
            if num_left and spent < seconds:
                self.note(f"{num_left} prompts (or batches) are left: one more process")
                continue
            open_arms, message = self.find_open_arms(self.group_runs)
            if not open_arms:
                self.stop_reason = f"settled: {message}"
            elif spent + share > EXTENSION * seconds:
                self.stop_reason = f"not settled in {spent:.0f} s: {message}"
            else:
                arms = [arm for arm in self.plan.arms if arm.is_plain or arm in open_arms]
                self.note(f"not settled yet: {message}; one more process measures {len(arms)} arms")
        self.note(self.stop_reason)

    def _one_process(self, arms: Collection[Arm], share: float, spent: float, seconds: float, least: int) -> float:
        """Measure in a fresh process for about `share` seconds; returns the seconds. least: number of processes."""
        self.num_processes += 1
        number, batch_sizes = self.num_processes, self.plan.batch_sizes
        with self.open_process(number) as process:
            tokens_a_slice = self._warm_up(process, arms, share, seconds)
            started, num_groups = time.monotonic(), 0
            sizes = len(batch_sizes)
            while (
                time.monotonic() - started < share
                or num_groups < MIN_GROUPS * sizes
                or (number >= least and len(self.group_runs) < MIN_GROUPS_IN_ALL * sizes)
            ):
                with_side = number <= least and num_groups < SIDE_GROUPS
                group = self._next_group(batch_sizes[num_groups % sizes], from_start=with_side)
                num_groups += 1
                process_arms = [arm for arm in arms if with_side or arm not in self.plan.side_arms]
                runs = process.turns(
                    [prompt.ids for prompt in group],
                    process_arms,
                    num_tokens=self.plan.max_new_tokens,
                    tokens_a_slice=tokens_a_slice,
                    ignore_eos=False,
                )
                self.group_runs.append(GroupRun(number, num_groups, group, runs, process.kernels))
                self.progress(min(seconds, spent + time.monotonic() - started), seconds)
            self.conditions = process.conditions()
            return time.monotonic() - started

    def _note_duration(self, warm: Sequence[ArmRun], batch_size: int, share: float, seconds: float) -> None:
        """Note the time of a prompt, how many prompts fit the time of a process, and whether the least exceeds all."""
        whole = seconds_a_token(warm) * self.plan.max_new_tokens
        groups = len(batches(self.plan.prompts, batch_size, fill=False))
        what = "a prompt" if batch_size == 1 else f"a batch of {batch_size}"
        self.note(
            f"{what} takes about {whole:.1f} s in all arms: {share:.0f} s of each process are enough for "
            + (f"about {max(1, round(share / whole))} of {groups}" if share < whole * groups else f"all {groups}")
        )
        if (least := MIN_GROUPS_IN_ALL * whole) > seconds:
            self.note(
                f"{MIN_GROUPS_IN_ALL} are decoded at least: about {least:.0f} s instead of the {seconds:.0f} asked"
            )

    def _warm_up(self, process: Measuring, arms: Collection[Arm], share: float, seconds: float) -> int:
        """Decode the warm-up prompts at every batch size; returns the tokens of a slice."""
        length = 1
        for size in self.plan.batch_sizes:
            for group in batches(self.plan.warm_up, size, fill=True):
                warm = process.turns(
                    [prompt.ids for prompt in group],
                    arms,
                    num_tokens=min(WARM_UP_TOKENS, self.plan.max_new_tokens),
                    tokens_a_slice=WARM_UP_TOKENS,
                    ignore_eos=True,
                )
                length = slice_length(next(run for run in warm if run.arm == PLAIN))
                if self.num_processes == 1:
                    self._note_duration(warm, size, share, seconds)
        return length

    def _num_left(self) -> int:
        """Prompts (or batches) that no process has decoded yet."""
        num = sum(len(batches(self.plan.prompts, size, fill=False)) for size in self.plan.batch_sizes)
        return num - len({_group_key(group_run.group) for group_run in self.group_runs})

    def _next_group(self, batch_size: int, *, from_start: bool) -> list[EncodedPrompt]:
        """The group of this batch size that was decoded least often so far, over all processes.

        from_start: the first of them, else the last, so that side arms decode the same prompts in every measurement.
        """
        groups = batches(self.plan.prompts, batch_size, fill=False)
        times = Counter(_group_key(group_run.group) for group_run in self.group_runs)
        return min(groups if from_start else groups[::-1], key=lambda group: times[_group_key(group)])


def _group_key(group: Sequence[EncodedPrompt]) -> tuple[str, ...]:
    return tuple(prompt.prompt_id for prompt in group)


def timed_runs(group_runs: Sequence[GroupRun]) -> list[TimedRun]:
    """Every generation of a study as a TimedRun, with its steady time."""
    steady_rounds = steady_kinds(group_runs)
    repetitions: dict[tuple[Arm, str, int, int], int] = {}
    runs: list[TimedRun] = []
    for batch_id, group_run in enumerate(group_runs):
        size = len(group_run.group)
        for arm_run in group_run.runs:
            share = steady_share(arm_run, steady_rounds[group_run.process, arm_run.arm, size])
            for prompt, decoded in zip(group_run.group, arm_run.decoded, strict=True):
                key = (arm_run.arm, prompt.prompt_id, group_run.process, size)
                rep = repetitions[key] = repetitions.get(key, -1) + 1
                runs.append(
                    TimedRun(
                        arm=arm_run.arm,
                        prompt=prompt,
                        rep=rep,
                        order_index=len(runs),
                        decoded=decoded,
                        process=group_run.process,
                        kernel=group_run.kernels[arm_run.arm.on_rival],
                        steady_ns=decoded.decode_ns * share,
                        batch_size=size,
                        batch_id=None if size == 1 else batch_id,
                    )
                )
    return runs


Kinds = Mapping[int, float]
"""Tokens drafted in a round -> nanoseconds of such a round (measurement/round_kinds.py)."""


def steady_kinds(group_runs: Sequence[GroupRun]) -> dict[tuple[int, Arm, int], Kinds]:
    """(process, arm, batch size) -> the time of each kind of whole-batch round in its quietest slices."""
    slices: dict[tuple[int, Arm, int], list[WholeSlice]] = {}
    for group_run in group_runs:
        for run in group_run.runs:
            key = (group_run.process, run.arm, len(group_run.group))
            slices.setdefault(key, []).extend(run.whole_slices())
    return {
        key: {
            drafted: slices_stat(rounds).median
            for drafted, rounds in by_kind(whole, [whole_slice.round_ns for whole_slice in whole]).items()
        }
        for key, whole in slices.items()
    }


def steady_round_ns(group_runs: Sequence[GroupRun]) -> dict[tuple[int, Arm, int], float]:
    """(process, arm, batch size) -> the mean steady time of its whole-batch rounds; nan without any."""
    kinds = steady_kinds(group_runs)
    counts: dict[tuple[int, Arm, int], Counter[int]] = {key: Counter() for key in kinds}
    for group_run in group_runs:
        for run in group_run.runs:
            for whole_slice in run.whole_slices():
                counts[group_run.process, run.arm, len(group_run.group)].update(whole_slice.drafted)
    return {
        key: sum(count * kinds[key][drafted] for drafted, count in of.items()) / of.total() if of else math.nan
        for key, of in counts.items()
    }


def steady_share(run: ArmRun, kinds: Kinds) -> float:
    """The factor from a generation's time to its steady time, in which whole-batch rounds take the time of their kind.

    The first round, which processes the prompt, and those of an emptying batch count as measured, as do all rounds of a
    chain that ends by confidence: how many passes its drafter ran is not known from its draft tokens.
    """
    if run.arm.stop is not None:
        return 1.0
    total = sum(sum(turn.round_ns) for turn in run.slices)
    rounds = [pair for turn in run.whole_slices() for pair in zip(turn.round_ns, turn.drafted, strict=True)]
    saved = sum(ns - kinds[drafted] for ns, drafted in rounds)
    return (total - saved) / total if rounds else 1.0


def batches(prompts: list[EncodedPrompt], batch_size: int, fill: bool) -> list[list[EncodedPrompt]]:
    """Groups of exactly `batch_size` prompts, of one workload where possible; an incomplete group is left out.

    fill: give one group even where there are too few, with prompts repeated (for warming up).
    """
    if fill and len(prompts) < batch_size:
        prompts = list(itertools.islice(itertools.cycle(prompts), batch_size))
    if batch_size > 1:
        prompts = sorted(prompts, key=lambda prompt: prompt.workload)
    starts = range(0, len(prompts) - batch_size + 1, batch_size)
    return [prompts[start : start + batch_size] for start in starts]
