"""The measuring side of a fresh process: loads target and drafters once, and decodes the contexts of each request.

The order names the files and kernels; requests then give contexts and arms, and the arms take turns on them
(slices.py). Requests and replies are JSON (process.py), so the owner holds no weights meanwhile.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from components.bench import clock
from components.bench.acceptance.trees import check_branching, tree_shape
from components.bench.clock import clock_mhz, device_state
from components.bench.cost.phases import wrap_timed
from components.bench.end_to_end.arms import Arm, make_idle
from components.bench.measurement.slices import Generation, take_turns
from components.bench.prompts import greedy_answers, open_drafter
from components.contract import Draft, Target, UserError
from components.decoding.batch import batch_rounds
from components.decoding.chain import Clock, Decoded, Rounds, decode_rounds
from components.decoding.session import Session
from components.decoding.tree_shapes import DynamicShape
from components.drafts.interface import Drafter, Proposer
from components.drafts.methods.graphed_chain import GraphedChain
from components.drafts.methods.ngram import Ngram
from components.drafts.methods.one_block import OneBlockDraft
from components.targets.forward.cuda_graphs import GraphedTarget
from components.targets.forward.llama import FastTarget
from components.targets.interface import AbstractTarget
from components.targets.load import open_target


class MeasuringProcess:
    """Constructed with an order, called with requests.

    The order: {"target": {key, path}, "drafts": [{key, path, kernel}], "arms": [Arm], "kernel", "rival": bool, "dtype",
    "device", "num_threads", "graphs": bool, "seed"}.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(int(order["num_threads"]))
        target = Target(key=order["target"]["key"], path=Path(order["target"]["path"]))
        placement = {"device": order["device"], "dtype": order["dtype"]}
        self.target: AbstractTarget = open_target(target, kernel=order["kernel"], **placement)
        self.rival = open_target(target, kernel="plain", **placement) if order["rival"] else None
        self.arms = [Arm(**arm) for arm in order["arms"]]
        self.drafters: dict[str, Drafter] = {}
        for entry in order["drafts"]:
            draft = Draft(key=entry["key"], path=Path(entry["path"]))
            self.drafters[draft.key] = open_drafter(draft, self.target, entry["kernel"])
        for arm in self.arms:
            if arm.tree_budget is not None:
                check_branching(self.drafters[arm.draft_key], [arm.tree_budget])
        if order["graphs"]:
            self._record_graphs()
        self.order = random.Random(order["seed"])
        self.watch, self.clock = clock.stopwatch_for(self.target.device), clock.clock_for(self.target.device)
        self._sessions: dict[Arm, Session] = {}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts for the owner's rows."""
        return {
            "kernel": self.target.kernel,
            "rival_kernel": None if self.rival is None else self.rival.kernel,
            "draft_kernels": {key: drafter.kernel for key, drafter in self.drafters.items()},
            "bytes_per_token": self.target.new_cache(1, 1).bytes_per_token(),
            "free_bytes": free_memory(self.target.device),
        }

    def __call__(self, request: dict[str, Any]) -> Any:
        """Answer {"do": "turns" | "texts" | "conditions" | "clock_mhz", ...}; the rest are the method's arguments."""
        arguments = dict(request)
        handlers: dict[str, Callable[..., Any]] = {
            "turns": self.turns,
            "texts": self.texts,
            "conditions": self.conditions,
            "clock_mhz": self.clock_mhz,
        }
        handle = handlers[arguments.pop("do")]
        with torch.inference_mode(), clock.quiet_interpreter():
            return handle(**arguments)

    def conditions(self) -> dict[str, Any]:
        """Current load, clock and governor."""
        return clock.conditions(self.target.device)

    def clock_mhz(self) -> float | None:
        """The computing device's current clock; None where unknown."""
        return clock_mhz(device_state(self.target.device))

    def texts(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Each prompt and exactly `num_tokens` greedy tokens after it, end-of-text ignored."""
        answers = greedy_answers(self.target, prompts, num_tokens, len(prompts))
        return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def turns(
        self, contexts: list[list[int]], arms: list[int], num_tokens: int, tokens_a_slice: int, ignore_eos: bool
    ) -> list[dict[str, Any]]:
        """Continue the contexts (several: as a batch) with these arms, in turns.

        Returns for each arm {"decoded": [Decoded, ...], "slices": [Slice, ...], "prefill_ns"}.
        """
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
        limits: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": ignore_eos}

        def alone(turn_clock: Clock) -> Rounds[list[Decoded]]:
            session = self._session(arm, target, len(contexts[0]) + num_tokens + arm.rows_of_pass)
            settings = {"depth": arm.depth_of_loop, "session": session, "clock": turn_clock, **limits}
            return [(yield from decode_rounds(timed_target, proposer, contexts[0], **settings))]

        def together(turn_clock: Clock) -> Rounds[list[Decoded]]:
            settings = {"depth": arm.depth_of_loop} if shape is None else {"shape": shape}
            return (yield from batch_rounds(timed_target, proposer, contexts, clock=turn_clock, **settings, **limits))

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
        if not isinstance(self.target, FastTarget):
            raise UserError(f"graphs: the kernel {self.target.kernel} cannot be recorded: leave graphs off")
        self.target, self.rival = GraphedTarget(self.target), None
        for key, drafter in self.drafters.items():
            if isinstance(drafter, OneBlockDraft):
                self.drafters[key] = GraphedChain(drafter)  # type: ignore[assignment]  # same interface


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
