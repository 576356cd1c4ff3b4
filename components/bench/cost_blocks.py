"""Blocks of cost cells: every phase, depth, batch size and KV length once, in random order, on the same texts.

What a cell decodes stands in cost_texts.py, how a generation is taken apart in phases.py. A control (plain steps on one
fixed text) runs before the first block and after the last: when it differs, so may everything between.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, cast

import psutil
import torch

from components.bench.calibration import Engine, fastest_engine
from components.bench.clock import Stopwatch, block_stat, load_average, stopwatch_for, threads
from components.bench.cost_texts import contexts, longest_context, make_texts
from components.bench.device_state import clock_mhz, device_state
from components.bench.phases import PhaseTimes, time_phases
from components.bench.subjects import encoded_prompts, open_drafter
from components.bench.trees import check_branching, tree_shape
from components.bench.tuning import Tuning
from components.contract import Context, Draft, Prompts, Target, UserError
from components.decoding.session import Session
from components.decoding.tree_shapes import DynamicShape, TreeShape
from components.drafts.draft import Drafter
from components.drafts.graphed_chain import GraphedChain
from components.drafts.one_block import OneBlockDraft
from components.rows import CostCell
from components.targets.fast import FastTarget
from components.targets.graphed import GraphedTarget
from components.targets.load import open_target
from components.targets.model import AbstractTarget

CONTROL_REPS = 5
MEMORY_SHARE = 0.8
NUM_TEXTS = 8


@dataclass(frozen=True)
class Case:
    """One cell of a block before it is measured."""

    target: AbstractTarget
    depth: int
    batch_size: int
    kv_len: int
    shape: TreeShape | None = None


@dataclass
class Bench:
    """One drafter on one target, ready to be timed block by block."""

    target_key: str
    draft_key: str
    engine: Engine
    drafter: Drafter
    texts: list[list[int]]
    kv_lengths: list[int]
    batch_sizes: list[int]
    depths: list[int]
    shapes: list[DynamicShape]
    tokens: int
    dtype: str
    seed: int
    watch: Stopwatch
    left_out: list[str] = field(default_factory=list)  # cells whose caches do not fit the memory
    sessions: dict[AbstractTarget, Session] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The drafting method."""
        return self.drafter.method

    def cases(self) -> list[Case]:
        """Every cell of a block: plain decoding on each engine, and every depth."""
        target, rival = self.engine.target, self.engine.rival
        ways: list[tuple[AbstractTarget, int, TreeShape | None]] = [(target, k, None) for k in (0, *self.depths)]
        ways += [(rival, 0, None)] if rival is not None else []
        ways += [(target, shape.depth, shape) for shape in self.shapes]
        return [
            Case(engine, depth, batch_size, kv_len, shape)
            for batch_size in self.batch_sizes
            for kv_len in self.kv_lengths
            if f"batch {batch_size} kv {kv_len}" not in self.left_out
            for engine, depth, shape in ways
        ]

    def leave_out_what_does_not_fit(self) -> None:
        """Note the cells whose caches need more than MEMORY_SHARE of the free memory: a swapping cell says nothing.

        Raises UserError when no cell is left.
        """
        token = self.engine.target.new_cache(1, 1).bytes_per_token()
        room = MEMORY_SHARE * free_memory(self.engine.target.device)
        for batch_size in self.batch_sizes:
            for kv_len in self.kv_lengths:
                if batch_size * longest_context([kv_len], [batch_size], self.tokens) * token > room:
                    self.left_out.append(f"batch {batch_size} kv {kv_len}")
        if not self.cases():
            raise UserError(f"batch_sizes, kv_lengths: no cell fits into {room / 2**30:.1f} GiB: ask for smaller ones")

    def block(self, block: int) -> list[CostCell]:
        """All cells of one block, measured in an order drawn from the seed and the block's number."""
        order = self.cases()
        random.Random(f"{self.seed}:{block}").shuffle(order)
        cells: list[CostCell] = []
        for case in order:
            times = self._run(case, block)
            timed = {"verify" if case.depth else "target_step": times.target}
            if case.target is not self.engine.rival:  # a second baseline has nothing else to say
                timed |= {"draft": times.draft, "host": times.host, "prefill": [times.prefill]}
                timed["draft_prefill"] = [] if times.draft_prefill is None else [times.draft_prefill]
            cells += [self._cell(phase, case, block, samples) for phase, samples in timed.items() if samples]
        return self._under_these_conditions(cells)

    def control(self, block: int) -> list[CostCell]:
        """Plain steps on one fixed text, to be compared between start and end."""
        case = Case(self.engine.target, 0, min(self.batch_sizes), self.kv_lengths[0])
        runs = [self._run(case, 0) for _ in range(CONTROL_REPS)]
        return self._under_these_conditions([self._cell("control", case, block, run.target) for run in runs])

    def _run(self, case: Case, block: int) -> PhaseTimes:
        target = case.target
        if target not in self.sessions:
            self.sessions[target] = Session(target, self._capacity())
        return time_phases(
            target,
            self.drafter if case.depth else None,
            contexts(self.texts, block, case.batch_size, case.kv_len, self.tokens),
            depth=case.depth,
            num_tokens=self.tokens,
            session=self.sessions[target],
            watch=self.watch,
            shape=case.shape,
        )

    def _capacity(self) -> int:
        """Tokens of the longest sequence of any cell, with the guesses of its last round."""
        return longest_context(self.kv_lengths, self.batch_sizes, self.tokens) + max(self.depths) + 1

    def _cell(self, phase: str, case: Case, block: int, samples: Sequence[int]) -> CostCell:
        stat = block_stat(samples)
        depth = case.depth
        return CostCell(
            target_key=self.target_key,
            # Plain steps belong to no drafter; a row says so in `draft_key` and `method`.
            draft_key=self.draft_key if depth else "",
            method=self.method if depth else "none",
            phase=phase,
            depth_k=depth,
            batch_size=case.batch_size,
            num_rows=self._num_rows(phase, case),
            kv_len=case.kv_len,
            block=block,
            reps_in_block=stat.num_samples,
            median_ns=stat.median,
            mad_ns=stat.mad,
            dtype=self.dtype,
            kernel=case.target.kernel,
            num_threads=self.engine.num_threads,
            tree_budget=None if case.shape is None else case.shape.num_guesses,
        )

    def _num_rows(self, phase: str, case: Case) -> int:
        """Rows of one sequence in one call."""
        if phase in ("prefill", "draft_prefill"):
            return max(1, case.kv_len - self.tokens // 2)
        guesses = case.depth if case.shape is None else case.shape.num_guesses
        return guesses if phase == "draft" else guesses + 1

    def _under_these_conditions(self, cells: list[CostCell]) -> list[CostCell]:
        """The cells with the load and the clock of the machine as they are now."""
        load, clock = load_average(), clock_mhz(device_state(self.engine.target.device))
        return [dataclasses.replace(cell, load_average=load, clock_mhz=clock) for cell in cells]


def open_bench(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    kv_lengths: Sequence[int],
    batch_sizes: Sequence[int],
    tokens: int,
    dtype: Literal["float32", "bfloat16"],
    num_threads: int,
    tuning: Tuning | None,
    max_depth: int,
    trees: Sequence[int],
    graphs: bool,
    ctx: Context,
) -> Bench:
    """Load everything, make the texts, pick threads and kernel unless `tuning` has.

    graphs: record small passes (targets/graphed.py).
    Raises UserError when the target has no positions for the longest KV length, or trees are asked of a drafter whose
    guesses do not branch.
    """
    longest = longest_context(kv_lengths, batch_sizes, tokens)
    with threads(ctx.num_threads):
        plain = open_target(target, device=ctx.device, dtype=dtype, kernel="plain")
        if longest + 65 > plain.shape.max_position_embeddings:
            raise UserError(
                f"kv_lengths: {max(kv_lengths)} tokens and what a block adds do not fit the target's "
                f"{plain.shape.max_position_embeddings} positions: ask for shorter ones"
            )
        asked = encoded_prompts(target, plain, prompts, "test", 0, ctx)[: max(NUM_TEXTS, *batch_sizes)]
        texts = make_texts(plain, asked, longest)
    engine = fastest_engine(
        target,
        texts[0][: max(1, max(kv_lengths) - tokens // 2)],
        dtype=dtype,
        device=ctx.device,
        max_threads=ctx.num_threads,
        num_threads=num_threads,
        tuning=tuning,
    )
    with threads(engine.num_threads):  # its linears are laid out for the threads that it will draft on
        drafter = open_drafter(draft, engine.target)
        if graphs:
            engine, drafter = with_graphs(engine, drafter)
    deepest = min(max_depth or drafter.num_steps, drafter.max_depth)
    check_branching(drafter, trees)
    bench = Bench(
        target_key=target.key,
        draft_key=draft.key,
        engine=engine,
        drafter=drafter,
        texts=texts,
        kv_lengths=sorted(set(kv_lengths)),
        batch_sizes=sorted(set(batch_sizes)),
        depths=list(range(1, deepest + 1)),
        shapes=[tree_shape(drafter.num_steps, budget) for budget in sorted(set(trees))],
        tokens=tokens,
        dtype=dtype,
        seed=ctx.seed,
        watch=stopwatch_for(engine.target.device),
    )
    bench.leave_out_what_does_not_fit()
    return bench


def with_graphs(engine: Engine, drafter: Drafter) -> tuple[Engine, Drafter]:
    """The same with recorded passes; a drafter of another kind than one block drafts as it is.

    Raises UserError for a target that runs on transformers.
    """
    if not isinstance(engine.target, FastTarget):
        raise UserError(f"graphs: the kernel {engine.target.kernel} cannot be recorded: leave graphs off")
    graphed = engine._replace(target=GraphedTarget(engine.target), rival=None)
    if isinstance(drafter, OneBlockDraft):
        return graphed, cast(Drafter, GraphedChain(drafter))
    return graphed, drafter


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
