"""Ten series are told apart by colour, by colour-blind readers, and in grey print; their names stand side by side."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.report import pages
from components.report.charts import svg as charts
from components.report.charts.svg import (
    HEIGHT,
    PALETTE,
    STYLES,
    WIDTH,
    Point,
    Series,
    bar_chart,
    line_chart,
    nice_ticks,
)

SHEET = (Path(pages.__file__).parent / "style.css.jinja").read_text(encoding="utf-8")


LIGHT, DARK = re.findall(r":root \{(.*?)\}", SHEET, re.DOTALL)[:2]


# What remains of linear RGB to an eye without one kind of cone (Machado, Oliveira and Fernandes 2009, severity 1).
SIGHT = {
    "normal": np.eye(3),
    "protanopia": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
    "deuteranopia": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "tritanopia": np.array([[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]),
}


@pytest.mark.parametrize(
    ("largest", "unit"), [(0.9, "x"), (9.0, " ms"), (100.0, " ms"), (12_500.0, " ms"), (2.5e9, "")]
)
def test_no_label_of_y_is_cut_off(largest: float, unit: str) -> None:
    chart = line_chart([Series("a", "pred", "line", [Point(0, 0.0), Point(1, largest)])], "k", "time", unit=unit)
    left = float(chart.split('viewBox="')[1].split()[0])
    labels = re.findall(r'<text class="tick" x="([\d.]+)" [^>]*text-anchor="end">([^<]+)</text>', chart)
    assert len(labels) > 2 and all(float(x) - charts._LETTER * len(label) >= left for x, label in labels)
    assert left == 0.0 or largest >= 100.0, "charts of few digits stay as they are"


def linear(theme: str, name: str) -> np.ndarray:
    """Linear RGB [3] of a colour of the style sheet."""
    found = re.search(rf"--{name}: #(\w{{6}})", theme)
    assert found is not None, f"the style sheet has no --{name}"
    value = np.array([int(found[1][i : i + 2], 16) / 255 for i in (0, 2, 4)])
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4)


def oklab(rgb: np.ndarray) -> np.ndarray:
    """OKLab [3] of linear RGB [3] (Ottosson 2020): equal distances look about equally different."""
    to_cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
    to_lab = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return np.asarray(to_lab @ np.cbrt(to_cones @ rgb))


def contrast(a: np.ndarray, b: np.ndarray) -> float:
    """Contrast ratio of WCAG 2."""
    high, low = sorted((float(c @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize(("sight", "least"), [("normal", 0.15), *((name, 0.06) for name in list(SIGHT)[1:])])
def test_no_two_colours_look_alike(theme: str, sight: str, least: float) -> None:
    seen = {name: oklab(np.clip(SIGHT[sight] @ linear(theme, name), 0, 1)) for name in PALETTE}
    near = min((float(np.linalg.norm(seen[a] - seen[b])), a, b) for a, b in combinations(PALETTE, 2))
    assert near[0] >= least, near


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_every_colour_stands_out_from_the_card(theme: str) -> None:
    assert min((contrast(linear(theme, name), linear(theme, "card")), name) for name in PALETTE) >= (2.95, "")


def test_no_two_series_share_a_marker() -> None:
    looks = [(mark.shape, mark.filled) for mark in STYLES.values()]
    assert len({*looks}) == len(looks) == len(PALETTE) + 1
    chart = line_chart([Series(c, c, "line", [Point(0, 1), Point(1, i)]) for i, c in enumerate(PALETTE)], "x", "y")
    drawn = re.findall(r'class="mark" style="(fill:[^;]+);[^"]*" d="M[^m]+(m[^"]+)"', chart)
    assert len({(fill == "fill:var(--card)", path) for fill, path in drawn}) == len(PALETTE)


@pytest.mark.parametrize("names", [["a", "b"], [f"mtp-parallel-{i}" for i in range(11)], ["x" * 70, "y"]])
def test_names_in_the_legend_never_overlap(names: list[str]) -> None:
    chart = line_chart([Series(n, c, "line", [Point(0, 1)]) for n, c in zip(names, PALETTE, strict=False)], "x", "y")
    texts = [t for t in ET.fromstring(chart).iter("text") if t.get("class") == "legend"]
    placed = sorted((float(t.attrib["y"]), float(t.attrib["x"]), t.text or "") for t in texts)
    assert len(placed) == len(names)
    for (y, x, name), (below, beside, _) in pairwise(placed):
        assert below - y >= 18 or x + charts._LETTER * len(name) < beside - 20
    assert all(x + charts._LETTER * len(name) <= charts.WIDTH + 4 for _, x, name in placed if len(name) < 40)


def test_neighbouring_bars_differ_in_grey() -> None:
    chart = bar_chart([("1", [0.2, 0.3])], [("gained", "pred"), ("added", "meas")], "x", "y")
    assert re.findall(r"fill-opacity:([\d.]+)", chart) == ["1", "0.4"] * 2


finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(finite, finite)
def test_ticks_span_their_values(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = nice_ticks(low, high)
    slack = 1e-6 * max(1.0, abs(low), abs(high))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= 9


@given(st.lists(st.tuples(finite, st.floats(0, 1e3)), min_size=1, max_size=9))
def test_marks_stay_inside_the_box(values: list[tuple[float, float]]) -> None:
    points = [Point(i, y, y - w, y + w) for i, (y, w) in enumerate(values)]
    chart = line_chart([Series("a", "pred", "line", points), Series("b", "meas", "dots", points)], "x", "y", marked_x=0)
    root = ET.fromstring(chart)
    marks = [mark for mark in root.iter("path") if mark.get("class") == "mark"]
    assert len(marks) == 2 * len(values) + 2, "every point and both names in the legend"
    for mark in marks:
        x, y = map(float, re.findall(r"^M(\S+) (\S+?)m", mark.attrib["d"])[0])
        assert 0 <= x <= WIDTH and 0 <= y <= HEIGHT


@given(st.lists(st.tuples(st.one_of(st.none(), st.floats(-2, 5)), st.floats(-2, 5)), min_size=1, max_size=9))
def test_bars_are_as_many_as_their_values(pairs: list[tuple[float | None, float]]) -> None:
    chart = bar_chart([(str(i), pair) for i, pair in enumerate(pairs)], [("a", "pred"), ("b", "meas")], "x", "y")
    titles = list(ET.fromstring(chart).iter("title"))
    assert len(titles) == sum(value is not None for pair in pairs for value in pair)
