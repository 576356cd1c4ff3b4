"""`draftsmith compare A B`: two ways to serve on the same prompts, as ratios with 95 % intervals, and a verdict.

The comparison is that of confirm_depth and the promotion gate (components/speedup: pairing.py, paired.py), on all that
the history knows of both. Only our own decoding loop is compared; results of serving engines are in `draftsmith query
engines_beside_ours`. Notes name what cannot be compared, with the reason.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.promotion import Margins
from components.rows import ALL
from flows.compare_sides import Side

if TYPE_CHECKING:
    from components.speedup.paired import Ratio

COLUMNS = ("quantity", "workload", "a", "b", "ratio", "lo", "hi", "margin", "num_prompts", "verdict")
EXIT_CODES = {"better": 0, "not_worse": 0, "worse": 1}
UNDECIDED = 3  # also where nothing could be compared


@dataclass
class Outcome:
    """The result of a comparison. notes: what could not be compared, with the reason."""

    a: Side
    b: Side
    ratios: list[Ratio] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """The verdict on speed over all workloads, else on acceptance length; "not comparable" without either."""
        for quantity in ("decode_speed", "speedup", "acceptance_length"):
            for row in self.ratios:
                if (row.quantity, row.workload) == (quantity, ALL):
                    return row.verdict
        return "not comparable"

    def exit_code(self) -> int:
        """0: A is not worse; 1: A is worse; 3: undecided or not comparable."""
        return EXIT_CODES.get(self.verdict(), UNDECIDED)

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of the printed table."""
        return list(COLUMNS), [[asdict(ratio)[name] for name in COLUMNS] for ratio in self.ratios]


def compare(home: Path, a: Side, b: Side, margins: Margins) -> Outcome:
    """A against B over everything the history knows of them. margins: shares by which A may lie below."""
    from components.speedup.pairing import compare_ways
    from storage.pairs import measured_of

    outcome = Outcome(a, b)
    if a.target_key and b.target_key and a.target_key != b.target_key:
        outcome.notes.append(f"not comparable: other target ({a.target_key[:12]} and {b.target_key[:12]})")
        return outcome
    if (a.draft_key, a.depth_k, a.tree_budget) == (b.draft_key, b.depth_k, b.tree_budget):
        outcome.notes.append(
            "both are the same drafter at the same depth: what differs is when and where it was measured"
        )
    comparison = compare_ways(measured_of(home, a.draft_key, b.draft_key), a.way(), b.way(), margins)
    outcome.ratios = comparison.ratios
    outcome.notes += comparison.notes
    return outcome
