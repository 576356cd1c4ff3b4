"""Every arm on every prompt, in turns, in several fresh processes, until the question is settled or time is spent.

A process opens everything anew and takes the prompts that were decoded least often so far. On a prompt (or a batch of
them) the arms take turns of some tens of milliseconds (slices.py). Every arm starts a prompt from an empty cache and a
new drafter state. Prompts for warming up are never timed ones.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from components.bench.arms import PLAIN, Arm
from components.bench.measuring import FIRST_SHARE, ArmRun, Measuring, WholeSlice, seconds_a_token, slice_length
from components.bench.subjects import EncodedPrompt
from components.decoding.chain import Decoded
from components.speedup.steady import steady

WARM_UP_TOKENS = 24
LEAST_GROUPS = 1
"""Prompts (or batches) of each process that are decoded whatever the time budget says."""
LEAST_IN_ALL = 4
"""The same over all processes together: a verdict needs as many."""
EXTENSION = 2.0
"""The time that an open decision may take, over the time that it was given."""
SIDE_GROUPS = 3
"""Prompts (or batches) of each of the least number of processes on which arms run that take no part in the decision."""


@dataclass(frozen=True)
class TimedRun:
    """One generation of one arm, and when it ran. batch_id: shared by those decoded together; None for one alone.

    steady_ns: decode_ns as it would be if each round had taken the arm's steady time in this process; see steady_share.
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
    """One prompt (or batch) in one process: what every arm made of it. number: of the group in that process, from 1."""

    process: int
    number: int
    group: list[EncodedPrompt]
    runs: list[ArmRun]
    kernels: dict[bool, str]  # on the rival or not


@dataclass
class Asked:
    """What is to be measured. side_arms take no part in the decision: few prompts are enough for them."""

    arms: list[Arm]
    side_arms: frozenset[Arm]
    prompts: list[EncodedPrompt]
    warm_up: list[EncodedPrompt]
    batch_sizes: list[int]
    max_new_tokens: int


@dataclass
class Study:
    """The measurement while it goes on.

    open_process: opens process number n. unsettled: the arms that the decision still waits for, from all that was
    measured so far, with a line that says what is known; no arm: it is settled.
    """

    asked: Asked
    open_process: Callable[[int], Measuring]
    unsettled: Callable[[Sequence[GroupRun]], tuple[Collection[Arm], str]]
    progress: Callable[[float, float], None]
    note: Callable[[str], None]
    found: list[GroupRun] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)
    num_processes: int = 0
    ended: str = ""

    def run(self, seconds: float, num_processes: int) -> None:
        """Measure in at least `num_processes` processes; then go on while the decision is open and time is left.

        First every prompt is decoded by every arm, as far as there is time: speeds on other prompts are other speeds.
        A decision that is open when the time is spent gets as much again, once: nobody is served by half an answer.
        """
        arms: Collection[Arm] = self.asked.arms
        spent, share = 0.0, FIRST_SHARE * seconds / num_processes
        while not self.ended:
            spent += self._one_process(arms, share, spent, seconds, num_processes)
            if self.num_processes < num_processes:
                continue
            left = self._num_left()
            if left and spent < seconds:
                self.note(f"{left} prompts (or batches) are left: one more process")
                continue
            open_arms, said = self.unsettled(self.found)
            if not open_arms:
                self.ended = f"settled: {said}"
            elif spent + share > EXTENSION * seconds:
                self.ended = f"not settled in {spent:.0f} s: {said}"
            else:
                arms = [arm for arm in self.asked.arms if arm.is_plain or arm in open_arms]
                self.note(f"not settled yet: {said}; one more process measures {len(arms)} arms")
        self.note(self.ended)

    def _one_process(self, arms: Collection[Arm], share: float, spent: float, seconds: float, least: int) -> float:
        """Measure in one fresh process for about `share` seconds; gives what it took. least: processes at least."""
        self.num_processes += 1
        number, batch_sizes = self.num_processes, self.asked.batch_sizes
        with self.open_process(number) as process:
            tokens_a_slice = self._warm_up(process, arms, share)
            begun, taken = time.monotonic(), 0
            sizes = len(batch_sizes)
            while (
                time.monotonic() - begun < share
                or taken < LEAST_GROUPS * sizes
                or (number >= least and len(self.found) < LEAST_IN_ALL * sizes)
            ):
                with_side = number <= least and taken < SIDE_GROUPS
                group = self._next_group(batch_sizes[taken % sizes], from_start=with_side)
                taken += 1
                mine = [arm for arm in arms if with_side or arm not in self.asked.side_arms]
                runs = process.turns(
                    [prompt.ids for prompt in group],
                    mine,
                    num_tokens=self.asked.max_new_tokens,
                    tokens_a_slice=tokens_a_slice,
                    ignore_eos=False,
                )
                self.found.append(GroupRun(number, taken, group, runs, process.kernels))
                self.progress(min(seconds, spent + time.monotonic() - begun), seconds)
            self.conditions = process.conditions()
            return time.monotonic() - begun

    def _say_how_long(self, warm: Sequence[ArmRun], batch_size: int, share: float) -> None:
        """Before the long part begins: what a prompt takes, and how many the time is enough for."""
        whole = seconds_a_token(warm) * self.asked.max_new_tokens
        groups = len(batches(self.asked.prompts, batch_size, fill=False))
        what = "a prompt" if batch_size == 1 else f"a batch of {batch_size}"
        self.note(
            f"{what} takes about {whole:.1f} s in all arms: {share:.0f} s of each process are enough for about "
            f"{max(1, round(share / whole))} of {groups}"
        )

    def _warm_up(self, process: Measuring, arms: Collection[Arm], share: float) -> int:
        """Decode the warm-up prompts at every batch size; gives the tokens of a slice."""
        length = 1
        for size in self.asked.batch_sizes:
            for group in batches(self.asked.warm_up, size, fill=True):
                warm = process.turns(
                    [prompt.ids for prompt in group],
                    arms,
                    num_tokens=min(WARM_UP_TOKENS, self.asked.max_new_tokens),
                    tokens_a_slice=WARM_UP_TOKENS,
                    ignore_eos=True,
                )
                length = slice_length(next(run for run in warm if run.arm == PLAIN))
                if self.num_processes == 1:
                    self._say_how_long(warm, size, share)
        return length

    def _num_left(self) -> int:
        """Prompts (or batches) that no process has decoded yet."""
        num = sum(len(batches(self.asked.prompts, size, fill=False)) for size in self.asked.batch_sizes)
        return num - len({_name(group_run.group) for group_run in self.found})

    def _next_group(self, batch_size: int, *, from_start: bool) -> list[EncodedPrompt]:
        """The group of this batch size that was decoded least often so far, in whichever process.

        from_start: the first of them, else the last, so that arms shown beside the decision decode the same prompts
        in every measurement, however many a process gets through.
        """
        groups = batches(self.asked.prompts, batch_size, fill=False)
        times = Counter(_name(group_run.group) for group_run in self.found)
        return min(groups if from_start else groups[::-1], key=lambda group: times[_name(group)])


