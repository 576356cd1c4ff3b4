"""The table of the acceptance lost by storing drafters in fewer bits (policy.json: weights)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.report.tables import Table

WEIGHT_VERDICTS = {"lower": "lower", "higher": "higher", "undecided": "no difference shown"}
WEIGHT_HEADER = ["drafter", "weights", "depth", "AL as trained", "AL (95 %)", "change (95 %)", "prompts", "verdict"]


def weights_table(costs: Sequence[Mapping[str, Any]]) -> Table | None:
    """One line for each rounded drafter; None where no drafter was rounded."""
    rows = [
        [
            str(c["method"]),
            str(c["weights"]),
            str(c["depth_k"]),
            f"{c['al_before']:.2f}",
            f"{c['al']:.2f} [{c['al_lo']:.2f}, {c['al_hi']:.2f}]",
            f"{c['change']:+.3f} [{c['change_lo']:+.3f}, {c['change_hi']:+.3f}]",
            str(c["num_prompts"]),
            WEIGHT_VERDICTS[c["verdict"]],
        ]
        for c in costs
    ]
    return Table(WEIGHT_HEADER, rows) if rows else None
