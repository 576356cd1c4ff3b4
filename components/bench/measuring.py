"""The owner's side of a measuring process: typed requests and replies."""

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
"""Time of plain decoding in one slice: long against the cache misses after a change of arms, short against the seconds
for which other work disturbs."""
MAX_SLICE_TOKENS: Final = 16
"""Most tokens of a slice."""
FIRST_SHARE: Final = 0.6
"""The share of the time budget for the least number of processes, enough on a quiet machine."""


class WholeSlice(NamedTuple):
    """Rounds of one slice, in nanoseconds: each round, its pass of the target, its proposal.

    drafted: tokens that were drafted in each round, over the whole batch.
    """

    round_ns: list[int]
    target_ns: list[int]
    draft_ns: list[int]
    drafted: list[int]

    @property
    def host_ns(self) -> list[int]:
        """The rest of each round: the decoding loop itself."""
        return [a - b - c for a, b, c in zip(*self[:3], strict=True)]


class ArmRun(NamedTuple):
    """One arm's generations, decoded as a batch, and its turns."""

    arm: Arm
    decoded: list[Decoded]
    slices: list[Slice]
    prefill_ns: int

    def whole_slices(self) -> list[WholeSlice]:
        """The rounds in which the whole batch took part, slice by slice, without the generation's first round.

        The first round's proposal processes the whole prompt; a finished sequence leaves the batch.
        """
        whole_slices, first_number = [], 0
        for turn in self.slices:
            rounds = list(enumerate(zip(*turn[1:], strict=True), start=first_number))
            first_number += len(rounds)
            whole = [
                (ns, target, draft, sum(decoded.rounds[number].drafted for decoded in self.decoded))
                for number, (ns, target, draft, size) in rounds
                if number and size == len(self.decoded)
            ]
            if whole:
                whole_slices.append(WholeSlice(*(list(column) for column in zip(*whole, strict=True))))
        return whole_slices

    @property
    def first_round(self) -> tuple[int, int, int]:
        """(round, target, draft) ns of the first round."""
        first = self.slices[0]
        return first.round_ns[0], first.target_ns[0], first.draft_ns[0]


class Measuring:
    """A fresh process with target and drafters loaded. number: its number among those of a measurement, from 1."""

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
        draft_keys = {arm.draft_key for arm in arms}
        order = {
            "target": {"key": target.key, "path": str(target.path)},
            "drafts": [
                {"key": draft.key, "path": str(draft.path), "kernel": tuning.kernel_of(draft)}
                for draft in drafts
                if draft.key in draft_keys
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
        """The kernel of the target's passes, keyed by Arm.on_rival."""

    def turns(
        self,
        contexts: Sequence[Sequence[int]],
        arms: Collection[Arm],
        *,
        num_tokens: int,
        tokens_a_slice: int,
        ignore_eos: bool,
    ) -> list[ArmRun]:
        """Continue the contexts by at most `num_tokens` tokens with each of these arms, in turns."""
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
                [_decoded(record) for record in reply["decoded"]],
                [Slice(*each) for each in reply["slices"]],
                reply["prefill_ns"],
            )
            for index, reply in zip(indices, replies, strict=True)
        ]

    def texts(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Each prompt and exactly `num_tokens` greedy tokens after it."""
        request = {"do": "texts", "prompts": [list(prompt) for prompt in prompts], "num_tokens": num_tokens}
        texts: list[list[int]] = self._process.ask(request)
        return texts

    def conditions(self) -> dict[str, Any]:
        """The machine's current load, clock and governor (clock.conditions)."""
        conditions: dict[str, Any] = self._process.ask({"do": "conditions"})
        return conditions

    def clock_mhz(self) -> float | None:
        """The computing device's current clock; None where unknown."""
        megahertz: float | None = self._process.ask({"do": "clock_mhz"})
        return megahertz

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.__exit__(kind, error, at)


def slice_length(plain: ArmRun) -> int:
    """Tokens of a slice, so that plain decoding takes about SLICE_NS."""
    rounds = [ns for rounds_of_slice in plain.whole_slices() for ns in rounds_of_slice.round_ns]
    return max(1, min(MAX_SLICE_TOKENS, round(SLICE_NS / steady(rounds)))) if rounds else 1


def seconds_a_token(runs: Sequence[ArmRun]) -> float:
    """Seconds for one token in all of these arms together, undisturbed or not: an estimate for notes."""
    return sum(sum(sum(turn.round_ns) for turn in run.slices) / len(run.decoded[0].tokens) for run in runs) / 1e9


def _decoded(record: Mapping[str, Any]) -> Decoded:
    return Decoded(**{**record, "rounds": [RoundFacts(*facts) for facts in record["rounds"]]})
