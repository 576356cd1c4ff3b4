"""Markdown tables keep their columns whatever a cell says; charts stay inside their box; a summary never invents."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from components.policy import read_policy
from components.report.charts.svg import HEIGHT, WIDTH, Point, Series, bar_chart, line_chart, nice_ticks
from components.report.summary import summarise
from components.report.tables import arm_table, choice_table, depth_table, flag_table, gate_table
from components.rows import DepthChoice, DepthEval, QualityFlag, read_rows
from components.tables import Table

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3), max_size=4))
def test_markdown_keeps_its_columns(rows: list[list[str]]) -> None:
    lines = Table(["a", "b", "c"], rows).markdown().rstrip("\n").split("\n")
    assert len(lines) == 2 + len(rows)
    assert all(len(re.findall(r"(?<!\\)\|", line.replace("\\\\|", "\\|"))) == 4 for line in lines)


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


@given(finite, finite)
def test_ticks_span_their_values(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9


@given(st.lists(st.tuples(finite, st.floats(0, 1e3)), min_size=1, max_size=9))
def test_marks_stay_inside_the_box(values: list[tuple[float, float]]) -> None:
    points = [Point(i, y, y - w, y + w) for i, (y, w) in enumerate(values)]
    chart = line_chart([Series("a", "pred", "line", points), Series("b", "meas", "dots", points)], "x", "y", marked_x=0)
    root = ET.fromstring(chart)
    marks = [mark for mark in root.iter("path") if mark.get("class") == "mark"]
    assert len(marks) == 2 * len(values) + 2, "every point and both names in the legend"
    for mark in marks:
        x, y = map(float, re.findall(r"^M(\S+) (\S+?)m", mark.attrib["d"])[0])
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(-2, 5)), st.floats(-2, 5)), min_size=1, max_size=9))
def test_bars_are_as_many_as_their_values(pairs: list[tuple[float | None, float]]) -> None:
    chart = bar_chart([(str(i), pair) for i, pair in enumerate(pairs)], [("a", "pred"), ("b", "meas")], "x", "y")
    titles = list(ET.fromstring(chart).iter("title"))
    assert len(titles) == sum(value is not None for pair in pairs for value in pair)


def test_summary_of_a_confirmed_policy(study: dict[str, Any]) -> None:
    info = study["policy"].info
    lines = summarise(info, {"formats": ["eagle3"]}, {"report": "somewhere"})
    assert lines["chosen depth"] == str(info["depth_k"])
    assert (
        f"{info['speedup_meas']:.2f}x, 95 % interval [{info['meas_lo']:.2f}, {info['meas_hi']:.2f}]"
        == lines["measured speedup"]
    )
    assert lines["token-identical"].startswith("yes (")
    refused = summarise({**info, "gate_passed": False, "gate_failed": ["no_faults", "differs_from_champion"]})
    assert refused["promotion gate"] == "not passed: no_faults, differs_from_champion"
    assert list(lines)[-1] == "report"


def test_summary_does_not_claim_what_is_missing(study: dict[str, Any]) -> None:
    lines = summarise(study["chosen"].info)
    assert lines["measured speedup"] == "not measured"
    assert lines["token-identical"] == "not compared"
    assert lines["promotion gate"] == "not checked"
    different = summarise({**study["policy"].info, "identical": False})
    assert different["token-identical"].startswith("NO")
    assert all(isinstance(v, str) for v in summarise({}).values())
