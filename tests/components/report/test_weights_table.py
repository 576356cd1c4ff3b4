"""The page tells what fewer bits cost, with the interval, and says nothing where nothing was rounded."""

from __future__ import annotations

from components.policy import WeightsCost
from components.report.tables import weights_table


def test_a_rounded_drafter_has_a_line_with_its_paired_interval() -> None:
    cost = WeightsCost(
        draft_key="q",
        quantised_from="d",
        method="eagle3",
        weights="int4, groups of 32",
        depth_k=3,
        num_prompts=32,
        al=2.4,
        al_lo=2.2,
        al_hi=2.6,
        al_before=2.5,
        change=-0.1,
        change_lo=-0.15,
        change_hi=-0.05,
        verdict="lower",
    )
    table = weights_table([cost])
    assert table is not None
    assert table.rows[0][5] == "-0.100 [-0.150, -0.050]" and table.rows[0][-1] == "lower"
    assert weights_table([]) is None
