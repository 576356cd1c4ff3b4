"""The dashboard of a home: one self-contained page with who is champion and why, what was measured, how nights ended.

It needs no network: the program that draws its charts is part of the page, and a policy in its head forbids any other
source. Every point of a chart leads to its row, with the run, the artifact and the SELECT that gives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from components.html_pages import render
from components.report.board import Ancestor, AtDepth, Board, Champion, Chosen, DriftSeen, Interval, Origin
from components.report.charts.vega import (
    Spec,
    acceptance_chart,
    depth_charts,
    drift_chart,
    lineage_chart,
    room_chart,
    runs_chart,
    speed_chart,
)
from components.tables import format_interval, format_ratio


class Figure(NamedTuple):
    """A chart on the page. number: of its specification among those at the page's end; look: a class of the sheet."""

    number: int
    title: str
    about: str
    look: str = ""


class Part(NamedTuple):
    """The charts of one model."""

    model: str
    over_time: list[Figure]
    by_depth: list[Figure]


class Card(NamedTuple):
    """A champion as the page says it. headline: version, method and depth; facts: label -> value."""

    name: str
    headline: str
    why: str
    facts: dict[str, str]
    link: str
    lineage: Figure | None
    ancestors: tuple[Ancestor, ...]
    goes_on: bool


class Evidence(NamedTuple):
    """The row that a point leads to."""

    origin: Origin
    cells: list[str]


class _Page:
    """The charts that the page has so far."""

    def __init__(self) -> None:
        self.specs: list[Spec] = []

    def add(self, title: str, about: str, spec: Spec | None, look: str = "") -> list[Figure]:
        """A chart, where there is something to draw."""
        if spec is None:
            return []
        self.specs.append(spec)
        return [Figure(len(self.specs) - 1, title, about, look)]


def write_dashboard(board: Board, script: str) -> str:
    """The page as HTML. script: the program that draws (components/report/charts/vega.py javascript)."""
    page = _Page()
    cards = [_card(page, champion) for champion in board.champions]
    values = {
        "title": "Draftsmith",
        "origin": {
            "home": board.home,
            "looked at": f"{board.made_at:%Y-%m-%d %H:%M} UTC",
            "over time": f"the last {board.days} days",
        }.items(),
        "board": board,
        "cards": cards,
        "without": _without_champion(board),
        "parts": _parts(page, board),
        "drift": page.add(
            "Acceptance on new traffic, against that at release",
            "Above 0: more tokens are kept than at release. Red: the 95 % interval of the change excludes zero.",
            drift_chart(board.drift),
            "broad",
        ),
        "nights": page.add("", "A square a run; its sentence stands below.", runs_chart(board.runs), "broad"),
        "room": [
            *page.add("By kind", "", room_chart([room for room in board.room if room.by == "kind"])),
            *page.add("By pipeline", "", room_chart([room for room in board.room if room.by == "pipeline"])),
        ],
        "evidence": _evidence(board),
        "specs": _in_script(page.specs),
        "script": script.replace("</script", "<\\/script"),
    }
    return render(Path(__file__).parent / "dashboard.html.jinja", values)


