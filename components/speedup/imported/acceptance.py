"""Acceptance in imported rows: tokens kept and rounds at every depth, of every prompt or of all prompts at once.

Where a row gives only a length (al, or p), its number of tokens is not known. Several such lengths count as if each had
the same number of tokens: AL = n / sum(1 / al), their harmonic mean. For rows of single prompts this is a macro mean,
which equals the pooled AL only if all answers are equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from components.contract import UserError
from components.speedup.bootstrap import Floats
from components.speedup.imported.rows import ImportedRow
from components.speedup.prediction.model import acceptance_lengths
from components.speedup.prediction.replay import count

Unit = tuple[str, str]  # (workload, prompt), "" where not named


@dataclass
class Acceptance:
    """Tokens kept and rounds of every unit (a prompt, or all prompts at once) at every depth.

    num_prompts: 0 where a unit is not a prompt. is_counted: False where some rows give only a length, so that rounds
    are not known. is_prefix: whether a depth comes from the first positions of a deeper run. lengths: depth -> given
    lengths.
    """

    cells: dict[tuple[Unit, int], tuple[float, float]] = field(default_factory=dict)  # -> tokens, rounds
    num_prompts: int = 0
    is_counted: bool = True
    is_prefix: bool = False
    lengths: dict[int, list[float]] = field(default_factory=dict)

    def add(self, unit: Unit, depth: int, tokens: float, rounds: float) -> None:
        """Add counts; repetitions add up."""
        before = self.cells.get((unit, depth), (0.0, 0.0))
        self.cells[unit, depth] = (before[0] + tokens, before[1] + rounds)

    def add_length(self, unit: Unit, depth: int, al: float) -> None:
        """Add a length without counts: one token, and its part of a round."""
        self.add(unit, depth, 1.0, 1.0 / al)
        self.lengths.setdefault(depth, []).append(al)
        self.is_counted = False

    @property
    def depths(self) -> list[int]:
        """Drafting depths with data."""
        return sorted({depth for _, depth in self.cells} - {0})

    @property
    def units(self) -> set[Unit]:
        """The prompts, or the units that stand for all of them."""
        return {unit for unit, _ in self.cells}

    def num_rounds(self, depth: int) -> int:
        """Rounds at a depth (0: at the shallowest); 10**9 where only lengths are known."""
        column_depth = depth or self.depths[0]
        return (
            int(sum(rounds for (_, k), (_, rounds) in self.cells.items() if k == column_depth))
            if self.is_counted
            else 10**9
        )

    @property
    def num_tokens(self) -> float:
        """Tokens kept at the shallowest depth."""
        return sum(tokens for (_, k), (tokens, _) in self.cells.items() if k == self.depths[0])

    def whole_units(self, depths: Sequence[int]) -> list[Unit]:
        """Units with data at every one of the depths."""
        return [unit for unit in sorted(self.units) if all((unit, k) in self.cells for k in depths if k)]

    def at(self, depths: Sequence[int]) -> tuple[Floats, Floats]:
        """tokens, rounds: [units, depths] of the units with data at every depth; plain decoding keeps a token a round.

        Units that are no prompts are summed into one, since they must not be resampled like prompts.

        Raises:
            UserError: no prompt was measured at every depth.
        """
        drafted = [k for k in depths if k]
        whole = self.whole_units(depths)
        if not whole:
            raise UserError(f"acceptance: no prompt has rows at every one of the depths {drafted}")
        tokens = np.array([[self.cells[unit, k or drafted[0]][0] for k in depths] for unit in whole])
        rounds = np.array([[self.cells[unit, k or drafted[0]][0 if k == 0 else 1] for k in depths] for unit in whole])
        if self.num_prompts:
            return tokens, rounds
        return tokens.sum(axis=0, keepdims=True), rounds.sum(axis=0, keepdims=True)


def acceptance_from(rows: Iterable[ImportedRow]) -> Acceptance:
    """The acceptance in rows of one drafter in one setting; rows without acceptance are skipped."""
    acceptance_rows = [row for row in rows if row.has_acceptance]
    acceptance = Acceptance()
    by_prompt = all(row.prompt is not None for row in acceptance_rows)
    deepest = _common_depth([row for row in acceptance_rows if row.accepted is not None])
    direct = {row.k for row in acceptance_rows if row.accepted is None}

    def unit(row: ImportedRow) -> Unit:
        return row.workload or "", (row.prompt or "") if by_prompt else ""

    for row in acceptance_rows:
        _add_row(acceptance, unit(row), row, deepest, direct)
    for chain in position_chains(acceptance_rows):
        lengths = acceptance_lengths([row.p for row in chain if row.p is not None])
        for row, al in zip(chain, lengths[1:], strict=True):
            acceptance.add_length(unit(row), row.k or 0, al)
    acceptance.num_prompts = len(acceptance.units) if by_prompt else 0
    return acceptance


def position_chains(rows: Iterable[ImportedRow]) -> list[list[ImportedRow]]:
    """Rows with p, grouped into chains of positions in ascending order; of repeated positions the first one counts."""
    chains: dict[tuple[object, ...], dict[int, ImportedRow]] = {}
    for row in rows:
        if row.p is not None:
            belongs = (row.workload, row.prompt, row.batch_size, row.kv_len, row.block, row.rep)
            chains.setdefault(belongs, {}).setdefault(row.k or 0, row)
    return [[chain[k] for k in sorted(chain)] for chain in chains.values()]


def _common_depth(maps: Sequence[ImportedRow]) -> int:
    """The depth that every map reaches, so that none is replayed deeper than it was drafted.

    Where no map states its depth, the longest run of kept drafts stands in.
    """
    stated = [depth for depth in (row.k_max or row.k for row in maps) if depth is not None]
    return min(stated, default=0) or max((max(row.accepted or [0]) for row in maps), default=0)


def _add_row(acceptance: Acceptance, unit: Unit, row: ImportedRow, deepest: int, direct: set[int | None]) -> None:
    """Add a row of any kind but p."""
    depth = row.k or 0
    if row.accepted is not None:
        for k in range(1, deepest + 1):
            counts = count(row.accepted, k)
            acceptance.add(unit, k, counts.tokens, counts.rounds)
    elif row.num_drafts is not None and row.accepted_per_pos is not None:
        for k in range(1, depth + 1):
            if k == depth or k not in direct:
                acceptance.add(unit, k, row.num_drafts + sum(row.accepted_per_pos[:k]), row.num_drafts)
                acceptance.is_prefix |= k < depth
    elif row.al is not None and row.tokens is not None:
        acceptance.add(unit, depth, row.tokens, row.tokens / row.al)
    elif row.al is not None and row.rounds is not None:
        acceptance.add(unit, depth, row.al * row.rounds, row.rounds)
    elif row.tokens is not None and row.rounds is not None:
        acceptance.add(unit, depth, row.tokens, row.rounds)
    elif row.al is not None:
        acceptance.add_length(unit, depth, row.al)
