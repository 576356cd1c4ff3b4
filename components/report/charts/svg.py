"""Charts as inline SVG, without a library or external resources, in the colours of the page's light and dark theme.

A chart is drawn in a box 440 wide that scales with the page. Every number in a chart is also in a table beside it, and
in the tooltip of its mark (`<title>`). Series differ in colour, marker and dash.

STYLES gives each series a colour, and for colour-blind readers and grey print a marker and a dash. style.css.jinja
defines the colours by these names, for light pages and paper and for dark pages. They differ clearly for normal sight
and the three kinds of colour blindness, each with a contrast of 3 or more to the card behind it, which test_svg.py
checks.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

WIDTH, HEIGHT = 440, 280
TALL, CROWDED = 360, 6  # a chart of more series or named places than CROWDED is TALL high
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 44
TICK_GAP = 7  # between a label of y and the box


class Point(NamedTuple):
    """A value with its interval; lo and hi None: no interval."""

    x: float
    y: float
    lo: float | None = None
    hi: float | None = None


class Series(NamedTuple):
    """Points of one kind. style: "line" (with a band), "dots" (with error bars), or "level" (one horizontal line)."""

    name: str
    colour: str  # a name in STYLES, which is a CSS variable of the page: pred, meas, other, s4 ... s13, ink
    style: str
    points: Sequence[Point]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers that span [low, high]."""
    span = max(high - low, 1e-9)
    step = 10.0 ** int(f"{span / count:e}".split("e")[1])
    step = next(step * m for m in (1, 2, 2.5, 5, 10) if span / (step * m) <= count)
    first = int(low // step)
    last = max(int(-(-high // step)), first + 1)  # equal values still get a scale
    return [round(i * step, 10) for i in range(first, last + 1)]


class Axes:
    """The scales of a chart: from values to positions in a box of the given height."""

    def __init__(self, x_values: Sequence[float], y_low: float, y_high: float, height: int = HEIGHT) -> None:
        self.height, self.bottom = height, height - BOTTOM
        self.ticks = nice_ticks(y_low, y_high)
        self.y_low, self.y_high = self.ticks[0], self.ticks[-1]
        self.x_low, self.x_high = min(x_values) - 0.5, max(x_values) + 0.5

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return self.bottom - share * (self.bottom - TOP)

    def gutter(self, unit: str) -> int:
        """The width that the longest label of y needs to the left of the box; 0 where they fit into it."""
        longest = max(len(f"{tick:g}{unit}") for tick in self.ticks)
        return max(0, math.ceil(_LETTER * longest) + TICK_GAP - LEFT)


def line_chart(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    marked_x: float | None = None,
    unit: str = "",
    from_zero: bool = False,
    x_labels: Sequence[str] | None = None,
) -> str:
    """Lines with bands, dots with error bars and levels over whole-number x. marked_x: the chosen depth.

    x_labels: texts under x = 0, 1, ... in place of the numbers; some of many are left out.
    """
    points = [p for s in series for p in s.points]
    x_values: Sequence[float] = sorted({p.x for s in series if s.style != "level" for p in s.points})
    if x_labels is not None:
        x_values = range(len(x_labels))
    values = [v for p in points for v in (p.y, p.lo, p.hi) if v is not None]
    height = TALL if max(len(series), len(x_labels or ())) > CROWDED else HEIGHT
    axes = Axes(x_values, 0.0 if from_zero else min(values), max(values), height)
    labels, foot = fit_labels(x_labels) if x_labels is not None else (None, 0)
    parts = [_frame(axes, x_values, x_label, unit, labels, foot)]
    if marked_x is not None:
        width = min(46.0, 0.84 * (axes.x(1) - axes.x(0)))
        x = axes.x(marked_x) - width / 2
        box = f'x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{axes.bottom - TOP}"'
        parts.insert(0, f'<rect class="chosen" {box}/>')
    parts += [_draw_series(s, axes, unit) for s in series]
    return _svg(parts, series, y_label, axes.height, foot, axes.gutter(unit))


def fit_labels(labels: Sequence[str]) -> tuple[list[str], int]:
    """(labels that fit under the axis, extra height below it); long labels are slanted, some of many are left out."""
    longest = max(map(len, labels))
    if len(labels) * (7 * longest + 8) <= WIDTH - LEFT - RIGHT:
        return list(labels), 0
    every = -(-len(labels) // 16)
    return [label if i % every == 0 else "" for i, label in enumerate(labels)], round(min(90.0, 4.0 * longest))


def bar_chart(
    groups: Sequence[tuple[str, Sequence[float | None]]], names: Sequence[tuple[str, str]], x_label: str, y_label: str
) -> str:
    """Grouped bars in percent. groups: (label, one share for each name or None); names: (name, colour)."""
    shares = [100 * v for _, vs in groups for v in vs if v is not None]
    axes = Axes(range(len(groups)), min([0.0, *shares]), max([1.0, *shares]))
    x_values = list(range(len(groups)))
    parts = [_frame(axes, x_values, x_label, " %", [label for label, _ in groups])]
    width = (axes.x(1) - axes.x(0)) * 0.72 / len(names)
    width = min(width, 34.0)  # keeps the bars of a single depth narrow
    for i, (label, vs) in enumerate(groups):
        for j, value in enumerate(vs):
            if value is None:
                continue
            top, bottom = sorted((axes.y(100 * value), axes.y(0)))
            x = axes.x(i) + (j - len(names) / 2) * width
            title = html.escape(f"{names[j][0]}, {x_label} {label}: {100 * value:.1f} %")
            box = f'x="{x + 1:.1f}" y="{top:.1f}" width="{width - 2:.1f}" height="{max(bottom - top, 0.6):.1f}"'
            parts.append(f'<rect style="{_bar_style(names[j][1], j)}" {box} rx="1.5"><title>{title}</title></rect>')
    legend = [Series(name, colour, "bar", []) for name, colour in names]
    return _svg(parts, legend, y_label, axes.height, gutter=axes.gutter(" %"))


def _bar_style(colour: str, place: int) -> str:
    """Every second bar of a group is pale with a full outline, so that grey print tells neighbours apart."""
    return f"fill:var(--{colour});stroke:var(--{colour});fill-opacity:{0.4 if place % 2 else 1:g}"


def _frame(
    axes: Axes,
    x_values: Sequence[float],
    x_label: str,
    unit: str,
    labels: Sequence[str] | None = None,
    foot: int = 0,
) -> str:
    """Grid, tick labels and the name of x. foot: height below the box that slanted labels need; 0: they lie flat."""
    parts = []
    for tick in axes.ticks:
        y = axes.y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - TICK_GAP}" y="{y + 4:.1f}" text-anchor="end">{tick:g}{unit}</text>'
        )
    for i, value in enumerate(x_values):
        label = labels[i] if labels else f"{value:g}"
        x, y = axes.x(value), axes.bottom + 19
        place = f'text-anchor="end" transform="rotate(-35 {x:.1f} {y})"' if foot else 'text-anchor="middle"'
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" {place}>{html.escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    y = axes.height + foot - 7
    parts.append(f'<text class="axis" x="{middle}" y="{y}" text-anchor="middle">{html.escape(x_label)}</text>')
    return "".join(parts)


def _draw_series(series: Series, axes: Axes, unit: str) -> str:
    """The marks of one series."""
    colour = f"var(--{series.colour})"
    if series.style == "level":
        y = axes.y(series.points[0].y)
        title = html.escape(f"{series.name}: {series.points[0].y:.2f}{unit}")
        return (
            f'<line class="level" style="stroke:{colour}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{title}</title></line>"
        )
    parts = []
    if series.style == "line":
        path = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in series.points)
        banded = [(p.x, p.lo, p.hi) for p in series.points if p.lo is not None and p.hi is not None]
        if banded:
            over = [f"{axes.x(x):.1f},{axes.y(hi):.1f}" for x, _, hi in banded]
            under = [f"{axes.x(x):.1f},{axes.y(lo):.1f}" for x, lo, _ in reversed(banded)]
            parts.append(f'<polygon class="band" style="fill:{colour}" points="{" ".join(over + under)}"/>')
        parts.append(f'<polyline class="line" style="stroke:{colour}"{dash_attribute(series.colour)} points="{path}"/>')
    for p in series.points:
        x, y = axes.x(p.x), axes.y(p.y)
        if series.style == "dots" and p.lo is not None and p.hi is not None:
            low, high = axes.y(p.lo), axes.y(p.hi)
            parts.append(
                f'<path class="whisker" style="stroke:{colour}" '
                f'd="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"/>'
            )
        between = "" if p.lo is None or p.hi is None else f" [{p.lo:.2f}, {p.hi:.2f}]"
        title = html.escape(f"{series.name}, {p.x:g}: {p.y:.2f}{unit}{between}")
        parts.append(marker(series.colour, x, y, 4.2 if series.style == "dots" else 3.2, title))
    return "".join(parts)


def _svg(
    parts: Sequence[str], series: Sequence[Series], y_label: str, height: int, foot: int = 0, gutter: int = 0
) -> str:
    """The chart in its box, with a legend on top (in rows above the box where it is long) and a label for readers.

    foot, gutter: what labels need below the box and to its left.
    """
    widths = [_SAMPLE[s.style] + 5 + _LETTER * len(s.name) + 14 for s in series]
    start, columns = float(LEFT), len(series)
    if LEFT + sum(widths) - 14 > WIDTH:  # one row is too little: columns of the same width
        most = max(1, int((WIDTH - 12 + 14) // max(widths)))
        lines = -(-len(series) // most)
        start, columns = 12.0, -(-len(series) // lines)
    extra = 18 * (-(-len(series) // columns) - 1)
    legend = []
    for place, s in enumerate(series):
        row, column = divmod(place, columns)
        x = start + (sum(widths[:place]) if columns == len(series) else column * max(widths))
        base = 18 * row - extra
        legend.append(_legend_sample(s, place, x, base + 13.5))
        at = f'x="{x + _SAMPLE[s.style] + 5:.1f}" y="{base + 18}"'
        legend.append(f'<text class="legend" {at}>{html.escape(s.name)}</text>')
    label = html.escape(y_label, quote=True)
    body = "".join([*parts, *legend])
    box = f"{-gutter} {-extra} {WIDTH + gutter} {height + extra + foot}"
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{body}</svg>'


_LETTER = 7.3  # width of a letter of the legend, of the widest font that the style sheet may fall back to
_SAMPLE = {"line": 26, "level": 22, "dots": 10, "bar": 12}  # width of what stands before a name in the legend


def _legend_sample(series: Series, place: int, x: float, y: float) -> str:
    """The legend's sample of a series, from x on, around height y. place: index of its bar in a group."""
    colour, width = series.colour, _SAMPLE[series.style]
    if series.style == "bar":
        box = f'x="{x:.1f}" y="{y - 4.5:.1f}" width="{width}" height="9"'
        return f'<rect style="{_bar_style(colour, place)}" {box} rx="2"/>'
    if series.style == "dots":
        return marker(colour, x + width / 2, y, 4.2)
    kind, dashes = ("level", "") if series.style == "level" else ("line", dash_attribute(colour))
    ends = f'x1="{x:.1f}" x2="{x + width:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    joined = f'<line class="{kind}" style="stroke:var(--{colour})"{dashes} {ends}/>'
    return joined if series.style == "level" else joined + marker(colour, x + width / 2, y, 3.2)


class SeriesStyle(NamedTuple):
    """A marker, and the dash of the lines that join such markers."""

    shape: str  # a key of _SHAPES, or "circle"
    filled: bool
    dash: str  # stroke-dasharray; "": solid


_SHAPES: Final = {  # SVG path commands from the middle on, all relative, for radius 1
    "square": "m -.9 -.9 h 1.8 v 1.8 h -1.8 z",
    "triangle": "m 0 -1.2 l 1.15 2 h -2.3 z",
    "triangle down": "m 0 1.2 l 1.15 -2 h -2.3 z",
    "diamond": "m 0 -1.3 l 1.3 1.3 l -1.3 1.3 l -1.3 -1.3 z",
    "pentagon": "m 0 -1.25 l 1.2 .9 l -.45 1.35 h -1.5 l -.45 -1.35 z",
    "cross": "m -1 -1 l 2 2 m 0 -2 l -2 2",
    "plus": "m -1.3 0 h 2.6 m -1.3 -1.3 v 2.6",
}
STYLES: Final = {
    "pred": SeriesStyle("circle", True, ""),
    "meas": SeriesStyle("square", True, ""),
    "other": SeriesStyle("triangle", True, ""),
    "s4": SeriesStyle("diamond", True, ""),
    "s5": SeriesStyle("triangle down", True, ""),
    "s6": SeriesStyle("circle", False, "7 3"),
    "s7": SeriesStyle("square", False, "7 3"),
    "s8": SeriesStyle("triangle", False, "7 3"),
    "s9": SeriesStyle("diamond", False, "7 3"),
    "s10": SeriesStyle("cross", False, "2 2.5"),
    "s11": SeriesStyle("plus", False, "2 2.5"),
    "s12": SeriesStyle("pentagon", True, ""),
    "s13": SeriesStyle("pentagon", False, "7 3"),
    "ink": SeriesStyle("triangle down", False, ""),
}
PALETTE: Final = tuple(name for name in STYLES if name != "ink")
"""Colours of several series of the same kind, in the order of their use."""


def dash_attribute(colour: str) -> str:
    """The attribute that dashes a line of this colour; "" for a solid one."""
    pattern = STYLES[colour].dash
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def marker(colour: str, x: float, y: float, radius: float, title: str = "") -> str:
    """The marker of a colour with its centre at (x, y). title: its tooltip, already escaped."""
    mark = STYLES[colour]
    fill = f"var(--{colour})" if mark.filled else "var(--card)"
    if mark.shape == "circle":
        r = f"{radius:g}"
        path = f"m-{r} 0a{r} {r} 0 1 0 {2 * radius:g} 0a{r} {r} 0 1 0 {-2 * radius:g} 0z"
    else:
        path = " ".join(
            piece if piece.isalpha() else f"{float(piece) * radius:g}" for piece in _SHAPES[mark.shape].split()
        )
    tooltip = f"<title>{title}</title>" if title else ""
    style = f"fill:{fill};stroke:var(--{colour})"
    return f'<path class="mark" style="{style}" d="M{x:.1f} {y:.1f}{path}">{tooltip}</path>'
