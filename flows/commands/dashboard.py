"""The dashboard of a home as one file that needs no network: `draftsmith dashboard`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from components.contract import UserError
from components.report.board import Board
from components.report.charts.vega import javascript
from components.report.pages.dashboard import write_dashboard
from components.tables import format_bytes
from flows.commands.terminal import echo
from flows.dashboard.gathered import gather
from storage.artifacts.store import default_home, require_writable


def dashboard(
    to: Annotated[
        Path | None, typer.Option("--to", help="The file to write; left out: one in the home.", metavar="FILE")
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How many days back charts over time and lists look.")] = 90,
    reports: Annotated[
        str, typer.Option("--reports-at", help="Where report pages are served; left out: in the store, as files.")
    ] = "",
) -> None:
    """Write one page about this home: champions and why, speed and acceptance over time, nights, failures, disk."""
    home = default_home()
    file = to if to is not None else home / "dashboard" / "index.html"
    if to is not None and not to.absolute().parent.is_dir():
        raise UserError(f"dashboard --to {to}: there is no folder {to.absolute().parent}")
    require_writable(home)
    store = os.path.relpath(home / "store", file.absolute().parent)
    board = make_dashboard(home, file, days=days, reports=reports or store)
    number = f"{len(board.champions)} champions, {len(board.choices)} choices, {len(board.runs)} runs"
    echo(f"{file}: {number} of the last {days} days, {format_bytes(file.stat().st_size)}")


def make_dashboard(home: Path, to: Path, *, days: int, reports: str) -> Board:
    """Write the dashboard of a home into one file, and return what is on it. days, reports: as for `gather`."""
    board = gather(home, days=days, reports=reports)
    folder = home / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    to.write_text(write_dashboard(board, javascript(folder)), encoding="utf-8")
    return board
