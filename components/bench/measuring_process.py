"""What a fresh process of a measurement does: it opens target and drafters once, and decodes what it is told to.

The order says what to open and on which kernels; requests then give contexts and arms, and the arms take turns on them
(slices.py). Everything that comes in and goes out is JSON (fresh_process.py), so that the owner needs no torch tensors,
and holds no weights while this process measures.
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
from components.bench.arms import Arm
from components.bench.device_state import clock_mhz, device_state
from components.bench.loaded_off import kept_off
from components.bench.phases import timed
from components.bench.slices import Generation, take_turns
from components.bench.subjects import greedy_answers, open_drafter
from components.bench.trees import check_branching, tree_shape
from components.contract import Draft, Target, UserError
from components.decoding.batch import batch_rounds
from components.decoding.chain import Clock, Decoded, Rounds, decode_rounds
from components.decoding.session import Session
from components.decoding.tree_shapes import DynamicShape
from components.drafts.draft import Drafter, Proposer
from components.drafts.graphed_chain import GraphedChain
from components.drafts.ngram import Ngram
from components.drafts.one_block import OneBlockDraft
from components.targets.fast import FastTarget
from components.targets.graphed import GraphedTarget
from components.targets.load import open_target
from components.targets.model import AbstractTarget


class MeasuringProcess:
    """Opened by an order, asked by requests; see `__call__`.

    The order: {"target": {key, path}, "drafts": [{key, path, kernel}], "arms": [Arm], "kernel", "rival": bool, "dtype",
    "device", "num_threads", "graphs": bool, "seed"}.
    """

    def __init__(self, order: dict[str, Any]) -> None:
        torch.set_num_threads(int(order["num_threads"]))
        target = Target(key=order["target"]["key"], path=Path(order["target"]["path"]))
        opened = {"device": order["device"], "dtype": order["dtype"]}
        self.target: AbstractTarget = open_target(target, kernel=order["kernel"], **opened)
        self.rival = open_target(target, kernel="plain", **opened) if order["rival"] else None
        self.arms = [Arm(**arm) for arm in order["arms"]]
        self.drafters: dict[str, Drafter] = {}
        for one in order["drafts"]:
            draft = Draft(key=one["key"], path=Path(one["path"]))
            self.drafters[draft.key] = open_drafter(draft, self.target, one["kernel"])
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
        """What the owner writes into its rows."""
        return {
            "kernel": self.target.kernel,
            "rival_kernel": None if self.rival is None else self.rival.kernel,
            "draft_kernels": {key: drafter.kernel for key, drafter in self.drafters.items()},
            "bytes_per_token": self.target.new_cache(1, 1).bytes_per_token(),
            "free_bytes": free_memory(self.target.device),
        }

    def __call__(self, request: dict[str, Any]) -> Any:
        """Answer {"do": "turns" | "texts" | "conditions" | "clock_mhz", ...}, the rest being the method's arguments."""
        asked = dict(request)
        known: dict[str, Callable[..., Any]] = {
            "turns": self.turns,
            "texts": self.texts,
            "conditions": self.conditions,
            "clock_mhz": self.clock_mhz,
        }
        do = known[asked.pop("do")]
        with torch.inference_mode(), clock.quiet_interpreter():
            return do(**asked)

    def conditions(self) -> dict[str, Any]:
        """Load, clock and governor now."""
        return clock.conditions(self.target.device)

    def clock_mhz(self) -> float | None:
        """The clock of what computes now; None where the machine does not tell."""
        return clock_mhz(device_state(self.target.device))

    def texts(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Each prompt and exactly `num_tokens` greedy tokens after it, end-of-text ignored."""
        answers = greedy_answers(self.target, prompts, num_tokens, len(prompts))
        return [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]

    def turns(
        self, contexts: list[list[int]], arms: list[int], num_tokens: int, tokens_a_slice: int, ignore_eos: bool
    ) -> list[dict[str, Any]]:
        """Let these arms continue the contexts (several: side by side, as a batch) by taking turns.

        Gives for each arm {"decoded": [Decoded, ...], "slices": [Slice, ...], "prefill_ns"}.
        """
        wanted = {self.arms[index] for index in arms}
        self._sessions = {arm: session for arm, session in self._sessions.items() if arm in wanted}  # others give room
        generations = [self._generation(index, contexts, num_tokens, ignore_eos) for index in arms]
        take_turns(generations, tokens_a_slice, self.order)
        return [
            {
                "decoded": [asdict(one) for one in generation.result or []],
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
        timed_target, proposer, probe = timed(target, self._proposer(arm), self.watch, shape)
        asked: dict[str, Any] = {"max_new_tokens": num_tokens, "ignore_eos": ignore_eos}

        def alone(own: Clock) -> Rounds[list[Decoded]]:
            session = self._session(arm, target, len(contexts[0]) + num_tokens + arm.rows_of_pass)
            one = yield from decode_rounds(
                timed_target, proposer, contexts[0], depth=arm.depth_of_loop, session=session, clock=own, **asked
            )
            return [one]

        def together(own: Clock) -> Rounds[list[Decoded]]:
            how: dict[str, Any] = {"depth": arm.depth_of_loop} if shape is None else {"shape": shape}
            return (yield from batch_rounds(timed_target, proposer, contexts, clock=own, **how, **asked))

        return Generation(alone if len(contexts) == 1 and shape is None else together, probe, self.clock)

    def _session(self, arm: Arm, target: AbstractTarget, capacity: int) -> Session:
        """The arm's own cache: others take their turns while it holds a text."""
        if arm not in self._sessions:
            self._sessions[arm] = Session(target, capacity)
        return self._sessions[arm]

    def _shape(self, arm: Arm) -> DynamicShape | None:
        return None if arm.tree_budget is None else tree_shape(self.drafters[arm.draft_key].num_steps, arm.tree_budget)

    def _proposer(self, arm: Arm) -> Proposer | None:
        if arm.is_plain:
            return None
        proposer: Proposer = self.drafters[arm.draft_key] if arm.draft_key else Ngram()
        return kept_off(proposer) if arm.is_off else proposer

    def _record_graphs(self) -> None:
        """Record the small passes of target and drafters as CUDA graphs; on a CPU they are static but not recorded."""
        if not isinstance(self.target, FastTarget):
            raise UserError(f"graphs: the kernel {self.target.kernel} cannot be recorded: leave graphs off")
        self.target, self.rival = GraphedTarget(self.target), None
        for key, drafter in self.drafters.items():
            if isinstance(drafter, OneBlockDraft):
                self.drafters[key] = GraphedChain(drafter)  # type: ignore[assignment]  # it drafts as what it records


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
