"""The styles of series: a colour, and for colour-blind readers and grey print a marker and a dash.

style.css.jinja defines the colours by these names, for light pages and paper and for dark pages. They differ clearly
for normal sight and the three kinds of colour blindness, each with a contrast of 3 or more to the card behind it;
tests/components/report/test_marks.py checks this.
"""

from __future__ import annotations

from typing import Final, NamedTuple


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
