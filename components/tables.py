"""A table of text cells, and the spelling of numbers in one: ratios, percentages and 95 % intervals.

Pages, cards, the terminal and Markdown files show the same cells, so a number reads the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeVar

from components.text import in_markdown

Row = TypeVar("Row")


class Table(NamedTuple):
    """A table of text cells. stressed: index of the row to emphasise, None for no row."""

    header: list[str]
    rows: list[list[str]]
    stressed: int | None = None

    @classmethod
    def of(
        cls, rows: Iterable[Row], columns: Mapping[str, Callable[[Row], str] | None], stressed: int | None = None
    ) -> Table:
        """A line for each row. columns: title -> the text of a row's cell; None leaves the column out."""
        cells = {title: cell for title, cell in columns.items() if cell is not None}
        return cls([*cells], [[cell(row) for cell in cells.values()] for row in rows], stressed)

    def markdown(self) -> str:
        """The table in GitHub's Markdown; a stressed row is bold."""
        lines = [_markdown_line(map(in_markdown, self.header)), _markdown_line(["---"] * len(self.header))]
        for index, row in enumerate(self.rows):
            escaped = [in_markdown(cell) for cell in row]
            cells = [f"**{cell}**" if cell and index == self.stressed else cell for cell in escaped]
            lines.append(_markdown_line(cells))
        return "\n".join(lines) + "\n"


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def format_ratio(value: float | None, missing: str = "-") -> str:
    """1.2345 -> 1.23x; `missing` where it was not measured."""
    return missing if value is None else f"{value:.2f}x"


def format_percent(value: float | None, sign: bool = False, missing: str = "-") -> str:
    """0.1234 -> 12.3 %; `missing` where it was not measured."""
    if value is None:
        return missing
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def format_interval(lo: float | None, hi: float | None) -> str:
    """A 95 % interval as written after its value, " [1.15, 1.32]"; "" where it was not measured."""
    return "" if lo is None or hi is None else f" [{lo:.2f}, {hi:.2f}]"


def format_estimate(value: float | None, lo: float | None, hi: float | None) -> str:
    """A ratio with its 95 % interval, 1.23x [1.15, 1.32]; "-" where it was not measured."""
    return f"{format_ratio(value)}{format_interval(lo, hi)}"


def format_bytes(num_bytes: int) -> str:
    """Bytes as people read them: 1.5 GiB."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def duration(seconds: float) -> str:
    """Seconds in words: 0.4 s, 12 s, 3 min 05 s, 2 h 10 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
