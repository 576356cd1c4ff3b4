"""Step `bench.measure_step_cost`: times the phases of a round on this machine, over batch sizes and KV lengths.

T_target (one row a sequence), T_verify(k + 1 rows), T_draft(k proposals) and the rest of a round, each timed inside the
real decoding loop on the target's own text; prefill apart. All drafters are measured together, against one plain
decoding. Their arms take turns of some tens of milliseconds (measurement/slices.py), in several fresh processes in
sequence, until the costs of all arms are known to the asked precision or the time is spent; the step notes which.

A block decodes one text at one batch size and KV length. All arms, plain decoding included, take turns on it
(measurement/slices.py), so that disturbances of the machine affect them alike. The contexts of its cells, of any length
and number, are made of test prompts and the target's own answers.

A cell at KV length L decodes `tokens` tokens after a context of L - tokens / 2, so that L is the mean length. In a
batch the lengths spread evenly by an eighth to both sides of that: served requests differ in length, and a ragged batch
needs other masks and writes than an aligned one. Contexts longer than a text have other texts before it; all tokens
are real, since random ones would distort the times of kernels and drafters.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from components.bench import clock
from components.bench.calibration import Tuning, resolve_tuning
from components.bench.clock import BlockStat, slices_stat
from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm, check_loop_supports, tree_arms
from components.bench.end_to_end.request_rows import LOAD_OF_OTHERS
from components.bench.measurement.process import FIRST_SHARE, Measuring
from components.bench.measurement.round_kinds import by_kind, mixed_stat
from components.bench.measurement.slices import ArmRun, WholeSlice, seconds_a_token, slice_length
from components.bench.measurement.stopping import cost_half_widths
from components.bench.prompts import EncodedPrompt, fitting_prompts, num_positions
from components.bench.settings import BatchSizes, Dtype, KvLengths, TreeBudgets
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.definitions import steady
from components.drafts.storage.files import read_record
from components.methods import is_trained
from components.outside_json import JsonObject
from components.positions import SPREAD, longest_context, positions_fault
from components.rows import CostCell, QualityFlag, write_rows
from components.speedup.prediction.costs import cells_to_measure_again
from components.stop_rule import StopRule

NUM_TEXTS = 8
WARM_UP_TOKENS = 12
MIN_TOKENS = 8  # of a block, even for a slow target
MEMORY_SHARE = 0.8
LONGEST_ANSWER = 512  # tokens generated for one text; longer contexts join several
LEAST_READ = 1e-12  # a threshold below the likeliest token's probability whatever the vocabulary


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
    stop_rule: bool,
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
    settings = [Setting(size, length) for size in sorted(set(batch_sizes)) for length in sorted(set(kv_lengths))]
    lengths = {"kv_lengths": kv_lengths, "batch_sizes": batch_sizes, "tokens_per_block": tokens_per_block}
    setting, fault = positions_fault("bench.measure_step_cost", lengths, num_positions(target))
    if fault:
        raise UserError(f"{setting}: {fault}")
    encoded = fitting_prompts(target, prompts, "test", 0, ctx)[: max(NUM_TEXTS, *batch_sizes)]
    tuned = resolve_tuning(tuning, target, drafts, encoded[0].ids, dtype, num_threads, ctx, machine)
    arms = plan_arms(drafts, max_depth, trees, rival=tuned.rival and not graphs, stop_rule=stop_rule)
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


def plan_arms(
    drafts: Sequence[Draft], max_depth: int, trees: Sequence[int], *, rival: bool, stop_rule: bool = False
) -> list[Arm]:
    """Plain decoding, on both kernels with a rival, and every drafter at every depth and as trees.

    stop_rule: trained drafters at their deepest also under a rule that reads every confidence and ends no chain.
    """
    arms = [PLAIN, *([RIVAL] if rival else [])]
    for draft in drafts:
        record = read_record(draft.path)
        method, trained = str(record["method"]), int(record["num_steps"])
        deepest = min(max_depth or trained, int(record["max_depth"]))
        arms += [Arm(method, draft.key, depth) for depth in range(1, deepest + 1)]
        if stop_rule and is_trained(method):
            arms.append(Arm(method, draft.key, deepest, stop=StopRule.of_least(LEAST_READ, deepest)))
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
        self.blocks: list[TimedBlock] = []
        self.cells: list[CostCell] = []  # of all blocks, as of the last process
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
            self.cells = cost_cells(self.blocks)
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
        now = process.conditions()
        conditions = BlockConditions(
            self.target.key,
            self.dtype,
            self.tuned.num_threads,
            process.kernels,
            process.number,
            number,
            now["load_average"],
            clock.clock_mhz(now["device_state"]),
        )
        self.blocks.append(TimedBlock(runs, setting, conditions))

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


class Setting(NamedTuple):
    """One point of the grid: sequences decoded side by side, and the mean length of their caches in tokens."""

    batch_size: int
    kv_len: int


@dataclass(frozen=True)
class Grid:
    """The measurements to make: every arm at every setting, decoding `tokens` tokens a sequence."""

    arms: tuple[Arm, ...]
    settings: tuple[Setting, ...]
    tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, with the draft tokens of its last round."""
        batch_sizes, kv_lengths = zip(*self.settings, strict=True)
        return longest_context(kv_lengths, batch_sizes, self.tokens) + max(arm.rows_of_pass for arm in self.arms)

    def room_for(self, setting: Setting, bytes_per_token: int, free_bytes: int) -> int:
        """How many arms' caches fit the memory at once; 0 if not even one does."""
        length = longest_context([setting.kv_len], [setting.batch_size], self.tokens)
        length += max(arm.rows_of_pass for arm in self.arms)
        return int(MEMORY_SHARE * free_bytes) // (setting.batch_size * length * bytes_per_token)

    def groups(self, room: int) -> list[list[Arm]]:
        """The arms in groups that take turns: all in one, or, where they do not fit, plain decoding in each group."""
        if room >= len(self.arms):
            return [list(self.arms)]
        if room < 2:
            return [[arm] for arm in self.arms]
        plain = [arm for arm in self.arms if arm.is_baseline]
        others = [arm for arm in self.arms if not arm.is_baseline]
        size = room - len(plain)
        return [[*plain, *others[first : first + size]] for first in range(0, len(others), size)]


