"""Step `bench.measure_step_cost`: times the phases of a round on this machine, over batch sizes and KV lengths.

T_target (one row a sequence), T_verify(k + 1 rows), T_draft(k proposals) and the rest of a round, each timed inside the
real decoding loop on the target's own text; prefill apart. All drafters are measured together, against one plain
decoding. Their arms take turns of some tens of milliseconds (measurement/slices.py), in several fresh processes in
sequence, until the costs of all arms are known to the asked precision or the time is spent; the step notes which.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from components.bench import clock
from components.bench.acceptance.trees import tree_arms
from components.bench.calibration import Tuning, resolve_tuning
from components.bench.cost.blocks import (
    LONGEST_ANSWER,
    BlockConditions,
    Grid,
    Setting,
    cost_cells,
    longest_context,
    run_block,
)
from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.end_to_end.compare import check_loop_supports
from components.bench.end_to_end.request_rows import LOAD_OF_OTHERS
from components.bench.measurement.process import FIRST_SHARE, Measuring
from components.bench.measurement.slices import ArmRun, seconds_a_token, slice_length
from components.bench.measurement.stopping import cost_half_widths
from components.bench.prompts import EncodedPrompt, fitting_prompts, num_positions
from components.bench.settings import BatchSizes, Dtype, KvLengths, TreeBudgets
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.definitions import steady
from components.drafts.storage.files import read_record
from components.outside_json import JsonObject
from components.rows import CostCell, QualityFlag, write_rows
from components.speedup.prediction.costs import cells_to_measure_again

NUM_TEXTS = 8
WARM_UP_TOKENS = 12
MIN_TOKENS = 8  # of a block, even for a slow target


def measure_step_cost(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    tuning: Measurements | None,
    *,
    max_depth: int,
    batch_sizes: BatchSizes,
    kv_lengths: KvLengths,
    trees: TreeBudgets,
    graphs: bool,
    precision: float,
    seconds: float,
    num_processes: int,
    tokens_per_block: int,
    dtype: Dtype,
    num_threads: int,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.measure_step_cost`; its settings are explained in components/bench/steps.py."""
    for draft in drafts:
        check_loop_supports(draft, batch_sizes, trees)
    positions = num_positions(target)
    settings = [Setting(size, length) for size in sorted(set(batch_sizes)) for length in sorted(set(kv_lengths))]
    if longest_context(kv_lengths, batch_sizes, tokens_per_block) + 65 > positions:
        raise UserError(
            f"kv_lengths: {max(kv_lengths)} tokens and what a block adds do not fit the target's {positions} "
            "positions: ask for shorter ones"
        )
    encoded = fitting_prompts(target, prompts, "test", 0, ctx)[: max(NUM_TEXTS, *batch_sizes)]
    tuned = resolve_tuning(tuning, target, drafts, encoded[0].ids, dtype, num_threads, ctx, machine)
    arms = plan_arms(drafts, max_depth, trees, rival=tuned.rival and not graphs)
    grid = Grid(tuple(arms), tuple(settings), tokens_per_block)
    ctx.note(
        f"{len(arms)} arms x {len(settings)} settings in {num_processes} processes or more, for {seconds:.0f} s, or "
        f"until every cost is known to {precision:.1%}"
    )
    study = CostStudy(target, drafts, grid, encoded, tuned, dtype, graphs, ctx)
    study.run(seconds, num_processes, precision)
    write_rows(ctx.out, [*study.cells, *study.flags(machine.num_cores)])
    facts = {"draft_keys": [draft.key for draft in drafts], "machine_id": machine.machine_id}
    return Measurements.of_step(
        ctx, {**facts, "precision_asked": precision, **study.facts(), **_headline_facts(study.cells)}
    )


def _headline_facts(cells: Sequence[CostCell]) -> JsonObject:
    """The facts that people look for first: the methods, and their times."""
    return {"methods": sorted({cell.method for cell in cells} - {"none"}), "medians_ms": medians(cells)}


