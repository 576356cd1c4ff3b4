"""Charts that leave the page: SVG files and Markdown images that bring their colours along."""

from __future__ import annotations

import base64
import csv
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.report.tables import Table

# The light theme of style.css.jinja, so that a chart can stand alone.
_STYLE = """svg{--ink:#1b2330;--soft:#5b6778;--grid:#e8ecf0;--tint:#eef3fa;--pred:#2a66b5;--meas:#c65a11;--other:#4d7f3a
;--s4:#8a3fa0;--s5:#0f8a8a;--s6:#b8860b;--s7:#c2185b;--s8:#5d6d7e;--s9:#795548;--s10:#3f51b5;--s11:#7cb342
;background:#fff}text{fill:var(--soft);font:12.5px system-ui,sans-serif}.legend,.axis{fill:var(--ink)}
.grid{stroke:var(--grid)}.line{fill:none;stroke-width:2.2}.band{opacity:.16}.whisker{fill:none;stroke-width:1.6}
.level{stroke-width:1.5;stroke-dasharray:5 4}.chosen{fill:var(--tint)}"""


def standing_alone(svg: str) -> str:
    """An inline chart of charts.py as a file of its own."""
    width, height = (round(1.5 * float(size)) for size in _box(svg))
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return svg.replace("<svg ", f"<svg {size} ", 1).replace(">", f"><style>{_STYLE}</style>", 1)


def side_by_side(charts: Iterable[str]) -> str:
    """Several charts as one, in a row."""
    parts, x, height = [], 0.0, 0.0
    for chart in charts:
        wide, high = (float(size) for size in _box(chart))
        parts.append(chart.replace("<svg ", f'<svg x="{x:g}" y="0" width="{wide:g}" height="{high:g}" ', 1))
        x, height = x + wide, max(height, high)
    return f'<svg viewBox="0 0 {x:g} {height:g}" role="img">{"".join(parts)}</svg>'


def _box(svg: str) -> tuple[str, str]:
    found = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)
    assert found is not None, "a chart says how large it is"
    return found[1], found[2]


def picture(svg: str, says: str) -> str:
    """A chart as a Markdown image that needs nothing around it. says: what it shows, for readers."""
    return as_image(standing_alone(svg), says)


def as_image(file: str, says: str) -> str:
    """An SVG file's content as a Markdown image."""
    return f"![{says}](data:image/svg+xml;base64,{base64.b64encode(file.encode()).decode()})\n"


def write_pictures(folder: Path, charts: Mapping[str, str], tables: Iterable[tuple[str, Table | None]]) -> None:
    """The charts of a page as `charts/NAME.svg`, its tables as `tables/NAME.csv`: what MLflow shows beside the page."""
    for name, svg in charts.items():
        (folder / "charts").mkdir(exist_ok=True)
        (folder / "charts" / f"{name}.svg").write_text(standing_alone(svg), encoding="utf-8")
    for name, table in tables:
        if table is not None:
            (folder / "tables").mkdir(exist_ok=True)
            with (folder / "tables" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([table.header, *table.rows])