def run_block(
    process: Measuring, grid: Grid, setting: Setting, texts: Sequence[Sequence[int]], block: int, tokens_a_slice: int
) -> list[ArmRun]:
    """Run every arm on the texts of one block; [] where not even one fits the memory."""
    room = grid.room_for(setting, process.facts["bytes_per_token"], process.facts["free_bytes"])
    if room < 1:
        return []
    rows = contexts(texts, block, setting.batch_size, setting.kv_len, grid.tokens)
    runs: list[ArmRun] = []
    for arms in grid.groups(room):
        runs += process.turns(rows, arms, num_tokens=grid.tokens, tokens_a_slice=tokens_a_slice, ignore_eos=True)
    return runs


class BlockConditions(NamedTuple):
    """How the rounds of one block were timed. kernels: the target's kernel, keyed by Arm.on_rival."""

    target_key: str
    dtype: str
    num_threads: int
    kernels: Mapping[bool, str]
    process: int
    block: int
    load_average: float | None
    clock_mhz: float | None = None


class TimedBlock(NamedTuple):
    """The generations of one block, and how they were timed."""

    runs: Sequence[ArmRun]
    setting: Setting
    conditions: BlockConditions


def cost_cells(blocks: Sequence[TimedBlock]) -> list[CostCell]:
    """The rows of blocks: for each phase of each arm, the mean over kinds of round of its quietest slices.

    How frequent each kind is (round_kinds.py) is counted over all blocks of an arm at a setting. A drafter that is
    loaded but off has no rows: its cost shows in its speed against plain decoding.
    """
    counts: dict[tuple[Arm, Setting], Counter[int]] = {}
    of_blocks: dict[tuple[Arm, Setting, str], dict[int, list[list[int]]]] = {}
    timed = []
    for block in blocks:
        for run in block.runs:
            slices = run.whole_slices()
            if run.arm.is_off or not slices:
                continue
            place = (run.arm, block.setting)
            for whole_slice in slices:
                counts.setdefault(place, Counter()).update(whole_slice.drafted)
            phases = {name: by_kind(slices, times) for name, times in _round_phases(run.arm, slices).items()}
            for name, kinds in phases.items():
                known = of_blocks.setdefault((*place, name), {})
                for kind, samples in kinds.items():
                    known.setdefault(kind, []).extend(samples)
            timed.append((run, block, phases))
    cells = []
    for run, block, phases in timed:
        place = (run.arm, block.setting)
        stats = {name: mixed_stat(kinds, of_blocks[*place, name], counts[place]) for name, kinds in phases.items()}
        stats |= {name: slices_stat([[ns]]) for name, ns in _prefill_phases(run).items()}
        cells += [_cell(run, block, name, stat) for name, stat in stats.items()]
    return cells


