"""An answer is never cut off, whatever the width of the screen."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from flows.answer import cell, print_answer

COLUMNS = [f"column_{i}" for i in range(12)]
ROW = [f"{i:064x}" for i in range(12)]


@pytest.mark.parametrize("terminal", [True, False])
def test_every_value_is_printed_whole(terminal: bool, capsys: pytest.CaptureFixture[str]) -> None:
    screen = io.StringIO()
    print_answer(Console(file=screen, width=80, force_terminal=terminal), COLUMNS, [ROW])
    printed = screen.getvalue() + capsys.readouterr().out
    for text in [*COLUMNS, *ROW]:
        assert text in printed


def test_a_terminal_too_narrow_gets_a_block_a_row() -> None:
    screen = io.StringIO()
    print_answer(Console(file=screen, width=80, force_terminal=True), COLUMNS, [ROW, ROW])
    assert "row 2" in screen.getvalue()
    narrow = io.StringIO()
    print_answer(Console(file=narrow, width=80, force_terminal=True), ["a"], [["1"]])
    assert "row 1" not in narrow.getvalue()


def test_null_is_empty_and_numbers_are_readable() -> None:
    assert cell(None) == ""
    assert cell(1.0 / 3.0) == "0.333333"
    assert cell(7) == "7"
