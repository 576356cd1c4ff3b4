"""Measuring in fresh processes: target and drafters are loaded once, and arms decode the contexts of each request.

Two processes that measure the same thing differ by a few per cent for reasons that repetition inside one does not
show: memory addresses, shared pages, placement of threads. So a measurement is spread over several processes.

`Measuring` is the owner's side, with typed requests and replies; it has a `MeasuringProcess` constructed in a
`FreshProcess`, so the owner holds no weights.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypedDict

import torch

from components.bench import clock
from components.bench.calibration import Tuning
from components.bench.end_to_end.arms import Arm, check_branching, make_idle, tree_shape
from components.bench.measurement.fresh_process import FreshProcess
from components.bench.measurement.slices import ArmRun, Generation, Slice, take_turns, wrap_timed
from components.bench.prompts import greedy_answers, open_drafter
from components.bench.settings import Dtype
from components.contract import Context, Draft, Target, UserError
from components.decoding.batch import batch_rounds
from components.decoding.chain import Clock, Decoded, RoundFacts, Rounds, decode_rounds
from components.decoding.session import Session
from components.decoding.tree_shapes import DynamicShape
from components.drafts.interface import Drafter, Proposer
from components.drafts.methods.ngram import Ngram
from components.drafts.methods.one_block import GraphedChain, OneBlockDraft
from components.machine import free_ram
from components.outside_json import JsonObject
from components.targets.forward.cuda_graphs import GraphedTarget
from components.targets.forward.llama import FastTarget
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

FIRST_SHARE: Final = 0.6
"""The share of the time budget for the least number of processes, enough on a quiet machine."""


class Files(TypedDict):
    """An artifact that the process opens."""

    key: str
    path: str


class DraftFiles(Files):
    """A drafter, and the kernel of its linear layers."""

    kernel: str


class Order(TypedDict):
    """What a measuring process opens, and how. arms: the fields of each Arm. rival: also on plain kernels."""

    target: Files
    drafts: list[DraftFiles]
    arms: list[JsonObject]
    kernel: str
    rival: bool
    dtype: Dtype
    device: str
    num_threads: int
    graphs: bool
    seed: str


class ProcessFacts(TypedDict):
    """What a measuring process says of itself once it has opened everything. draft_kernels: by draft key."""

    kernel: str
    rival_kernel: str | None
    draft_kernels: dict[str, str]
    bytes_per_token: int
    free_bytes: int


class ArmReply(TypedDict):
    """The turns of one arm: the fields of each Decoded, and of each Slice."""

    decoded: list[JsonObject]
    slices: list[list[Any]]
    prefill_ns: int


class Measuring:
    """A fresh process with target and drafters loaded. number: its number among those of a measurement, from 1."""

    def __init__(
        self,
        number: int,
        target: Target,
        drafts: Sequence[Draft],
        arms: Sequence[Arm],
        tuning: Tuning,
        dtype: Dtype,
        ctx: Context,
        *,
        graphs: bool = False,
    ) -> None:
        self.number, self.arms = number, list(arms)
        draft_keys = {arm.draft_key for arm in arms}
        order: Order = {
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
        self.facts: ProcessFacts = self._process.reply_at_start
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

    def conditions(self) -> clock.Conditions:
        """The machine's current load, clock and governor (clock.conditions)."""
        conditions: clock.Conditions = self._process.ask({"do": "conditions"})
        return conditions

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.__exit__(kind, error, at)


def _decoded(record: JsonObject) -> Decoded:
    return Decoded(**{**record, "rounds": [RoundFacts(*facts) for facts in record["rounds"]]})