def plan_arms(drafts: Sequence[Draft], max_depth: int, trees: Sequence[int], *, rival: bool) -> list[Arm]:
    """Plain decoding, on both kernels with a rival, and every drafter at every depth and as trees."""
    arms = [PLAIN, *([RIVAL] if rival else [])]
    for draft in drafts:
        record = read_record(draft.path)
        method, trained = str(record["method"]), int(record["num_steps"])
        deepest = min(max_depth or trained, int(record["max_depth"]))
        arms += [Arm(method, draft.key, depth) for depth in range(1, deepest + 1)]
        arms += tree_arms(method, draft.key, trained, trees)
    return arms


def medians(cells: Sequence[CostCell]) -> dict[str, float]:
    """Phase -> steady time over all blocks in ms, such as "eagle3 verify k=3" -> 5.2; batch and length if several."""
    batches, lengths = ({getattr(cell, name) for cell in cells} for name in ("batch_size", "kv_len"))
    groups: dict[str, list[float]] = {}
    for cell in cells:
        name = cell.phase if cell.depth_k == 0 else f"{cell.method} {cell.phase} k={cell.depth_k}"
        name += "" if cell.tree_budget is None else f" tree={cell.tree_budget}"
        name += f" batch={cell.batch_size}" if len(batches) > 1 else ""
        name += f" kv={cell.kv_len}" if len(lengths) > 1 else ""
        groups.setdefault(name, []).append(cell.median_ns / 1e6)
    return {name: round(steady(times), 4) for name, times in sorted(groups.items())}


