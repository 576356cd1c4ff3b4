"""Charts outside the page: SVG files and Markdown images that contain their colours."""

from __future__ import annotations

import base64
import csv
import html
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from components.tables import Table


@lru_cache(maxsize=1)
def _style() -> str:
    """The part of the pages' style sheet for charts, with the light colours."""
    sheet = (Path(__file__).parents[1] / "pages" / "style.css.jinja").read_text(encoding="utf-8")
    light = re.search(r":root \{.*?\}", sheet, re.DOTALL)
    assert light is not None, "the style sheet begins with the light colours"
    marks = re.findall(r"svg (?:text|\.\w+).*?\}", sheet)
    return " ".join([light[0].replace("light dark", "light"), "svg { background: #fff }", *marks])


def standalone_svg(svg: str) -> str:
    """An inline chart of svg.py as the content of an SVG file."""
    width, height = (round(1.5 * float(size)) for size in _view_box(svg))
    size = f'xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return svg.replace("<svg ", f"<svg {size} ", 1).replace(">", f"><style>{_style()}</style>", 1)


def side_by_side(charts: Iterable[tuple[str, str]]) -> str:
    """Several charts as one chart, in a row. charts: (title, chart)."""
    parts, x, height, top = [], 0.0, 0.0, 26
    for title, chart in charts:
        wide, high = (float(size) for size in _view_box(chart))
        parts.append(f'<text class="axis" style="font-weight:600" x="{x + 12:g}" y="16">{html.escape(title)}</text>')
        parts.append(chart.replace("<svg ", f'<svg x="{x:g}" y="{top}" width="{wide:g}" height="{high:g}" ', 1))
        x, height = x + wide, max(height, high)
    return f'<svg viewBox="0 0 {x:g} {top + height:g}" role="img">{"".join(parts)}</svg>'


def _view_box(svg: str) -> tuple[str, str]:
    match = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', svg)
    assert match is not None, "a chart says how large it is"
    return match[1], match[2]


def picture(svg: str, description: str) -> str:
    """A chart as a self-contained Markdown image. description: its alternative text."""
    return as_image(standalone_svg(svg), description)


def as_image(file: str, description: str) -> str:
    """An SVG file's content as a Markdown image."""
    return f"![{description}](data:image/svg+xml;base64,{base64.b64encode(file.encode()).decode()})\n"


def write_pictures(folder: Path, charts: Mapping[str, str], tables: Iterable[tuple[str, Table | None]]) -> None:
    """Write the charts of a page as `charts/NAME.svg` and its tables as `tables/NAME.csv`, which MLflow shows."""
    for name, svg in charts.items():
        (folder / "charts").mkdir(exist_ok=True)
        (folder / "charts" / f"{name}.svg").write_text(standalone_svg(svg), encoding="utf-8")
    for name, table in tables:
        if table is not None:
            (folder / "tables").mkdir(exist_ok=True)
            with (folder / "tables" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file).writerows([table.header, *table.rows])
