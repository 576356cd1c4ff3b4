"""Blocks of cost cells: every phase and depth of every drafter, on the same texts, in turns.

A block decodes one text at one batch size and KV length. All arms, plain decoding included, take turns on it
(measurement/slices.py), so that disturbances of the machine affect them alike. The contexts of its cells, of any length
and number, are made of test prompts and the target's own answers.

A cell at KV length L decodes `tokens` tokens after a context of L - tokens / 2, so that L is the mean length. In a
batch the lengths spread evenly by an eighth to both sides of that: served requests differ in length, and a ragged batch
needs other masks and writes than an aligned one. Contexts longer than a text have other texts before it; all tokens
are real, since random ones would distort the times of kernels and drafters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from components.bench.clock import slices_stat
from components.bench.end_to_end.arms import Arm
from components.bench.measurement.process import Measuring
from components.bench.measurement.slices import ArmRun
from components.rows import CostCell

MEMORY_SHARE = 0.8
LONGEST_ANSWER = 512  # tokens generated for one text; longer contexts join several
SPREAD = 1 / 8  # of the KV length, to each side, in a batch


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


def cost_cells(runs: Sequence[ArmRun], setting: Setting, conditions: BlockConditions) -> list[CostCell]:
    """The rows of one block: for each phase of each arm, the median round of its quietest slices.

    A drafter that is loaded but off has none: its cost shows in its speed against plain decoding.
    """
    cells = []
    for run in runs:
        arm, slices = run.arm, run.whole_slices()
        if arm.is_off or not slices:
            continue
        phases = {"verify" if arm.depth else "target_step": [rounds.target_ns for rounds in slices]}
        if arm.depth:
            phases["draft"] = [rounds.draft_ns for rounds in slices]
            phases["draft_prefill"] = [[run.first_round[2]]]
        if not arm.on_rival:  # of a second baseline only its target steps are compared
            phases["host"] = [rounds.host_ns for rounds in slices]
            phases["prefill"] = [[run.prefill_ns]]
        for phase, samples in phases.items():
            stat = slices_stat(samples)
            cells.append(
                CostCell(
                    target_key=conditions.target_key,
                    # "" and "none" for plain steps
                    draft_key=arm.draft_key,
                    method=arm.method,
                    phase=phase,
                    depth_k=arm.depth,
                    batch_size=setting.batch_size,
                    num_rows=_num_rows(phase, run),
                    kv_len=setting.kv_len,
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
            )
    return cells


def _num_rows(phase: str, run: ArmRun) -> int:
    """Rows of one sequence in one call; for a prefill, the mean over the batch."""
    if phase in ("prefill", "draft_prefill"):
        return round(sum(decoded.prompt_tokens for decoded in run.decoded) / len(run.decoded))
    return run.arm.rows_of_pass - 1 if phase == "draft" else run.arm.rows_of_pass


def longest_context(kv_lengths: Sequence[int], batch_sizes: Sequence[int], tokens: int) -> int:
    """Positions that the longest sequence of any cell takes, before drafts."""
    longest = max(kv_lengths)
    return longest + tokens + (round(longest * SPREAD) if max(batch_sizes) > 1 else 0)


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