def _name(group: Sequence[EncodedPrompt]) -> tuple[str, ...]:
    return tuple(prompt.prompt_id for prompt in group)


def timed_runs(found: Sequence[GroupRun]) -> list[TimedRun]:
    """Every generation of a study as a run of its own, with its steady time."""
    steady_rounds = steady_kinds(found)
    seen: dict[tuple[Arm, str, int, int], int] = {}
    runs: list[TimedRun] = []
    for batch_id, group_run in enumerate(found):
        size = len(group_run.group)
        for arm_run in group_run.runs:
            share = steady_share(arm_run, steady_rounds[group_run.process, arm_run.arm, size])
            for prompt, decoded in zip(group_run.group, arm_run.decoded, strict=True):
                key = (arm_run.arm, prompt.prompt_id, group_run.process, size)
                rep = seen[key] = seen.get(key, -1) + 1
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
"""Tokens drafted in a round -> nanoseconds of such a round. Prompt lookup drafts what it finds, from nothing to its
depth, and a round of nothing takes a plain step: the quietest rounds of all kinds together would be those alone."""


def steady_kinds(found: Sequence[GroupRun]) -> dict[tuple[int, Arm, int], Kinds]:
    """(process, arm, batch size) -> the time of each kind of round of the whole batch in the quietest of its slices."""
    slices: dict[tuple[int, Arm, int], dict[int, list[float]]] = {}
    for group_run in found:
        for run in group_run.runs:
            of_kind = slices.setdefault((group_run.process, run.arm, len(group_run.group)), {})
            for one in run.whole_slices():
                for drafted, round_ns in _by_kind(one).items():
                    of_kind.setdefault(drafted, []).append(statistics.median(round_ns))
    return {key: {drafted: steady(of) for drafted, of in of_kind.items()} for key, of_kind in slices.items()}


def steady_round_ns(found: Sequence[GroupRun]) -> dict[tuple[int, Arm, int], float]:
    """(process, arm, batch size) -> the steady time of its rounds of the whole batch on the average; nan of none."""
    kinds = steady_kinds(found)
    counts: dict[tuple[int, Arm, int], Counter[int]] = {key: Counter() for key in kinds}
    for group_run in found:
        for run in group_run.runs:
            for one in run.whole_slices():
                counts[group_run.process, run.arm, len(group_run.group)].update(one.drafted)
    return {
        key: sum(count * kinds[key][drafted] for drafted, count in of.items()) / of.total() if of else math.nan
        for key, of in counts.items()
    }


def steady_share(run: ArmRun, kinds: Kinds) -> float:
    """The time of a generation over what it took, if every round of the whole batch had taken the time of its kind.

    The first round, which takes the prompt in, and those of an emptying batch count as they were.
    """
    total = sum(sum(one.round_ns) for one in run.slices)
    rounds = [pair for one in run.whole_slices() for pair in zip(one.round_ns, one.drafted, strict=True)]
    saved = sum(ns - kinds[drafted] for ns, drafted in rounds)
    return (total - saved) / total if rounds else 1.0


def _by_kind(one: WholeSlice) -> dict[int, list[int]]:
    """Tokens drafted in a round -> nanoseconds of each such round of a slice."""
    found: dict[int, list[int]] = {}
    for ns, drafted in zip(one.round_ns, one.drafted, strict=True):
        found.setdefault(drafted, []).append(ns)
    return found


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
