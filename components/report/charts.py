"""Charts as inline SVG: no library, no resource from elsewhere, colours from the page's own light and dark theme.

A chart is drawn in a 440 x 280 box that scales with the page. Every number in a chart also stands in a table beside it;
hovering over a mark says it (`<title>`).
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

WIDTH, HEIGHT = 440, 280
LEFT, RIGHT, TOP, BOTTOM = 50, 14, 34, 44


class Point(NamedTuple):
    """A value with its interval; lo and hi None: no interval."""

    x: float
    y: float
    lo: float | None = None
    hi: float | None = None


class Series(NamedTuple):
    """Points of one kind. style: "line" (with a band), "dots" (with error bars), or "level" (one horizontal line)."""

    name: str
    colour: str  # a CSS variable of the page: pred, meas, other, ink, s4 ... s11
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
    """Where values fall in the box."""

    def __init__(self, x_values: Sequence[float], y_low: float, y_high: float) -> None:
        self.ticks = nice_ticks(y_low, y_high)
        self.y_low, self.y_high = self.ticks[0], self.ticks[-1]
        self.x_low, self.x_high = min(x_values) - 0.5, max(x_values) + 0.5

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        share = (value - self.y_low) / (self.y_high - self.y_low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


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

    x_labels: what is written under x = 0, 1, ... instead of the numbers; where there are many, some are left out.
    """
    points = [p for s in series for p in s.points]
    x_values: Sequence[float] = sorted({p.x for s in series if s.style != "level" for p in s.points})
    if x_labels is not None:
        x_values = range(len(x_labels))
    values = [v for p in points for v in (p.y, p.lo, p.hi) if v is not None]
    axes = Axes(x_values, 0.0 if from_zero else min(values), max(values))
    named, foot = fitted(x_labels) if x_labels is not None else (None, 0)
    parts = [_frame(axes, x_values, x_label, unit, named, foot)]
    if marked_x is not None:
        width = min(46.0, 0.84 * (axes.x(1) - axes.x(0)))
        left = axes.x(marked_x) - width / 2
        parts.insert(
            0, f'<rect class="chosen" x="{left:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>'
        )
    parts += [_draw(s, axes, unit) for s in series]
    return _svg(parts, series, y_label, foot)


def fitted(labels: Sequence[str]) -> tuple[list[str], int]:
    """Labels that fit under the axis, and the height they need below it: slanted where long, thinned out where many."""
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
    width = min(width, 34.0)  # a single depth makes no slab
    for i, (label, vs) in enumerate(groups):
        for j, value in enumerate(vs):
            if value is None:
                continue
            top, bottom = sorted((axes.y(100 * value), axes.y(0)))
            x = axes.x(i) + (j - len(names) / 2) * width
            said = html.escape(f"{names[j][0]}, {x_label} {label}: {100 * value:.1f} %")
            parts.append(
                f'<rect style="fill:var(--{names[j][1]})" x="{x + 1:.1f}" y="{top:.1f}" '
                f'width="{width - 2:.1f}" height="{max(bottom - top, 0.6):.1f}" rx="1.5"><title>{said}</title></rect>'
            )
    return _svg(parts, [Series(name, colour, "bar", []) for name, colour in names], y_label)


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
        parts.append(f'<text class="tick" x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{tick:g}{unit}</text>')
    for i, value in enumerate(x_values):
        label = labels[i] if labels else f"{value:g}"
        x, y = axes.x(value), HEIGHT - BOTTOM + 17
        place = f'text-anchor="end" transform="rotate(-35 {x:.1f} {y})"' if foot else 'text-anchor="middle"'
        parts.append(f'<text class="tick" x="{x:.1f}" y="{y}" {place}>{html.escape(label)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT + foot - 7}" text-anchor="middle">{html.escape(x_label)}</text>'
    )
    return "".join(parts)


def _draw(series: Series, axes: Axes, unit: str) -> str:
    """The marks of one series."""
    colour = f"var(--{series.colour})"
    if series.style == "level":
        y = axes.y(series.points[0].y)
        said = html.escape(f"{series.name}: {series.points[0].y:.2f}{unit}")
        return (
            f'<line class="level" style="stroke:{colour}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}">'
            f"<title>{said}</title></line>"
        )
    parts = []
    if series.style == "line":
        path = " ".join(f"{axes.x(p.x):.1f},{axes.y(p.y):.1f}" for p in series.points)
        banded = [(p.x, p.lo, p.hi) for p in series.points if p.lo is not None and p.hi is not None]
        if banded:
            over = [f"{axes.x(x):.1f},{axes.y(hi):.1f}" for x, _, hi in banded]
            under = [f"{axes.x(x):.1f},{axes.y(lo):.1f}" for x, lo, _ in reversed(banded)]
            parts.append(f'<polygon class="band" style="fill:{colour}" points="{" ".join(over + under)}"/>')
        parts.append(f'<polyline class="line" style="stroke:{colour}" points="{path}"/>')
    for p in series.points:
        x, y = axes.x(p.x), axes.y(p.y)
        if series.style == "dots" and p.lo is not None and p.hi is not None:
            low, high = axes.y(p.lo), axes.y(p.hi)
            parts.append(
                f'<path class="whisker" style="stroke:{colour}" '
                f'd="M{x - 4:.1f} {low:.1f}h8M{x:.1f} {low:.1f}V{high:.1f}M{x - 4:.1f} {high:.1f}h8"/>'
            )
        between = "" if p.lo is None or p.hi is None else f" [{p.lo:.2f}, {p.hi:.2f}]"
        said = html.escape(f"{series.name}, {p.x:g}: {p.y:.2f}{unit}{between}")
        radius = 4.5 if series.style == "dots" else 3
        parts.append(
            f'<circle style="fill:{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{said}</title></circle>'
        )
    return "".join(parts)


def _svg(parts: Sequence[str], series: Sequence[Series], y_label: str, foot: int = 0) -> str:
    """Box, legend on top, and a name for readers that do not see it. A long legend takes rows above the box."""
    rows: list[list[tuple[float, Series]]] = [[]]
    x = float(LEFT)
    for s in series:
        width = 17 + 6.7 * len(s.name) + 20
        if rows[-1] and x + width - 20 > WIDTH:
            rows.append([])
            x = float(LEFT)
        rows[-1].append((x, s))
        x += width
    extra = 18 * (len(rows) - 1)
    legend = []
    for number, row in enumerate(rows):
        base = 18 * number - extra
        for x, s in row:
            top, height = (base + 12, 3) if s.style == "level" else (base + 9, 9)
            swatch = f'<rect style="fill:var(--{s.colour})" x="{x:.1f}" y="{top}" width="12" height="{height}" rx="2"/>'
            legend.append(f'{swatch}<text class="legend" x="{x + 17:.1f}" y="{base + 18}">{html.escape(s.name)}</text>')
    label = html.escape(y_label, quote=True)
    body = "".join([*parts, *legend])
    return f'<svg viewBox="0 {-extra} {WIDTH} {HEIGHT + extra + foot}" role="img" aria-label="{label}">{body}</svg>'


PALETTE = ("pred", "meas", "other", "s4", "s5", "s6", "s7", "s8", "s9", "s10", "s11")
"""Colours of series that are many of a kind, in the order of their use."""