class CostStudy:
    """A running measurement: its rows so far, and their precision."""

    def __init__(
        self,
        target: Target,
        drafts: Sequence[Draft],
        grid: Grid,
        prompts: Sequence[EncodedPrompt],
        tuned: Tuning,
        dtype: Dtype,
        graphs: bool,
        ctx: Context,
    ) -> None:
        self.target, self.drafts, self.grid, self.prompts = target, drafts, grid, prompts
        self.tuned, self.dtype, self.graphs, self.ctx = tuned, dtype, graphs, ctx
        self.cells: list[CostCell] = []
        self.left_out: set[str] = set()
        self.conditions: clock.Conditions | None = None
        self.num_processes = self.num_blocks = 0
        self.texts: list[list[int]] = []
        self.kernel = self.stop_reason = ""

    def run(self, seconds: float, num_processes: int, precision: float) -> None:
        """Measure until every cost is known to `precision`, or `seconds` are spent, in at least `num_processes`.

        If a cost then contradicts the curve through its neighbours, one more process measures all again in any case.
        """
        spent, share = 0.0, FIRST_SHARE * seconds / num_processes
        while not self.stop_reason:
            spent += self._one_process(share, spent, seconds)
            if self.num_processes < num_processes:
                continue
            widths, again = self.half_widths(), cells_to_measure_again(self.cells)
            if again and self.num_processes == num_processes:
                self.ctx.note(f"{len(again)} cost(s) contradict their neighbours': one more process measures all again")
            elif widths and max(widths.values()) <= precision:
                self.stop_reason = f"every cost is known to {max(widths.values()):.1%}"
            elif spent + share > seconds:
                wide = {name: width for name, width in widths.items() if width > precision}
                unmet = ", ".join(f"{name} to {width:.1%}" for name, width in sorted(wide.items()))
                self.stop_reason = (
                    f"time is spent; not known to {precision:.1%}: {unmet or 'anything, one process only'}"
                )
        self.ctx.note(self.stop_reason)

    def _one_process(self, share: float, spent: float, seconds: float) -> float:
        """Measure in one fresh process for `share` seconds, at least a block of every setting; returns the seconds."""
        self.num_processes += 1
        with Measuring(
            self.num_processes,
            self.target,
            self.drafts,
            self.grid.arms,
            self.tuned,
            self.dtype,
            self.ctx,
            graphs=self.graphs,
        ) as process:
            self.kernel = process.facts["kernel"]
            self._make_texts(process)
            warm_up = process.turns(
                [self.texts[0][: self.grid.settings[0].kv_len]],
                self.grid.arms,
                num_tokens=WARM_UP_TOKENS,
                tokens_a_slice=WARM_UP_TOKENS,
                ignore_eos=True,
            )
            grid, tokens_a_slice = self._fitted_grid(warm_up, share), slice_length(warm_up[0])
            started, number = time.monotonic(), 0
            while not number or time.monotonic() - started < share:
                number += 1
                for setting in grid.settings:
                    self._run_block(process, grid, setting, number, tokens_a_slice)
                self.ctx.progress(min(seconds, spent + time.monotonic() - started), seconds, "seconds of measuring")
            self.num_blocks += number
            self.conditions = process.conditions()
            return time.monotonic() - started

    def _fitted_grid(self, warm_up: Sequence[ArmRun], share: float) -> Grid:
        """The grid with blocks short enough that a process has time for two of every setting.

        The first process also notes how many blocks fit its time.
        """
        whole = seconds_a_token(warm_up) * len(self.grid.settings)  # an estimate: larger settings take longer
        tokens = max(MIN_TOKENS, min(self.grid.tokens, int(share / 2.0 / whole)))
        if self.num_processes == 1:
            self.ctx.note(
                f"a block of {tokens} tokens takes about {whole * tokens:.1f} s for all arms, so {share:.0f} s of each "
                f"process are enough for about {max(1, round(share / (whole * tokens)))}"
            )
        return dataclasses.replace(self.grid, tokens=tokens)

    def _run_block(self, process: Measuring, grid: Grid, setting: Setting, number: int, tokens_a_slice: int) -> None:
        runs = run_block(process, grid, setting, self.texts, number + process.number, tokens_a_slice)
        if not runs:
            name = f"batch {setting.batch_size} kv {setting.kv_len}"
            if name not in self.left_out:
                self.left_out.add(name)
                self.ctx.note(f"left out, since its caches do not fit the memory: {name}")
            if len(self.left_out) == len(self.grid.settings):
                raise UserError("batch_sizes, kv_lengths: no cell fits into the memory: ask for smaller ones")
            return
        conditions = BlockConditions(
            self.target.key,
            self.dtype,
            self.tuned.num_threads,
            process.kernels,
            process.number,
            number,
            clock.load_average(),
            process.clock_mhz(),
        )
        self.cells += cost_cells(runs, setting, conditions)

    def _make_texts(self, process: Measuring) -> None:
        """Make the texts of all processes, once: prompts and the target's own greedy answers."""
        if not self.texts:
            length = self.grid.longest
            starts = [prompt.ids[: max(1, length // 2)] for prompt in self.prompts]
            self.texts = process.texts(starts, min(length, LONGEST_ANSWER))

    def half_widths(self) -> dict[str, float]:
        """Arm by arm, the half-width of the 95 % interval of a round's cost over a plain step, as a share."""
        return cost_half_widths(self.cells)

    def facts(self) -> JsonObject:
        """Facts for the `info`: how it was measured, and the precision reached."""
        return {
            "dtype": self.dtype,
            "kernel": self.kernel,
            "num_threads": self.tuned.num_threads,
            "num_processes": self.num_processes,
            "num_blocks": self.num_blocks,
            "precision_reached": self.half_widths(),
            "ended": self.stop_reason,
            "left_out": sorted(self.left_out),
            **(self.conditions or {}),
        }

    def flags(self, num_cores: int) -> list[QualityFlag]:
        """A flag where other work loaded the machine."""
        session_id, load = self.ctx.key[:16], None if self.conditions is None else self.conditions["load_average"]
        flags = []
        if load is not None and load > num_cores + LOAD_OF_OTHERS:
            detail = f"load average on {num_cores} cores: other work ran beside this measurement"
            flags.append(QualityFlag(session_id, "", "", "loaded_machine", "warning", load, detail))
        return flags