def _in_script(specs: Sequence[Spec]) -> str:
    """JSON that ends no script element, whatever its texts say."""
    return json.dumps(specs, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _card(page: _Page, champion: Champion) -> Card:
    move, facts = champion.move, champion.facts
    speed, depth = _number(facts, "speedup_meas"), facts.get("depth_k", "?")
    between = format_interval(_number(facts, "meas_lo"), _number(facts, "meas_hi"))
    measured = f"{format_ratio(speed)}{between} measured" if speed is not None else "not measured"
    lengths = format_interval(_number(facts, "al_lo"), _number(facts, "al_hi"))
    al = _number(facts, "al")
    labelled = {
        "verdict": facts.get("verdict", "").replace("_", " "),
        "tokens kept a round": "" if al is None else f"{al:.2f}{lengths}",
        "predicted": format_ratio(_number(facts, "speedup_pred"), ""),
        "since": f"{move.at:%Y-%m-%d %H:%M} UTC",
        "by": f"{move.who} ({move.action})",
        "measured on": facts.get("machine_name", ""),
        "run": facts.get("run_id", ""),
        "release": facts.get("key", "")[:12],
    }
    figures = page.add(
        "What went into it",
        "From its sources at the top to the release at the bottom; a click leads to the artifact.",
        lineage_chart(champion.lineage),
        "lineage",
    )
    return Card(
        name=move.name,
        headline=f"version {move.version}, {facts.get('method', '?')} at depth {depth}: {measured}",
        why=move.why,
        facts={label: value for label, value in labelled.items() if value},
        link=f"/#/models/{move.name}/versions/{move.version}",
        lineage=next(iter(figures), None),
        ancestors=champion.lineage,
        goes_on=champion.goes_on,
    )


def _number(facts: Mapping[str, str], name: str) -> float | None:
    text = facts.get(name, "")
    return float(text) if text else None


def _without_champion(board: Board) -> list[tuple[str, str]]:
    """(model, why) of models that something was measured of and that have no champion."""
    served = {champion.move.model for champion in board.champions}
    newest: dict[str, Chosen] = {}
    for choice in board.choices:
        best = newest.get(choice.model)
        if best is None or (choice.at, _speed(choice)) >= (best.at, _speed(best)):
            newest[choice.model] = choice
    lines = []
    for model, choice in newest.items():
        if model not in served:
            waits = [move for move in board.moves if move.model == model and move.alias in ("candidate", "challenger")]
            reason = f"{choice.method}, {choice.verdict.replace('_', ' ')}: {'; '.join(choice.reasons)}"
            next_step = "none of its releases is in the registry"
            if waits:
                next_step = (
                    f"version {waits[-1].version} waits: draftsmith show {waits[-1].name} says what the gate said"
                )
            lines.append((model, f"{reason}. No champion: {next_step}."))
    return lines


def _speed(choice: Chosen) -> float:
    return choice.speed.value if choice.speed is not None else 0.0


def _parts(page: _Page, board: Board) -> list[Part]:
    """Charts of each model, those that were measured last first."""
    models = dict.fromkeys(choice.model for choice in reversed(board.choices))
    models |= dict.fromkeys(depth.model for depth in board.depths)
    parts = []
    for model in models:
        choices = [choice for choice in board.choices if choice.model == model]
        moves = [move for move in board.moves if move.model == model]
        over_time = page.add(
            "Speed",
            "Against plain decoding, with 95 % intervals. Filled: has been champion. Green: a version became champion.",
            speed_chart(choices, moves),
        ) + page.add(
            "Acceptance",
            "Tokens kept a round at the chosen depth, the target's own included, with 95 % intervals.",
            acceptance_chart(choices, moves),
        )
        by_depth = []
        for title, about, spec in depth_charts([depth for depth in board.depths if depth.model == model]):
            by_depth += page.add(title, about, spec)
        parts.append(Part(model, over_time, by_depth))
    return parts


def _evidence(board: Board) -> list[tuple[str, list[str], list[Evidence]]]:
    """(title, columns, rows) of the points of all charts."""
    choices = [Evidence(c.origin, _choice_cells(c)) for c in reversed(board.choices)]
    depths = [Evidence(d.origin, _depth_cells(d)) for d in board.depths]
    drift = [Evidence(d.origin, _drift_cells(d)) for d in reversed(board.drift)]
    every = [
        ("Choices of a depth", ["when", "model", "drafter", "depth", "speed", "AL", "verdict", "machine"], choices),
        ("Depths of the newest choice", ["model", "drafter", "depth", "cost", "AL", "predicted", "measured"], depths),
        ("Drift", ["when", "model", "drafter", "then", "now", "change", "verdict"], drift),
    ]
    return [one for one in every if one[2]]


def _choice_cells(choice: Chosen) -> list[str]:
    drafter = choice.method + (f", version {choice.champion}" if choice.champion else "")
    verdict = choice.verdict.replace("_", " ")
    speed, acceptance = _said(choice.speed, "x"), _said(choice.acceptance)
    when = f"{choice.at:%Y-%m-%d %H:%M}"
    return [when, choice.model, drafter, str(choice.depth), speed, acceptance, verdict, choice.machine]


def _depth_cells(depth: AtDepth) -> list[str]:
    speeds = [_said(depth.predicted, "x"), _said(depth.speed, "x")]
    return [depth.model, depth.series, str(depth.depth), f"{depth.cost:.2f}", _said(depth.acceptance), *speeds]


def _drift_cells(drift: DriftSeen) -> list[str]:
    verdict = "drifted" if drift.drifted else "no drift shown"
    numbers = [f"{drift.then:.2f}", f"{drift.now:.2f}", _said(drift.change)]
    return [f"{drift.at:%Y-%m-%d %H:%M}", drift.model, drift.method, *numbers, verdict]


def _said(value: Interval | None, unit: str = "") -> str:
    return "-" if value is None else f"{value.value:.2f}{unit}{format_interval(value.lo, value.hi)}"
