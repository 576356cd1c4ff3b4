"""Tables show both sides of a comparison, every reason to doubt, and nothing where nothing was measured."""

from __future__ import annotations

from typing import Any

from components.policy import WeightsCost, read_policy
from components.report.tables import (
    arm_table,
    choice_table,
    comparison_table,
    depth_table,
    drafter_name,
    drift_table,
    flag_table,
    gate_table,
    weights_table,
)
from components.rows import DepthChoice, DepthEval, Drift, PairedComparison, QualityFlag, read_rows

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


def test_tables_of_a_study(study: dict[str, Any]) -> None:
    path = study["policy"].path
    policy = read_policy(path)
    assert policy.gate is not None and policy.winner is not None
    evals = [e for e in read_rows(path, DepthEval) if e.workload == "all" and e.method == "eagle3"]
    text = depth_table(evals, policy.winner.depth_k).markdown()
    assert text.count("\n") == len(evals) + 2
    assert f"| **{policy.winner.depth_k}** |" in text
    assert choice_table(read_rows(path, DepthChoice), policy.winner).stressed is not None
    assert "ngram" in arm_table(policy.arms).markdown()
    assert gate_table(policy.gate).markdown().count("\n") == 2 + len(policy.gate.checks)
    flags = read_rows(path, QualityFlag)
    severities = [row[0] for row in flag_table(flags).rows]
    assert severities == sorted(severities, key=["fault", "warning", "info"].index)


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


def test_drafters_with_the_same_reason_to_doubt_share_a_line() -> None:
    flags = [QualityFlag("s", "k", m, "few_prompts", "warning", 32.0, "too few") for m in ("mtp", "eagle3")]
    flags += [QualityFlag("s", "k", m, "drift", "fault", v, "it moved") for m, v in (("mtp", 0.1), ("hass", 0.2))]
    assert flag_table(flags).rows == [
        ["fault", "drift", "hass, mtp", "0.2, 0.1", "it moved"],
        ["warning", "few prompts", "eagle3, mtp", "32", "too few"],
    ]


def test_each_value_stands_where_its_drafter_does() -> None:
    found = [("k1", "eagle3", 120.0), ("k2", "eagle3", 80.0), ("k3", "mtp", 150.0)]
    flags = [QualityFlag("s", key, method, "size", "info", value, "large") for key, method, value in found]
    assert flag_table(flags).rows == [["info", "size", "eagle3, eagle3, mtp", "120, 80, 150", "large"]]