def _round_phases(arm: Arm, slices: Sequence[WholeSlice]) -> dict[str, list[list[int]]]:
    """Phase -> nanoseconds of every round, slice by slice."""
    of_draft = [rounds.draft_ns for rounds in slices]
    if arm.stop is not None:  # but for reading, the arm of its depth without a rule
        return {"draft_read": of_draft}
    phases = {"verify" if arm.depth else "target_step": [rounds.target_ns for rounds in slices]}
    if arm.depth:
        phases["draft"] = of_draft
    if not arm.on_rival:  # of a second baseline only its target steps are compared
        phases["host"] = [rounds.host_ns for rounds in slices]
    return phases


def _prefill_phases(run: ArmRun) -> dict[str, int]:
    """Phase -> nanoseconds of what a generation does once."""
    if run.arm.stop is not None:
        return {}
    of_draft = {"draft_prefill": run.first_round[2]} if run.arm.depth else {}
    return of_draft if run.arm.on_rival else {**of_draft, "prefill": run.prefill_ns}


def _cell(run: ArmRun, block: TimedBlock, phase: str, stat: BlockStat) -> CostCell:
    arm, conditions = run.arm, block.conditions
    return CostCell(
        target_key=conditions.target_key,
        # "" and "none" for plain steps
        draft_key=arm.draft_key,
        method=arm.method,
        phase=phase,
        depth_k=arm.depth,
        batch_size=block.setting.batch_size,
        num_rows=_num_rows(phase, run),
        kv_len=block.setting.kv_len,
        block=conditions.block,
        reps_in_block=stat.num_samples,
        median_ns=stat.median,
        mad_ns=stat.mad,
        dtype=conditions.dtype,
        kernel=conditions.kernels[arm.on_rival],
        num_threads=conditions.num_threads,
        tree_budget=arm.tree_budget,
        load_average=conditions.load_average,
        clock_mhz=conditions.clock_mhz,
        process=conditions.process,
    )


def _num_rows(phase: str, run: ArmRun) -> int:
    """Rows of one sequence in one call; for a prefill, the mean over the batch."""
    if phase in ("prefill", "draft_prefill"):
        return round(sum(decoded.prompt_tokens for decoded in run.decoded) / len(run.decoded))
    return run.arm.rows_of_pass - 1 if phase == "draft" else run.arm.rows_of_pass


def contexts(texts: Sequence[Sequence[int]], block: int, batch_size: int, kv_len: int, tokens: int) -> list[list[int]]:
    """The `batch_size` contexts of one cell, different ones in every block."""
    middle = max(1, kv_len - tokens // 2)
    cell_contexts = []
    for row in range(batch_size):
        share = 0.0 if batch_size == 1 else 2 * row / (batch_size - 1) - 1
        cell_contexts.append(_cut(texts, block + row, max(1, middle + round(share * SPREAD * kv_len))))
    return cell_contexts


def _cut(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """The first `length` tokens of text number `first`; a text that is too short follows others."""
    text = list(texts[first % len(texts)])
    if len(text) >= length:
        return text[:length]
    before = first - 1
    while len(text) < length:
        text = [*texts[before % len(texts)], *text]
        before -= 1
    return text[-length:]
