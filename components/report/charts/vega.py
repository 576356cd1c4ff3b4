"""Charts one can point at, for pages that work without a network: Vega-Lite, written by Altair and drawn by Vega.

The colours are variables of the pages' style sheet, so one drawing serves the light page, the dark one and paper. A
click on a point leads to the place on the page that says where it comes from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import altair as alt
import networkx as nx
import vl_convert

from components.files import write_whole
from components.report.board import Ancestor, AtDepth, Chosen, DriftSeen, Interval, Move, Room, RunSeen
from components.report.charts.svg import PALETTE
from components.tables import format_bytes, format_interval

Spec = dict[str, Any]
VERDICTS: Final = {"use": "circle", "undecided": "triangle-up", "do_not_speculate": "square", "invalid": "cross"}
OUTCOMES: Final = {"promoted": "good", "made": "pred", "nothing new": "soft", "failed": "bad", "killed": "doubt"}
_LETTERS: Final = 20  # of a name in a box of the lineage
_BOX, _ACROSS, _DOWN = (148, 40), 160, 60  # a box of the lineage, and from one to the next
_SHAPES: Final = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")


def javascript(folder: Path) -> str:
    """Vega, Vega-Lite and what puts them on a page, as one script; kept in a folder, since bundling takes seconds."""
    file = folder / f"vega-{version('vl-convert-python')}.js"
    if not file.is_file():
        language = "v" + ".".join(alt.SCHEMA_VERSION.lstrip("v").split(".")[:2])
        write_whole(file, vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=language))
    return file.read_text(encoding="utf-8")


def speed_chart(choices: Sequence[Chosen], moves: Sequence[Move]) -> Spec | None:
    """Measured speed of every choice over time, and the versions that became champion."""
    return _over_time([(c, c.speed) for c in choices], moves, "speed, plain decoding is 1", level=1.0)


def acceptance_chart(choices: Sequence[Chosen], moves: Sequence[Move]) -> Spec | None:
    """Acceptance length at the chosen depth over time."""
    return _over_time([(c, c.acceptance) for c in choices], moves, "tokens kept a round", level=1.0)


def _over_time(
    points: Sequence[tuple[Chosen, Interval | None]], moves: Sequence[Move], title: str, level: float
) -> Spec | None:
    rows: list[dict[str, Any]] = [
        {
            "at": _time(choice.at),
            "value": value.value,
            "lo": value.lo,
            "hi": value.hi,
            "series": choice.method,
            "verdict": choice.verdict,
            "champion": bool(choice.champion),
            "href": f"#{choice.origin.anchor}",
            "says": _says(value),
            "what": f"{choice.method} at depth {choice.depth}"
            + (f", version {choice.champion}" if choice.champion else ""),
            "judged": f"{choice.verdict.replace('_', ' ')}: {'; '.join(choice.reasons)}"[:160],
            "run": f"{choice.pipeline} on {choice.machine}",
        }
        for choice, value in points
        if value is not None
    ]
    if not rows:
        return None
    methods = [choice.method for choice, _ in points]  # measured or not: a method has one colour in all charts
    base = alt.Chart(alt.Data(values=rows)).encode(x=_when(rows), color=_colours(methods), href="href:N")
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    bars = base.mark_rule(strokeWidth=1.6, opacity=0.55).encode(y=alt.Y("lo:Q", title=title), y2="hi:Q")
    shape = alt.Shape("verdict:N", scale=alt.Scale(domain=[*VERDICTS], range=[*VERDICTS.values()]), legend=None)
    marks = base.mark_point(size=70, filled=True, strokeWidth=1.8, cursor="pointer").encode(
        y=y,
        shape=shape,
        stroke=_colours(methods, alt.Stroke),
        fillOpacity=alt.condition("datum.champion", alt.value(1.0), alt.value(0.12)),
        tooltip=_tooltips(at="made", says="value", what="drafter", judged="verdict", run="run"),
    )
    plain = alt.Chart(alt.Data(values=[{"level": level}])).mark_rule(strokeDash=[5, 4], color="var(--ink)")
    layers = [plain.encode(y="level:Q"), *_promotions(moves, min(row["at"] for row in rows)), bars, marks]
    return _finished(alt.layer(*layers).resolve_scale(color="shared"))


def _promotions(moves: Sequence[Move], first: str) -> list[alt.Chart]:
    """A line for each new champion in the span of time that is tooltips."""
    rows = [
        {
            "at": _time(move.at),
            "label": f"v{move.version}",
            "what": f"{move.name} version {move.version}: {move.action}",
            "who": move.who,
            "why": move.why[:160],
            "href": "#moves",
        }
        for move in moves
        if move.alias == "champion" and move.version is not None and _time(move.at) >= first
    ]
    if not rows:
        return []
    tooltips = _tooltips(at="when", what="moved", who="by", why="why")
    base = alt.Chart(alt.Data(values=rows)).encode(x="at:T", tooltip=tooltips, href="href:N")
    lines = base.mark_rule(color="var(--good)", strokeWidth=1.5, strokeDash=[2, 3], cursor="pointer")
    texts = base.mark_text(color="var(--good)", align="left", dx=3, dy=4, fontWeight=600, cursor="pointer")
    return [lines, texts.encode(y=alt.value(0), text="label:N")]


def depth_charts(depths: Sequence[AtDepth]) -> list[tuple[str, str, Spec]]:
    """(title, what it shows, chart) of the newest choice of one model: cost, acceptance and speed by depth."""
    drafted = [d for d in depths if d.depth > 0]
    if not drafted:
        return []
    cost = [_at_depth(d, Interval(d.cost), f"verify {d.verify_ms:.2f} ms, draft {d.draft_ms:.2f} ms") for d in drafted]
    acceptance = [_at_depth(d, d.acceptance, "replayed from maps") for d in drafted]
    fast = [_at_depth(d, d.predicted, "predicted") for d in drafted]
    measured = [_at_depth(d, d.speed, "measured") for d in drafted if d.speed is not None]
    return [
        ("What a round costs", "Time of verifying and drafting, in plain steps.", _by_depth(cost, "plain steps")),
        (
            "What a round keeps",
            "Tokens, the target's own included; bands are 95 %.",
            _by_depth(acceptance, "tokens a round"),
        ),
        (
            "What it brings",
            "Line: predicted. Marks: measured.",
            _by_depth(fast, "speed, plain decoding is 1", measured),
        ),
    ]


def _at_depth(depth: AtDepth, value: Interval, how: str) -> dict[str, Any]:
    return {
        "depth": depth.depth,
        "value": value.value,
        "lo": value.lo,
        "hi": value.hi,
        "series": depth.series,
        "says": _says(value),
        "how": how,
        "href": f"#{depth.origin.anchor}",
    }


def _by_depth(rows: Sequence[Mapping[str, Any]], title: str, measured: Sequence[Mapping[str, Any]] = ()) -> Spec:
    colour = _colours(row["series"] for row in rows)
    tooltips = _tooltips(series="drafter", depth="depth", says="value", how="how")
    x = alt.X("depth:O", title="draft depth", axis=alt.Axis(labelAngle=0))
    y = alt.Y("value:Q", title=title, scale=alt.Scale(zero=False))
    base = alt.Chart(alt.Data(values=list(rows))).encode(x=x, color=colour)
    layers: list[alt.Chart] = [base.mark_line(strokeWidth=2).encode(y=y)]
    if any(row["lo"] is not None for row in rows) and len({row["series"] for row in rows}) <= 4:
        layers.insert(0, base.mark_area(opacity=0.14).encode(y=alt.Y("lo:Q", title=title), y2="hi:Q"))
    if not measured:
        layers.append(_marks(base, y, tooltips))
        return _finished(alt.layer(*layers))
    points = alt.Chart(alt.Data(values=list(measured))).encode(x=x, color=colour)
    layers.append(points.mark_rule(strokeWidth=1.6).encode(y=alt.Y("lo:Q", title=title), y2="hi:Q"))
    layers.append(_marks(points, y, tooltips))
    return _finished(alt.layer(*layers))


def _marks(base: alt.Chart, y: alt.Y, tooltips: list[alt.Tooltip]) -> alt.Chart:
    return base.mark_point(size=55, filled=True, cursor="pointer").encode(y=y, tooltip=tooltips, href="href:N")


def drift_chart(observations: Sequence[DriftSeen]) -> Spec | None:
    """The change of acceptance on new traffic over time; red where its interval excludes zero."""
    if not observations:
        return None
    rows = [
        {
            "at": _time(d.at),
            "value": d.change.value,
            "lo": d.change.lo,
            "hi": d.change.hi,
            "drifted": "drifted" if d.drifted else "no drift shown",
            "says": f"{_says(d.change)} tokens a round",
            "what": f"{d.model}, {d.method}: {d.then:.2f} at release, {d.now:.2f} on {d.prompts} new prompts",
            "href": f"#{d.origin.anchor}",
        }
        for d in observations
    ]
    scale = alt.Scale(domain=["no drift shown", "drifted"], range=["var(--pred)", "var(--bad)"])
    colour = alt.Color("drifted:N", scale=scale, legend=alt.Legend(title=None, orient="top"))
    base = alt.Chart(alt.Data(values=rows)).encode(x=_when(rows), color=colour, href="href:N")
    title = "change, tokens a round"
    zero = alt.Chart(alt.Data(values=[{"level": 0}])).mark_rule(strokeDash=[5, 4], color="var(--ink)")
    tooltips = _tooltips(at="when", says="change", what="what", drifted="verdict")
    marks = base.mark_point(size=70, filled=True, cursor="pointer").encode(
        y=alt.Y("value:Q", title=title), tooltip=tooltips
    )
    bars = base.mark_rule(strokeWidth=1.6).encode(y=alt.Y("lo:Q", title=title), y2="hi:Q")
    return _finished(alt.layer(zero.encode(y="level:Q"), bars, marks))


def runs_chart(runs: Sequence[RunSeen]) -> Spec | None:
    """When each pipeline ran, and how it ended."""
    if not runs:
        return None
    rows = [
        {
            "at": _time(run.started_at),
            "pipeline": run.pipeline,
            "outcome": run.outcome,
            "sentence": run.sentence[:240],
            "href": f"#run-{run.run_id}",
        }
        for run in runs
    ]
    colours = [f"var(--{name})" for name in OUTCOMES.values()]
    scale = alt.Scale(domain=[*OUTCOMES], range=colours)
    legend = alt.Legend(title=None, orient="top", symbolType="square", columns=3)
    chart = alt.Chart(alt.Data(values=rows)).mark_square(size=130, opacity=1, cursor="pointer")
    chart = chart.encode(
        x=_when(rows),
        y=alt.Y("pipeline:N", title=None, axis=alt.Axis(grid=True, labelLimit=130)),
        color=alt.Color("outcome:N", scale=scale, legend=legend),
        tooltip=_tooltips(at="began", pipeline="pipeline", outcome="outcome", sentence="how it ended"),
        href="href:N",
    )
    return _finished(chart, height=30 * len({run.pipeline for run in runs}))


def room_chart(room: Sequence[Room]) -> Spec | None:
    """Bytes on disk by kind or by pipeline, the largest first."""
    if not room:
        return None
    rows: list[dict[str, Any]] = [
        {"name": r.name, "mib": r.num_bytes / 2**20, "says": format_bytes(r.num_bytes), "artifacts": r.artifacts}
        for r in room
    ]
    most = max(row["mib"] for row in rows)
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("name:N", sort=[row["name"] for row in rows], title=None, axis=alt.Axis(labelLimit=190, grid=False)),
        x=alt.X("mib:Q", title=None, axis=None, scale=alt.Scale(domain=[0, 1.25 * most or 1])),
        tooltip=_tooltips(name="what", says="takes", artifacts="artifacts"),
    )
    bars = base.mark_bar(color="var(--pred)", height={"band": 0.7}, cornerRadiusEnd=2)
    texts = base.mark_text(align="left", dx=5, color="var(--ink)").encode(text="says:N")
    return _finished(alt.layer(bars, texts), height=24 * len(rows))


def lineage_chart(ancestors: Sequence[Ancestor]) -> Spec | None:
    """What a release was made from: sources on top, the release below. A line is left out where others lead there."""
    if not ancestors:
        return None
    graph = nx.DiGraph()
    graph.add_nodes_from(a.key for a in ancestors)
    keys = set(graph)
    graph.add_edges_from((one, a.key) for a in ancestors for one in a.inputs if one in keys)
    places, middle = _places(graph), _BOX[0] / 2
    boxes = [
        {
            "x": places[a.key][0],
            "y": places[a.key][1],
            "title": _cut(a.step or a.kind),
            "note": _cut(f"{a.kind}{f': {a.note}' if a.note else ''}"),
            "kind": a.kind,
            "says": f"{a.at:%Y-%m-%d %H:%M}" + (f", in {a.seconds:.0f} s" if a.seconds is not None else ""),
            "where": f"{a.pipeline} on {a.machine}",
            "href": f"#a-{a.key[:12]}",
        }
        for a in ancestors
    ]
    edges = [
        {
            "x": places[one][0] + middle,
            "y": places[one][1] + _BOX[1],
            "x2": places[key][0] + middle,
            "y2": places[key][1],
        }
        for one, key in nx.transitive_reduction(graph).edges
    ]
    width = max(x for x, _ in places.values()) + _BOX[0] + 2
    height = max(y for _, y in places.values()) + _BOX[1] + 2

    def at(channel: Any, field: str, size: float) -> Any:
        scale = alt.Scale(domain=[0, size], range=[0, size], nice=False, zero=False)
        return channel(field, axis=None, scale=scale)

    lines = alt.Chart(alt.Data(values=edges)).mark_rule(color="var(--soft)", opacity=0.55, strokeWidth=1.2)
    lines = lines.encode(x=at(alt.X, "x:Q", width), y=at(alt.Y, "y:Q", height), x2="x2:Q", y2="y2:Q")
    base = alt.Chart(alt.Data(values=boxes)).encode(
        x=at(alt.X, "x:Q", width),
        y=at(alt.Y, "y:Q", height),
        href="href:N",
        tooltip=_tooltips(title="step", note="what", says="made", where="where"),
    )
    ends = {"Release": "var(--good)", "Draft": "var(--meas)", "Target": "var(--pred)"}
    stroke = alt.Stroke(
        "kind:N", legend=None, scale=alt.Scale(domain=[*ends, "other"], range=[*ends.values(), "var(--line)"])
    )
    base = base.transform_calculate(
        colour=f"indexof({list(ends)}, datum.kind) < 0 ? 'other' : datum.kind",
        right=f"datum.x + {_BOX[0]}",
        bottom=f"datum.y + {_BOX[1]}",
    )
    stroke.shorthand = "colour:N"
    shape = base.mark_rect(fill="var(--card)", strokeWidth=1.6, cornerRadius=6, cursor="pointer")
    titles = base.mark_text(align="left", dx=9, dy=15, color="var(--ink)", fontWeight=600, cursor="pointer")
    notes = base.mark_text(align="left", dx=9, dy=30, color="var(--soft)", fontSize=11, cursor="pointer")
    layers = [
        shape.encode(x2="right:Q", y2="bottom:Q", stroke=stroke),
        titles.encode(text="title:N"),
        notes.encode(text="note:N"),
    ]
    chart = alt.layer(*([lines] if edges else []), *layers)
    return _finished(chart, width=width, height=height)


def _places(graph: nx.DiGraph[str]) -> dict[str, tuple[float, float]]:
    """Key -> the upper left corner of its box: what a thing is made of stands above it, as near as there is room."""
    layers = [list(layer) for layer in nx.topological_generations(graph.reverse())][::-1]
    places: dict[str, tuple[float, float]] = {}
    widest = max(map(len, layers))
    for row, layer in enumerate(layers):
        above = {key: [places[one][0] for one in graph.predecessors(key)] for key in layer}
        layer.sort(key=lambda key: sum(above[key]) / max(len(above[key]), 1))
        start = (widest - len(layer)) / 2
        places |= {key: (1 + _ACROSS * (start + i), 1.0 + _DOWN * row) for i, key in enumerate(layer)}
    return places


def _when(rows: Sequence[Mapping[str, Any]]) -> alt.X:
    """The axis of time, half a day longer on both sides than what it shows."""
    times = sorted(datetime.fromisoformat(row["at"]) for row in rows)
    ends = [_time(times[0] - timedelta(hours=12)), _time(times[-1] + timedelta(hours=12))]
    scale = alt.Scale(type="utc", domain=ends, nice=False)
    shown_as = "%d %b" if times[-1] - times[0] > timedelta(days=2) else "%d %b %H:%M"
    return alt.X("at:T", title=None, scale=scale, axis=alt.Axis(format=shown_as, tickCount=8, labelSeparation=8))


def _finished(chart: Any, width: Any = "container", height: Any = 250) -> Spec:
    """The chart as JSON, in the looks of the pages."""
    text: dict[str, Any] = {
        "labelColor": "var(--soft)",
        "titleColor": "var(--soft)",
        "labelFontSize": 12,
        "titleFontSize": 12,
    }
    axis = alt.AxisConfig(
        **text, titleFontWeight="normal", gridColor="var(--grid)", domainColor="var(--line)", tickColor="var(--line)"
    )
    config = alt.Config(
        background="transparent",
        font="system-ui, sans-serif",
        axis=axis,
        view=alt.ViewConfig(stroke=None),
        legend=alt.LegendConfig(**text),
        axisX=alt.AxisConfig(grid=False, labelOverlap=True),
    )
    sized = {"type": "fit-x", "contains": "padding"} if width == "container" else {"type": "pad"}
    finished: Spec = chart.properties(width=width, height=height, config=config, autosize=sized).to_dict()
    return finished


def _colours(names: Iterable[str], channel: Any = alt.Color) -> Any:
    """The colours of series, in the order of the pages; a legend where there are several, three a line."""
    series = sorted(set(names))
    scale = alt.Scale(domain=series, range=[f"var(--{PALETTE[i % len(PALETTE)]})" for i in range(len(series))])
    key = alt.Legend(title=None, orient="top", columns=3, labelLimit=110, symbolOpacity=1, symbolType="circle")
    return channel("series:N", scale=scale, legend=key)


def _tooltips(**fields: str) -> list[alt.Tooltip]:
    """Field -> the name that a reader sees."""
    tooltips = []
    for name, title in fields.items():
        when: dict[str, Any] = {"format": "%Y-%m-%d %H:%M"} if name == "at" else {}
        tooltips.append(alt.Tooltip(f"{name}:{'T' if name == 'at' else 'N'}", title=title, **when))
    return tooltips


def _says(value: Interval) -> str:
    return f"{value.value:.2f}{format_interval(value.lo, value.hi)}"


def _time(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%S}Z"


def _cut(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "\N{HORIZONTAL ELLIPSIS}"
