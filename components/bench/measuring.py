"""The owner's side of a measuring process: typed requests, and what comes back as the objects that rows are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from components.bench.arms import Arm
from components.bench.fresh_process import FreshProcess
from components.bench.measuring_process import MeasuringProcess
from components.bench.slices import Slice
from components.bench.tuning import Tuning
from components.contract import Context, Draft, Target
from components.decoding.chain import Decoded, RoundFacts
from components.speedup.steady import steady

SLICE_NS: Final = 40e6
"""Time of plain decoding in one slice: long against what a change of arms costs the caches, short against the seconds
for which other work comes and goes."""
LONGEST_SLICE: Final = 16
"""Tokens of a slice at most."""
FIRST_SHARE: Final = 0.6
"""The share of a time budget that the least number of processes takes: a quiet machine needs no more."""


class WholeSlice(NamedTuple):
    """Rounds of one slice, nanoseconds of each: the round, its pass of the target, its proposal.

    drafted: tokens that were drafted in each round, over the whole batch.
    """

    round_ns: list[int]
    target_ns: list[int]
    draft_ns: list[int]
    drafted: list[int]

    @property
    def host_ns(self) -> list[int]:
        """The rest of each round: the loop itself."""
        return [a - b - c for a, b, c in zip(*self[:3], strict=True)]


class ArmRun(NamedTuple):
    """One arm's generations side by side (one, where batch size is 1), and its turns."""

    arm: Arm
    decoded: list[Decoded]
    slices: list[Slice]
    prefill_ns: int

    def whole_slices(self) -> list[WholeSlice]:
        """The rounds in which the whole batch took part, slice by slice, the generation's first round left out.

        The first round's proposal takes the whole prompt in; a sequence that is done leaves the batch.
        """
        found, begun = [], 0
        for one in self.slices:
            rounds = list(enumerate(zip(*one[1:], strict=True), start=begun))
            begun += len(rounds)
            whole = [
                (ns, target, draft, sum(of.rounds[number].drafted for of in self.decoded))
                for number, (ns, target, draft, size) in rounds
                if number and size == len(self.decoded)
            ]
            if whole:
                found.append(WholeSlice(*(list(column) for column in zip(*whole, strict=True))))
        return found

    @property
    def first_round(self) -> tuple[int, int, int]:
        """(round, target, draft) ns of the first round."""
        first = self.slices[0]
        return first.round_ns[0], first.target_ns[0], first.draft_ns[0]


class Measuring:
    """A fresh process with everything opened. number: from 1, which of the processes of a measurement it is."""

    def __init__(
        self,
        number: int,
        target: Target,
        drafts: Sequence[Draft],
        arms: Sequence[Arm],
        tuning: Tuning,
        dtype: str,
        ctx: Context,
        *,
        graphs: bool = False,
    ) -> None:
        self.number, self.arms = number, list(arms)
        wanted = {arm.draft_key for arm in arms}
        order = {
            "target": {"key": target.key, "path": str(target.path)},
            "drafts": [
                {"key": draft.key, "path": str(draft.path), "kernel": tuning.kernel_of(draft)}
                for draft in drafts
                if draft.key in wanted
            ],
            "arms": [dataclasses.asdict(arm) for arm in arms],
            "kernel": tuning.kernel,
            "rival": any(arm.on_rival for arm in arms),
            "dtype": dtype,
            "device": ctx.device,
            "num_threads": tuning.num_threads,
            "graphs": graphs,
            "seed": f"{ctx.seed}:{number}",
        }
        self._process = FreshProcess(f"{MeasuringProcess.__module__}:{MeasuringProcess.__name__}", order)
        self.facts: Mapping[str, Any] = self._process.reply_at_start
        self.kernels: dict[bool, str] = {False: str(self.facts["kernel"]), True: str(self.facts["rival_kernel"])}
        """What the target's passes run on, by whether the arm is `on_rival`."""

    def turns(
        self,
        contexts: Sequence[Sequence[int]],
        arms: Collection[Arm],
        *,
        num_tokens: int,
        tokens_a_slice: int,
        ignore_eos: bool,
    ) -> list[ArmRun]:
        """Let these arms continue the contexts by at most `num_tokens` tokens each, taking turns."""
        indices = [index for index, arm in enumerate(self.arms) if arm in arms]
        replies = self._process.ask(
            {
                "do": "turns",
                "contexts": [list(context) for context in contexts],
                "arms": indices,
                "num_tokens": num_tokens,
                "tokens_a_slice": tokens_a_slice,
                "ignore_eos": ignore_eos,
            }
        )
        return [
            ArmRun(
                self.arms[index],
                [_decoded(one) for one in reply["decoded"]],
                [Slice(*each) for each in reply["slices"]],
                reply["prefill_ns"],
            )
            for index, reply in zip(indices, replies, strict=True)
        ]

    def texts(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Each prompt and exactly `num_tokens` greedy tokens after it."""
        asked = {"do": "texts", "prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        found: list[list[int]] = self._process.ask(asked)
        return found

    def conditions(self) -> dict[str, Any]:
        """Load, clock and governor of the machine now."""
        found: dict[str, Any] = self._process.ask({"do": "conditions"})
        return found

    def clock_mhz(self) -> float | None:
        """The clock of what computes now; None where the machine does not tell."""
        found: float | None = self._process.ask({"do": "clock_mhz"})
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.__exit__(kind, error, at)


def slice_length(plain: ArmRun) -> int:
    """Tokens of a slice, from what a plain round takes: see SLICE_NS."""
    rounds = [ns for one in plain.whole_slices() for ns in one.round_ns]
    return max(1, min(LONGEST_SLICE, round(SLICE_NS / steady(rounds)))) if rounds else 1


def seconds_a_token(runs: Sequence[ArmRun]) -> float:
    """What a token takes in all of these arms together, as the clock went: to say beforehand how long it takes."""
    return sum(sum(sum(one.round_ns) for one in run.slices) / len(run.decoded[0].tokens) for run in runs) / 1e9


def _decoded(said: Mapping[str, Any]) -> Decoded:
    return Decoded(**{**said, "rounds": [RoundFacts(*facts) for facts in said["rounds"]]})
