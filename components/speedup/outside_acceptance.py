"""What outside rows say about acceptance: tokens kept and rounds of every prompt, or of all at once, at every depth.

Where only a length is told (al, or what p amounts to), nobody knows over how many tokens. Several such lengths count as
if each had kept the same number of tokens: AL = n / sum(1 / al), their harmonic mean. Of rows that are prompts it is
the macro mean that adds up as time does; it is the pooled AL only if their answers were equally long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from components.contract import UserError
from components.speedup.bootstrap import Floats
from components.speedup.model import acceptance_lengths
from components.speedup.outside_rows import OutsideRow
from components.speedup.replay import count

Unit = tuple[str, str]  # workload and prompt, "" where none is named


@dataclass
class Acceptance:
    """Tokens kept and rounds of every unit (a prompt, or all prompts at once) at every depth.

    num_prompts: 0 where a unit is not a prompt. is_counted: False where only lengths were told, so that rounds are not
    known. is_prefix: a depth was read off the first positions of a deeper run. lengths: depth -> lengths as told.
    """

    cells: dict[tuple[Unit, int], tuple[float, float]] = field(default_factory=dict)  # -> tokens, rounds
    num_prompts: int = 0
    is_counted: bool = True
    is_prefix: bool = False
    lengths: dict[int, list[float]] = field(default_factory=dict)

    def add(self, unit: Unit, depth: int, tokens: float, rounds: float) -> None:
        """Count; repetitions add up."""
        before = self.cells.get((unit, depth), (0.0, 0.0))
        self.cells[unit, depth] = (before[0] + tokens, before[1] + rounds)

    def add_length(self, unit: Unit, depth: int, al: float) -> None:
        """Enter a length that nobody weighed: a token, and the part of a round that kept it."""
        self.add(unit, depth, 1.0, 1.0 / al)
        self.lengths.setdefault(depth, []).append(al)
        self.is_counted = False

    @property
    def depths(self) -> list[int]:
        """Drafting depths at which something is known."""
        return sorted({depth for _, depth in self.cells} - {0})

    @property
    def units(self) -> set[Unit]:
        """Prompts, or what stands for all of them."""
        return {unit for unit, _ in self.cells}

    def num_rounds(self, depth: int) -> int:
        """Rounds at a depth (of plain decoding: the shallowest); very many where only lengths were told."""
        at = depth or self.depths[0]
        return int(sum(rounds for (_, k), (_, rounds) in self.cells.items() if k == at)) if self.is_counted else 10**9

    @property
    def num_tokens(self) -> float:
        """Tokens kept at the shallowest depth."""
        return sum(tokens for (_, k), (tokens, _) in self.cells.items() if k == self.depths[0])

    def whole_units(self, depths: Sequence[int]) -> list[Unit]:
        """Units that are known at every one of the depths."""
        return [unit for unit in sorted(self.units) if all((unit, k) in self.cells for k in depths if k)]

    def at(self, depths: Sequence[int]) -> tuple[Floats, Floats]:
        """tokens, rounds: [units, depths] of the units known at every depth; plain decoding keeps a token a round.

        Without prompts the units are added up: what is no prompt must not be resampled as if it were one.

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


def acceptance_from(rows: Iterable[OutsideRow]) -> Acceptance:
    """What rows of one drafter in one setting say together; those that tell no acceptance are passed over."""
    mine = [row for row in rows if row.tells_acceptance]
    found = Acceptance()
    by_prompt = all(row.prompt is not None for row in mine)
    deepest = _deepest([row for row in mine if row.accepted is not None])
    direct = {row.k for row in mine if row.accepted is None}

    def unit(row: OutsideRow) -> Unit:
        return row.workload or "", (row.prompt or "") if by_prompt else ""

    for row in mine:
        _add(found, unit(row), row, deepest, direct)
    for chain in position_chains(mine):
        lengths = acceptance_lengths([row.p for row in chain if row.p is not None])
        for row, al in zip(chain, lengths[1:], strict=True):
            found.add_length(unit(row), row.k or 0, al)
    found.num_prompts = len(found.units) if by_prompt else 0
    return found


def position_chains(rows: Iterable[OutsideRow]) -> list[list[OutsideRow]]:
    """Rows with p that belong to one chain of positions, each from the first position on; what repeats stands once."""
    chains: dict[tuple[object, ...], dict[int, OutsideRow]] = {}
    for row in rows:
        if row.p is not None:
            belongs = (row.workload, row.prompt, row.batch_size, row.kv_len, row.block, row.rep)
            chains.setdefault(belongs, {}).setdefault(row.k or 0, row)
    return [[chain[k] for k in sorted(chain)] for chain in chains.values()]


def _deepest(maps: Sequence[OutsideRow]) -> int:
    """The depth that every map reaches, so that none is replayed beyond what was drafted for it.

    Where none says how deep that was, the longest run of kept drafts is all there is.
    """
    stated = [depth for depth in (row.k_max or row.k for row in maps) if depth is not None]
    return min(stated, default=0) or max((max(row.accepted or [0]) for row in maps), default=0)


def _add(found: Acceptance, unit: Unit, row: OutsideRow, deepest: int, direct: set[int | None]) -> None:
    """Enter one row that stands for itself."""
    depth = row.k or 0
    if row.accepted is not None:
        for k in range(1, deepest + 1):
            counted = count(row.accepted, k)
            found.add(unit, k, counted.tokens, counted.rounds)
    elif row.num_drafts is not None and row.accepted_per_pos is not None:
        for k in range(1, depth + 1):
            if k == depth or k not in direct:
                found.add(unit, k, row.num_drafts + sum(row.accepted_per_pos[:k]), row.num_drafts)
                found.is_prefix |= k < depth
    elif row.al is not None and row.tokens is not None:
        found.add(unit, depth, row.tokens, row.tokens / row.al)
    elif row.al is not None and row.rounds is not None:
        found.add(unit, depth, row.al * row.rounds, row.rounds)
    elif row.tokens is not None and row.rounds is not None:
        found.add(unit, depth, row.tokens, row.rounds)
    elif row.al is not None:
        found.add_length(unit, depth, row.al)
