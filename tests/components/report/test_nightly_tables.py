"""What a night shows: challenger against champion, and drift, in tables that name both sides."""

from __future__ import annotations

from components.report.tables import choice_table, comparison_table, drafter_name, drift_table
from components.rows import DepthChoice, Drift, PairedComparison

COMPARISON = PairedComparison(
    "s", "sel", "t", "n", "o", "mtp", "mtp", "all", "decode_speed", 3, 2, 24, 412.3, 400.0, 1.031, 0.991, 1.07, 0.02,
    "not_worse",
)  # fmt: skip
DRIFT = Drift("s", "t", "o", "mtp", "chat", "all", 3, 32, 24, 2.4, 2.2, 2.6, 1.9, 1.7, 2.1, -0.5, -0.8, -0.2, True)
CHOICE = DepthChoice(
    "sel", "t", "o", "mtp", "all", 1, 2, "rule", 0.01, 1.0, 1.3, 1.2, 1.4, None, None, None, None, "use", []
)


def test_both_sides_stand_beside_each_other_with_the_interval_of_their_ratio() -> None:
    row = comparison_table([COMPARISON]).rows[0]
    assert "412.30 at depth 3" in row and "400.00 at depth 2" in row and "1.031 [0.991, 1.070]" in row
    assert row[-1] == "not worse"


def test_drift_shows_then_now_and_the_change() -> None:
    row = drift_table([DRIFT]).rows[0]
    assert row == [
        "chat",
        "all",
        "3",
        "2.40 [2.20, 2.60]",
        "1.90 [1.70, 2.10]",
        "-0.50 [-0.80, -0.20]",
        "32 / 24",
        "drifted",
    ]


def test_two_drafters_of_one_method_are_told_apart_by_their_roles() -> None:
    roles = {"o": "champion", "n": "challenger"}
    assert choice_table([CHOICE], None, roles).rows[0][0] == "mtp, champion" == drafter_name("mtp", "o", roles)
    assert choice_table([CHOICE]).rows[0][0] == "mtp"
