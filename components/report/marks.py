"""How series are told apart: by colour, and without it (colour-blind readers, grey print) by marker and dash.

The colours stand in style.css.jinja by these names, once for light pages and paper, once for dark ones. They lie far
apart to normal sight and to the three kinds of colour-blind sight, each at contrast 3 or more with the card behind it;
tests/components/report/test_marks.py holds them to that.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Mark(NamedTuple):
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
MARKS: Final = {
    "pred": Mark("circle", True, ""),
    "meas": Mark("square", True, ""),
    "other": Mark("triangle", True, ""),
    "s4": Mark("diamond", True, ""),
    "s5": Mark("triangle down", True, ""),
    "s6": Mark("circle", False, "7 3"),
    "s7": Mark("square", False, "7 3"),
    "s8": Mark("triangle", False, "7 3"),
    "s9": Mark("diamond", False, "7 3"),
    "s10": Mark("cross", False, "2 2.5"),
    "s11": Mark("plus", False, "2 2.5"),
    "ink": Mark("triangle down", False, ""),
}
PALETTE: Final = tuple(name for name in MARKS if name != "ink")
"""Colours of series that are many of a kind, in the order of their use."""


def dash(colour: str) -> str:
    """The attribute that dashes a line of this colour; "" for a solid one."""
    pattern = MARKS[colour].dash
    return f' stroke-dasharray="{pattern}"' if pattern else ""


def marker(colour: str, x: float, y: float, radius: float, title: str = "") -> str:
    """The marker of a colour with its middle at (x, y); title: what hovering over it says, escaped already."""
    mark = MARKS[colour]
    fill = f"var(--{colour})" if mark.filled else "var(--card)"
    if mark.shape == "circle":
        r = f"{radius:g}"
        path = f"m-{r} 0a{r} {r} 0 1 0 {2 * radius:g} 0a{r} {r} 0 1 0 {-2 * radius:g} 0z"
    else:
        path = " ".join(
            piece if piece.isalpha() else f"{float(piece) * radius:g}" for piece in _SHAPES[mark.shape].split()
        )
    said = f"<title>{title}</title>" if title else ""
    style = f"fill:{fill};stroke:var(--{colour})"
    return f'<path class="mark" style="{style}" d="M{x:.1f} {y:.1f}{path}">{said}</path>'
