"""Blocks of cost cells: every phase and depth once, in random order, on the same text.

Text: test prompts followed by the target's own greedy answers. A cell at KV length L decodes `tokens` tokens after a
context that ends half as many before L, so that L is the mean.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from components.bench.calibration import Engine, fastest_engine
from components.bench.clock import block_stat, clock_for, threads
from components.bench.phases import PhaseTimes, time_phases
from components.bench.subjects import encoded_prompts, greedy_answers, open_drafter
from components.contract import Context, Draft, Prompts, Target, UserError
from components.decoding.session import Session
from components.drafts.draft import AbstractDraft
from components.rows import CostCell
from components.targets.load import open_target
from components.targets.model import AbstractTarget

CONTROL_REPS = 3
NUM_TEXTS = 8


@dataclass
class Bench:
    """One drafter on one target, ready to be timed block by block."""

    target_key: str
    draft_key: str
    engine: Engine
    drafter: AbstractDraft
    texts: list[list[int]]
    kv_lens: list[int]
    depths: list[int]
    tokens: int
    dtype: str
    seed: int
    clock: Callable[[], int]
    sessions: dict[AbstractTarget, Session] = field(default_factory=dict)

    @property
    def method(self) -> str:
        """The drafting method."""
        return self.drafter.method

    def block(self, block: int) -> list[CostCell]:
        """All cells of one block, measured in an order drawn from the seed and the block's number."""
        cells: list[CostCell] = []
        engine = self.engine
        cases = [(engine.target, depth) for depth in (0, *self.depths)]
        cases += [(engine.rival, 0)] if engine.rival is not None else []
        order = [(kv_len, *case) for kv_len in self.kv_lens for case in cases]
        random.Random(f"{self.seed}:{block}").shuffle(order)
        text = self.texts[block % len(self.texts)]
        for kv_len, target, depth in order:
            times = self._run(target, text, kv_len, depth)
            timed = {"verify" if depth else "target_step": times.target, "draft": times.draft, "host": times.host}
            if target is engine.rival:
                timed = {"target_step": times.target}  # a second baseline has nothing else to say
            for phase, samples in timed.items():
                if samples:
                    cells.append(self._cell(phase, target, depth, kv_len, block, samples))
        return cells

    def control(self, block: int) -> list[CostCell]:
        """Plain steps on one fixed text, to be compared between start and end."""
        kv_len = self.kv_lens[0]
        target = self.engine.target
        runs = [self._run(target, self.texts[0], kv_len, 0) for _ in range(CONTROL_REPS)]
        return [self._cell("control", target, 0, kv_len, block, run.target) for run in runs]

    def _run(self, target: AbstractTarget, text: Sequence[int], kv_len: int, depth: int) -> PhaseTimes:
        if target not in self.sessions:
            self.sessions[target] = Session(target, max(self.kv_lens) + self.tokens + max(self.depths) + 1)
        context = text[: max(1, kv_len - self.tokens // 2)]
        return time_phases(
            target,
            self.drafter if depth else None,
            context,
            depth=depth,
            num_tokens=self.tokens,
            session=self.sessions[target],
            clock=self.clock,
        )

    def _cell(
        self, phase: str, target: AbstractTarget, depth: int, kv_len: int, block: int, samples: Sequence[int]
    ) -> CostCell:
        stat = block_stat(samples)
        return CostCell(
            target_key=self.target_key,
            # Plain steps belong to no drafter; a row says so in `draft_key` and `method`.
            draft_key=self.draft_key if depth else "",
            method=self.method if depth else "none",
            phase=phase,
            depth_k=depth,
            batch_size=1,
            num_rows=depth if phase == "draft" else depth + 1,
            kv_len=kv_len,
            block=block,
            reps_in_block=stat.num_samples,
            median_ns=stat.median,
            mad_ns=stat.mad,
            dtype=self.dtype,
            kernel=target.kernel,
            num_threads=self.engine.num_threads,
        )


def open_bench(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    kv_lens: Sequence[int],
    tokens: int,
    dtype: Literal["float32", "bfloat16"],
    num_threads: int,
    max_depth: int,
    ctx: Context,
) -> Bench:
    """Load everything, make the texts, pick threads and kernel.

    Raises UserError when the target has no positions for the longest KV length.
    """
    longest = max(kv_lens) + tokens
    with threads(ctx.num_threads):
        plain = open_target(target, device=ctx.device, dtype=dtype, kernel="plain")
        if longest + 65 > plain.shape.max_position_embeddings:
            raise UserError(
                f"kv_lens: {max(kv_lens)} tokens and what a block adds do not fit the target's "
                f"{plain.shape.max_position_embeddings} positions: ask for shorter ones"
            )
        asked = encoded_prompts(target, plain, prompts, "test", 0, ctx)[:NUM_TEXTS]
        # Mostly answer, as in use: prompts are cut to half of what is needed.
        starts = [prompt.ids[: longest // 2] for prompt in asked]
        answers = greedy_answers(plain, starts, longest, len(starts))
    texts = [[*start, *answer] for start, answer in zip(starts, answers, strict=True)]
    engine = fastest_engine(
        target,
        texts[0][: max(1, max(kv_lens) - tokens // 2)],
        dtype=dtype,
        device=ctx.device,
        max_threads=ctx.num_threads,
        num_threads=num_threads,
    )
    drafter = open_drafter(draft, engine.target)
    deepest = min(max_depth or drafter.num_steps, drafter.max_depth)
    return Bench(
        target_key=target.key,
        draft_key=draft.key,
        engine=engine,
        drafter=drafter,
        texts=texts,
        kv_lens=sorted(set(kv_lens)),
        depths=list(range(1, deepest + 1)),
        tokens=tokens,
        dtype=dtype,
        seed=ctx.seed,
        clock=clock_for(engine.target.device),
    )
