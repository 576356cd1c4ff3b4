"""A page with one chart and one table: a number over runs, machines or versions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.html_pages import render
from components.report.charts.svg import PALETTE, Point, Series, line_chart
from components.tables import Table


class TrendSeries(NamedTuple):
    """Values of one kind, oldest first. labels: the text under each value; values: (value, lo, hi)."""

    name: str
    labels: list[str]
    values: list[tuple[float, float | None, float | None]]


def write_trend(
    metric: str, over: str, drawn: Sequence[TrendSeries], columns: Sequence[str], rows: Sequence[Sequence[Any]]
) -> str:
    """Render the page. With more series than colours, the rest is only in the table."""
    drawn_series = drawn[: len(PALETTE)]
    if over == "runs":
        places = sorted({label for series in drawn_series for label in series.labels})
    else:
        places = list(dict.fromkeys(label for series in drawn_series for label in series.labels))
    at = {label: number for number, label in enumerate(places)}
    style = "line" if over == "runs" and len(places) > 1 else "dots"
    lines = [
        Series(s.name, colour, style, [Point(at[x], *value) for x, value in zip(s.labels, s.values, strict=True)])
        for s, colour in zip(drawn_series, PALETTE, strict=False)
    ]
    chart = line_chart(lines, over, metric, x_labels=places)
    rest = (
        f" {len(drawn) - len(drawn_series)} more series are in the table alone."
        if len(drawn) > len(drawn_series)
        else ""
    )
    about = f"{metric} over {over}, {sum(len(series.values) for series in drawn)} values.{rest}"
    table = Table(list(columns), [[_cell_text(cell) for cell in row] for row in rows])
    return render(
        Path(__file__).parent / "trend.html.jinja",
        {"title": f"Trend of {metric}", "origin": None, "about": about, "chart": chart, "table": table},
    )


def _cell_text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)
