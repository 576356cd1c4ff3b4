"""A line of a command is said once and as it is."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from flows.commands.terminal import echo, echo_error


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
