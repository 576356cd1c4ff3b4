"""The measurement of step costs: starts fresh processes, measures blocks, and decides when to stop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from components.bench import clock
from components.bench.cost_blocks import BlockConditions, Grid, Setting, cost_cells, run_block
from components.bench.cost_texts import LONGEST_ANSWER
from components.bench.measuring import FIRST_SHARE, ArmRun, Measuring, seconds_a_token, slice_length
from components.bench.run_flags import LOAD_OF_OTHERS
from components.bench.settling import cost_half_widths
from components.bench.subjects import EncodedPrompt
from components.bench.tuning import Tuning
from components.contract import Context, Draft, Target, UserError
from components.rows import CostCell, QualityFlag
from components.speedup.costs import cells_to_measure_again

WARM_UP_TOKENS = 12
MIN_TOKENS = 8  # of a block, even for a slow target


class CostStudy:
    """A running measurement: its rows so far, and their precision."""

    def __init__(
        self,
        target: Target,
        drafts: Sequence[Draft],
        grid: Grid,
        prompts: Sequence[EncodedPrompt],
        tuned: Tuning,
        dtype: str,
        graphs: bool,
        ctx: Context,
    ) -> None:
        self.target, self.drafts, self.grid, self.prompts = target, drafts, grid, prompts
        self.tuned, self.dtype, self.graphs, self.ctx = tuned, dtype, graphs, ctx
        self.cells: list[CostCell] = []
        self.left_out: set[str] = set()
        self.conditions: dict[str, Any] = {}
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

    def facts(self) -> dict[str, Any]:
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
            **self.conditions,
        }

    def flags(self, num_cores: int) -> list[QualityFlag]:
        """A flag where other work loaded the machine."""
        session_id, load = self.ctx.key[:16], self.conditions.get("load_average")
        flags = []
        if load is not None and load > num_cores + LOAD_OF_OTHERS:
            detail = f"load average on {num_cores} cores: other work ran beside this measurement"
            flags.append(QualityFlag(session_id, "", "", "loaded_machine", "warning", load, detail))
        return flags
