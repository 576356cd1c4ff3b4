"""A line of a command is said once and as it is; an answer is never cut off, whatever the width of the screen."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal

import pytest
from rich.console import Console

from flows.commands.terminal import cell, echo, echo_error, print_answer, print_json


class _InterruptedOnce(io.StringIO):
    """A terminal whose user presses Ctrl-C as soon as a line is seen."""

    pressed = False

    def flush(self) -> None:
        super().flush()
        if not self.pressed and self.getvalue():
            self.pressed = True
            raise KeyboardInterrupt


@pytest.mark.parametrize(("tell", "stream"), [(echo, "stdout"), (echo_error, "stderr")])
def test_a_line_that_ctrl_c_interrupts_is_said_once_and_as_it_is(
    tell: Callable[[str], None], stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = _InterruptedOnce()
    monkeypatch.setattr(sys, stream, screen)
    with pytest.raises(KeyboardInterrupt):
        tell("Ctrl-C stops everything :star: [bold]")
    tell("stopped")
    assert screen.getvalue() == "Ctrl-C stops everything :star: [bold]\nstopped\n"


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


def test_json_has_numbers_for_decimals_and_null_for_what_is_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    row = [Decimal("12"), Decimal("0.25"), math.nan, [1.5, math.inf], {"a": math.nan}, datetime(2026, 1, 2)]
    print_json(list("abcdef"), [row])

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    expected = {"a": 12, "b": 0.25, "c": None, "d": [1.5, None], "e": {"a": None}, "f": "2026-01-02 00:00:00"}
    assert found == [expected]