class MeasuringProcess:
    """Constructed with an order, called with requests."""

    def __init__(self, order: Order) -> None:
        torch.set_num_threads(int(order["num_threads"]))
        target = Target(key=order["target"]["key"], path=Path(order["target"]["path"]))
        opened = functools.partial(open_target, target, device=order["device"], dtype=order["dtype"])
        self.target: AbstractTarget = opened(kernel=order["kernel"])
        self.rival = opened(kernel="plain") if order["rival"] else None
        self.arms = [Arm.of_json(arm) for arm in order["arms"]]
        self.drafters: dict[str, Drafter] = {}
        for entry in order["drafts"]:
            draft = Draft(key=entry["key"], path=Path(entry["path"]))
            self.drafters[draft.key] = open_drafter(draft, self.target, entry["kernel"])
        for arm in self.arms:
            if arm.tree_budget is not None:
                check_branching(self.target, self.drafters[arm.draft_key], [arm.tree_budget])
        if order["graphs"]:
            self._record_graphs()
        self.order = random.Random(order["seed"])
        self.watch, self.clock = clock.stopwatch_for(self.target.device), clock.clock_for(self.target.device)
        self._sessions: dict[Arm, Session] = {}

    @property
    def facts(self) -> ProcessFacts:
        """Facts for the owner's rows."""
        return {
            "kernel": self.target.kernel,
            "rival_kernel": None if self.rival is None else self.rival.kernel,
            "draft_kernels": {key: drafter.kernel for key, drafter in self.drafters.items()},
            "bytes_per_token": self.target.new_cache(1, 1).bytes_per_token(),
            "free_bytes": free_memory(self.target.device),
        }

    def __call__(self, request: JsonObject) -> Any:
        """Answer {"do": "turns" | "texts" | "conditions", ...}; the rest are the method's arguments."""
        arguments = dict(request)
        handlers: dict[str, Callable[..., Any]] = {
            "turns": self.turns,
            "texts": self.texts,
            "conditions": self.conditions,
        }
        handle = handlers[arguments.pop("do")]
        with torch.inference_mode(), clock.quiet_interpreter():
            return handle(**arguments)

    def conditions(self) -> clock.Conditions:
        """Current load, clock and governor."""
        return clock.conditions(self.target.device)

    def texts(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Each prompt and exactly `num_tokens` greedy tokens after it, end-of-text ignored."""
        answers = greedy_answers(self.target, prompts, num_tokens, len(prompts))
        return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def turns(
        self, contexts: list[list[int]], arms: list[int], num_tokens: int, tokens_a_slice: int, ignore_eos: bool
    ) -> list[ArmReply]:
        """Continue the contexts (several: as a batch) with these arms, in turns."""
        live = {self.arms[index] for index in arms}
        self._sessions = {arm: cache for arm, cache in self._sessions.items() if arm in live}  # frees those of others
        generations = [self._generation(index, contexts, num_tokens, ignore_eos) for index in arms]
        take_turns(generations, tokens_a_slice, self.order)
        return [
            {
                "decoded": [asdict(decoded) for decoded in generation.result or []],
                "slices": [list(each) for each in generation.slices],
                "prefill_ns": generation.prefill_ns,
            }
            for generation in generations
        ]

    def _generation(
        self, index: int, contexts: list[list[int]], num_tokens: int, ignore_eos: bool
    ) -> Generation[list[Decoded]]:
        arm = self.arms[index]
        target = self.rival if arm.on_rival else self.target
        assert target is not None, "an arm on the rival was ordered without it"
        shape = self._shape(arm)
        timed_target, proposer, probe = wrap_timed(target, self._proposer(arm), self.watch, shape)
        limits: JsonObject = {"max_new_tokens": num_tokens, "ignore_eos": ignore_eos}

        def alone(turn_clock: Clock) -> Rounds[list[Decoded]]:
            session = self._session(arm, target, len(contexts[0]) + num_tokens + arm.rows_of_pass)
            settings = {"depth": arm.depth_of_loop, "session": session, "clock": turn_clock, "stop": arm.stop, **limits}
            return [(yield from decode_rounds(timed_target, proposer, contexts[0], **settings))]

        def together(turn_clock: Clock) -> Rounds[list[Decoded]]:
            settings = {"depth": arm.depth_of_loop} if shape is None else {"shape": shape}
            settings |= {"stop": arm.stop, "clock": turn_clock, **limits}
            return (yield from batch_rounds(timed_target, proposer, contexts, **settings))

        return Generation(alone if len(contexts) == 1 and shape is None else together, probe, self.clock)

    def _session(self, arm: Arm, target: AbstractTarget, capacity: int) -> Session:
        """The arm's own cache, which keeps its text while others have their turns."""
        if arm not in self._sessions:
            self._sessions[arm] = Session(target, capacity)
        return self._sessions[arm]

    def _shape(self, arm: Arm) -> DynamicShape | None:
        return None if arm.tree_budget is None else tree_shape(self.drafters[arm.draft_key].num_steps, arm.tree_budget)

    def _proposer(self, arm: Arm) -> Proposer | None:
        if arm.is_plain:
            return None
        proposer: Proposer = self.drafters[arm.draft_key] if arm.draft_key else Ngram()
        return make_idle(proposer) if arm.is_off else proposer

    def _record_graphs(self) -> None:
        """Record the small passes of target and drafters as CUDA graphs; on a CPU they are static but not recorded."""
        if not isinstance(self.target, FastTarget) or not self.target.can_be_recorded:
            kind = f"{self.target.shape.architecture} with the kernel {self.target.kernel}"
            raise UserError(f"graphs: {kind} cannot be recorded: leave graphs off")
        self.target, self.rival = GraphedTarget(self.target), None
        for key, drafter in self.drafters.items():
            if isinstance(drafter, OneBlockDraft):
                self.drafters[key] = GraphedChain(drafter)  # type: ignore[assignment]  # same interface


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_ram()
