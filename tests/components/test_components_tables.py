"""A table in Markdown keeps its columns whatever a cell says."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from components.tables import Table, format_estimate, format_interval, format_percent, format_ratio


@given(st.lists(st.lists(st.text(max_size=12), min_size=3, max_size=3), max_size=4))
def test_markdown_keeps_its_columns(rows: list[list[str]]) -> None:
    lines = Table(["a", "b", "c"], rows).markdown().rstrip("\n").split("\n")
    assert len(lines) == 2 + len(rows)
    assert all(len(re.findall(r"(?<!\\)\|", line.replace("\\\\|", "\\|"))) == 4 for line in lines)


def test_a_stressed_row_is_bold_and_its_empty_cells_are_not() -> None:
    assert Table(["a", "b"], [["1", ""]], stressed=0).markdown() == "| a | b |\n| --- | --- |\n| **1** |  |\n"


def test_what_was_not_measured_is_a_dash_or_what_the_caller_says() -> None:
    assert (format_ratio(1.234), format_ratio(None), format_ratio(None, "none")) == ("1.23x", "-", "none")
    assert (format_percent(0.1234), format_percent(0.02, sign=True), format_percent(None)) == ("12.3 %", "+2.0 %", "-")
    assert format_estimate(1.2, 1.1, 1.3) == "1.20x [1.10, 1.30]"
    assert format_estimate(1.2, None, 1.3) == "1.20x" and format_interval(None, None) == ""
