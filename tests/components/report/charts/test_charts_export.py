"""A chart outside the page brings its colours along, and charts in a row keep their size."""

from __future__ import annotations

import base64
import csv
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from components.report.charts.export import picture, side_by_side, standalone_svg, write_pictures
from components.report.charts.svg import HEIGHT, WIDTH, Point, Series, line_chart
from components.tables import Table

CHART = line_chart([Series("a", "pred", "line", [Point(1, 1.0), Point(2, 1.5)])], "depth", "speed")


def test_an_image_in_markdown_defines_every_colour_that_it_uses() -> None:
    match = re.fullmatch(r"!\[a chart\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)\n", picture(CHART, "a chart"))
    assert match is not None
    svg = base64.b64decode(match[1]).decode()
    assert {*re.findall(r"var\((--\w+)\)", svg)} <= {*re.findall(r"(--\w+): #", svg)}
    assert ElementTree.fromstring(svg).tag == "{http://www.w3.org/2000/svg}svg" and "http" not in CHART


def test_charts_in_a_row_are_as_wide_as_all_and_titles_are_escaped() -> None:
    row = side_by_side([("a <b>", CHART), ("c", CHART)])
    assert f'viewBox="0 0 {2 * WIDTH} {26 + HEIGHT}"' in row and "a &lt;b&gt;" in row
    assert len(list(ElementTree.fromstring(standalone_svg(row)).iter("{http://www.w3.org/2000/svg}svg"))) == 3


def test_charts_and_tables_become_files_and_an_absent_table_none(tmp_path: Path) -> None:
    write_pictures(tmp_path, {"speed": CHART}, [("depths", Table(["depth"], [["1, 2"]])), ("trees", None)])
    assert (tmp_path / "charts" / "speed.svg").read_text(encoding="utf-8") == standalone_svg(CHART)
    with (tmp_path / "tables" / "depths.csv").open(encoding="utf-8", newline="") as file:
        assert list(csv.reader(file)) == [["depth"], ["1, 2"]]
    assert not (tmp_path / "tables" / "trees.csv").exists()
