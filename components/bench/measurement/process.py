"""Runs an object in a fresh Python process, with fresh memory layout and threads; it answers requests one at a time.

Two processes that measure the same thing differ by a few per cent for reasons that repetition inside one does not
show: memory addresses, shared pages, placement of threads. So a measurement is spread over several processes.

    process = FreshProcess("components.bench.measurement.worker:MeasuringProcess", order)
    reply = process.ask({"do": "turns", ...})

The process constructs `module:class` with the order and calls it with each request. Orders, requests and replies are
JSON lines over two pipes. The process ends when the pipe to it closes, even if its owner is killed.

The owner's side of a measuring process: typed requests and replies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from components.bench.calibration import Tuning
from components.bench.end_to_end.arms import Arm
from components.bench.measurement.slices import Slice
from components.bench.measurement.worker import MeasuringProcess
from components.contract import Context, Draft, Target, UserError
from components.decoding.chain import Decoded, RoundFacts
from components.speedup.statistics.bootstrap import steady

ROOT = Path(__file__).resolve().parents[3]


class FreshProcess:
    """The owner's end of the process. reply_at_start: the `facts` of the constructed object."""

    def __init__(self, what: str, order: Mapping[str, Any]) -> None:
        from_us, to_us = os.pipe(), os.pipe()
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        try:
            self._process = subprocess.Popen(
                # -P: a folder in which the owner runs may hold a package of the same name
                [sys.executable, "-P", "-m", __name__, str(from_us[0]), str(to_us[1]), what],
                pass_fds=(from_us[0], to_us[1]),
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            )
        finally:
            os.close(from_us[0])
            os.close(to_us[1])
        self._requests = os.fdopen(from_us[1], "w", encoding="utf-8")
        self._replies = os.fdopen(to_us[0], "r", encoding="utf-8")
        try:
            self.reply_at_start = self.ask(dict(order))
        except BaseException:
            self.close()
            raise

    def ask(self, request: Mapping[str, Any]) -> Any:
        """The reply to one request.

        Raises:
            UserError: the process raised one.
            RuntimeError: the process failed, with its traceback, or it has ended.
        """
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line.endswith("\n"):  # empty, or cut off when the process ended
            code = self._process.wait()
            raise RuntimeError(
                f"the measuring process ended with exit code {code} and without an answer (out of memory?)"
            )
        reply = json.loads(line)
        if "user_error" in reply:
            raise UserError(reply["user_error"])
        if "failed" in reply:
            raise RuntimeError(f"the measuring process failed:\n{reply['failed']}")
        return reply["reply"]

    def close(self) -> None:
        """Kill the process and wait for it: it has nothing to save, and an orderly exit takes a second."""
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):  # the process has ended with a request unread
            self._requests.close()
        self._replies.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _answer(make: Any, text: str) -> dict[str, Any]:
    try:
        return {"reply": make(json.loads(text))}
    except UserError as error:
        return {"user_error": str(error)}
    except Exception:  # the owner gets every failure and decides
        return {"failed": traceback.format_exc()}


def main() -> int:
    """Serve the two pipes named on the command line until the first is closed."""
    requests = os.fdopen(int(sys.argv[1]), "r", encoding="utf-8")
    replies = os.fdopen(int(sys.argv[2]), "w", encoding="utf-8")
    module, name = sys.argv[3].split(":")
    answer: Any = None

    def begin(order: dict[str, Any]) -> Any:
        nonlocal answer
        answer = getattr(importlib.import_module(module), name)(order)
        return answer.facts

    for line in requests:
        replies.write(json.dumps(_answer(begin if answer is None else answer, line)) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())


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
