"""`draftsmith trend METRIC`: any number of any view over runs, machines or versions, as a table and a picture.

A metric is a numeric column of a view (`speedup_meas`, `v_speed.tokens_per_s`) or `info.NAME`, a number among the facts
of artifacts. What else the view tells apart (model, method, workload, depth, batch size ...) makes the series: numbers
of different models are never in one line. Of several rows of a series in one run the newest counts; of rows as old as
each other, as a night's challenger and champion are, that of the newest drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from components.contract import UserError
from components.report.pages.trend import TrendSeries, write_trend
from components.text import did_you_mean
from flows.commands.terminal import Format, echo, named_values, out, print_in
from storage.artifacts.store import default_home
from storage.history.query import open_history

# Where a bare column name is looked for, in this order.
VIEWS = (
    "v_choice", "v_depth", "v_comparison", "v_acceptance", "v_speedup", "v_speed", "v_position", "v_map", "v_cost",
    "v_parity", "drift", "v_flags", "v_draft", "v_step", "v_run",
)  # fmt: skip
TELLS_APART = (
    "model", "pipeline", "step", "method", "code", "quantity", "phase", "workload", "depth_k", "tree_budget",
    "position", "batch_size", "kv_len", "dtype", "kernel", "num_threads", "temperature", "engine", "concurrency",
    "source",
)  # fmt: skip
OUTCOMES = {"v_choice": {"depth_k"}, "v_draft": {"step"}}  # what differs from run to run and makes no other series
INTERVALS = {
    "speedup_meas": ("meas_lo", "meas_hi"),
    "speedup_pred": ("pred_lo", "pred_hi"),
    "al": ("al_lo", "al_hi"),
    "ratio": ("lo", "hi"),
    "change": ("lo", "hi"),
    "al_now": ("now_lo", "now_hi"),
    "al_then": ("then_lo", "then_hi"),
}
# When a row was made, by the column that says so -> which session of its artifact it is of.
_SAME_SESSION = {
    "created_at": "a.created_at = v.created_at",
    "ended_at": "coalesce(a.session, '') = coalesce(v.session, '')",
}
# View -> the key of its rows' target, for views without the name of their model.
_TARGET_KEY = {
    "v_artifact": "coalesce(v.info ->> 'target_key', v.inputs ->> 'target', v.artifact_key)",
    "v_step": "coalesce(v.inputs ->> '$.target[0][1]', v.artifact_key)",
}
_TARGETS_OF_RUNS = "SELECT run_id, min(artifact_key) AS target_key FROM step WHERE kind = 'Target' GROUP BY run_id"
_DRAFTERS = "SELECT artifact_key, max(created_at) AS created_at FROM artifact WHERE kind = 'Draft' GROUP BY 1"
_BARS = "▁▂▃▄▅▆▇█"


class Over(StrEnum):
    """What a trend runs over."""

    runs = "runs"
    machines = "machines"
    versions = "versions"


def trend(
    metric: Annotated[
        str, typer.Argument(help="A number of any view (speedup_meas, v_speed.tokens_per_s), or info.NAME.")
    ],
    over: Annotated[Over, typer.Option(help="What the values are told apart by.")] = Over.runs,
    filters: Annotated[
        list[str], typer.Option("--where", "-w", help="COLUMN=VALUE that rows must have; may be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    limit: Annotated[int, typer.Option(min=1, help="The last values of each series.")] = 50,
    picture: Annotated[Path | None, typer.Option(help="Write a page with a chart here (HTML).")] = None,
    format_: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.table,
) -> None:
    """One number over runs, machines or versions: a table, a line of bars, a picture."""
    result = find_trend(default_home(), metric, named_values(filters), limit)
    print_in(format_, out, *table(result, over.value))
    if format_ is Format.table:
        for line in spark_lines(result) if over is Over.runs else []:
            echo(line)
        echo(f"{result.metric}: {len(result.dots)} values")
    if picture is not None:
        draw(result, over.value, picture)
        if format_ is Format.table:
            echo(f"drawn: {picture}")


@dataclass(frozen=True)
class Dot:
    """One value. series: the label that distinguishes it from other values of its run."""

    at: datetime
    series: str
    value: float
    lo: float | None
    hi: float | None
    machine: str
    version: str
    run: str


@dataclass(frozen=True)
class Trend:
    """Every selected value of a metric, oldest first. metric: VIEW.COLUMN."""

    metric: str
    dots: tuple[Dot, ...]

    def series(self) -> list[str]:
        """The series, those with the most values first."""
        names = dict.fromkeys(dot.series for dot in self.dots)
        return sorted(names, key=lambda name: (-sum(dot.series == name for dot in self.dots), name))

    def of(self, series: str) -> list[Dot]:
        """The values of one series, oldest first."""
        return [dot for dot in self.dots if dot.series == series]


def find_trend(home: Path, metric: str, filters: Mapping[str, str], limit: int) -> Trend:
    """The last `limit` values of each series of a metric, earlier sessions included.

    filters: column -> the value that rows must have.

    Raises:
        UserError: there is no such metric or column.
    """
    with open_history(home, all_sessions=True) as ask:
        columns = _columns(ask)
        view, expression, name = _find_metric(metric, columns)
        view_columns = columns[view]
        for column in filters:
            if column not in view_columns:
                raise UserError(f"trend: {view} has no column {column!r}; it has: {', '.join(view_columns)}")
        lo, hi = INTERVALS.get(name, ("NULL", "NULL"))
        lo, hi = (lo, hi) if lo in view_columns else ("NULL", "NULL")
        model, target = _model_of(view, view_columns)
        distinguishing = {*view_columns, *(["model"] if model else [])} - OUTCOMES.get(view, set())
        apart = [column for column in TELLS_APART if column in distinguishing]
        at = next(column for column in ("created_at", "started_at", "ended_at") if column in view_columns)
        key = "artifact_key" if "artifact_key" in view_columns else "draft_key" if view == "v_draft" else None
        made_by = f"LEFT JOIN artifact a ON a.artifact_key = v.{key} AND {_SAME_SESSION[at]}" if key else ""
        drafter = f"LEFT JOIN ({_DRAFTERS}) d ON d.artifact_key = v.draft_key" if "draft_key" in view_columns else ""
        newest = "d.created_at NULLS FIRST, v.draft_key," if drafter else ""
        facts = {
            column: f"a.{column}" if key else f"v.{column}" if column in view_columns else "NULL"
            for column in ("machine_id", "draftsmith_version")
        }
        run = "v.run_id" if "run_id" in view_columns else "a.run_id" if key else "NULL"
        series_facts = ", ".join(model if column == "model" else f"v.{column}" for column in apart)
        condition = " AND ".join(f"CAST(v.{column} AS VARCHAR) = ${column}" for column in filters)
        selected = ", ".join([*facts.values(), run, *([series_facts] if series_facts else [])])
        sql = f"""SELECT v.{at}, {expression}, {lo}, {hi}, {selected}
                  FROM {view} v {made_by} {drafter} {target}
                  WHERE {expression} IS NOT NULL {"AND " + condition if condition else ""}
                  ORDER BY v.{at}, {newest} 2"""
        rows = ask(sql, dict(filters))[1]
    return Trend(f"{view}.{name}", _dots(rows, apart, limit))


def _model_of(view: str, columns: Mapping[str, str]) -> tuple[str, str]:
    """(SQL of the name of a row's target, the join that finds it); ("", "") for rows of no target."""
    key = "v.target_key" if "target_key" in columns else _TARGET_KEY.get(view, "")
    join = f"LEFT JOIN v_target t ON t.target_key = {key}" if key and "model" not in columns else ""
    if view == "v_run":
        join = f"LEFT JOIN ({_TARGETS_OF_RUNS}) r USING (run_id) LEFT JOIN v_target t ON t.target_key = r.target_key"
    name = "v.model" if "model" in columns else "t.model" if join else ""
    return f"coalesce({name}, left(v.target_key, 12))" if name and "target_key" in columns else name, join


def table(trend: Trend, over: str) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows: each value with its change, or what each machine or version gave."""
    if over == "runs":
        rows: list[list[Any]] = []
        for series in trend.series():
            before: float | None = None
            for dot in trend.of(series):
                change = None if not before else dot.value / before - 1.0
                rows.append([series, dot.at, dot.value, dot.lo, dot.hi, change, dot.machine, dot.version, dot.run])
                before = dot.value
        return ["series", "at", "value", "lo", "hi", "change", "machine_id", "version", "run_id"], rows
    group_of: Callable[[Dot], str] = (lambda dot: dot.machine) if over == "machines" else (lambda dot: dot.version)
    rows = []
    for series in trend.series():
        dots = trend.of(series)
        for group in dict.fromkeys(map(group_of, dots)):
            values = [dot.value for dot in dots if group_of(dot) == group]
            rows.append([series, group, len(values), values[-1], median(values), min(values), max(values)])
    return ["series", over[:-1], "values", "newest", "median", "min", "max"], rows


def spark_lines(trend: Trend, width: int = 40) -> list[str]:
    """One line a series: its values as bars, the first and the last of them."""
    lines = []
    for series in trend.series():
        values = [dot.value for dot in trend.of(series)][-width:]
        low, span = min(values), max(values) - min(values)
        bars = "".join(_BARS[round((value - low) / span * 7) if span else 3] for value in values)
        lines.append(f"{bars}  {values[0]:.4g} -> {values[-1]:.4g}  {series}")
    return lines


def draw(trend: Trend, over: str, to: Path) -> None:
    """A self-contained page with the picture and the table.

    Raises:
        UserError: the folder is not there, or there is nothing to draw.
    """
    if not trend.dots:
        raise UserError(f"trend: no value of {trend.metric} yet, so there is nothing to draw")
    if not to.parent.is_dir():
        raise UserError(f"trend: --picture {to}: there is no folder {to.parent}")
    drawn = []
    for series in trend.series():
        dots = trend.of(series)
        labels = [
            {"machines": dot.machine[:8], "versions": dot.version}.get(over, f"{dot.at:%y-%m-%d %H:%M}") for dot in dots
        ]
        drawn.append(TrendSeries(series, labels, [(dot.value, dot.lo, dot.hi) for dot in dots]))
    columns, rows = table(trend, over)
    to.write_text(write_trend(trend.metric, over, drawn, columns, rows), encoding="utf-8")


def _columns(ask: Any) -> dict[str, dict[str, str]]:
    """View -> column -> type."""
    sql = "SELECT table_name, column_name, data_type FROM duckdb_columns() WHERE NOT internal ORDER BY column_index"
    columns: dict[str, dict[str, str]] = {}
    for view, column, kind in ask(sql, {})[1]:
        columns.setdefault(view, {})[column] = kind
    return columns


def _find_metric(metric: str, columns: Mapping[str, Mapping[str, str]]) -> tuple[str, str, str]:
    """(view, SQL expression, column) of a metric; names come from the catalogue, never from the user."""
    view, _, name = metric.rpartition(".")
    if view == "info":
        if not name.isidentifier():
            raise UserError(f"trend: {metric!r}: a fact has a name of letters, digits and underscores")
        return "v_artifact", f"TRY_CAST(v.info ->> '{name}' AS DOUBLE)", name
    numbers = {
        candidate: [column for column, kind in columns[candidate].items() if _is_number(kind)]
        for candidate in ([view] if view else VIEWS)
        if candidate in columns
    }
    for candidate, names in numbers.items():
        if name in names:
            return candidate, f"CAST(v.{name} AS DOUBLE)", name
    choices = sorted({column for names in numbers.values() for column in names})
    raise UserError(
        f"trend: no view has a number {metric!r}{did_you_mean(name, choices)}; `info.NAME` takes a fact of artifacts"
    )


def _is_number(kind: str) -> bool:
    return kind.split("(")[0] in ("DOUBLE", "FLOAT", "BIGINT", "INTEGER", "HUGEINT", "DECIMAL")


def _dots(rows: Sequence[Sequence[Any]], apart: Sequence[str], limit: int) -> tuple[Dot, ...]:
    """Values with the names of their series, which hold only the facts that differ."""
    varying = [column for i, column in enumerate(apart) if len({row[7 + i] for row in rows}) > 1]
    dots: dict[tuple[str, str | datetime], Dot] = {}  # the last of a run counts: rows come with the newest last
    for at, value, lo, hi, machine, version, run, *facts in rows:
        fact_of = dict(zip(apart, facts, strict=True))
        series = (
            ", ".join(_series_label(column, fact_of[column]) for column in varying if fact_of[column] is not None)
            or "all"
        )
        dots[series, run or at] = Dot(
            at, series, float(value), lo, hi, machine or "unknown", version or "unknown", run or ""
        )
    ordered = sorted(dots.values(), key=lambda dot: dot.at)
    newest: list[Dot] = []
    for series in dict.fromkeys(dot.series for dot in ordered):
        newest += [dot for dot in ordered if dot.series == series][-limit:]
    return tuple(sorted(newest, key=lambda dot: dot.at))


def _series_label(column: str, value: Any) -> str:
    short = {
        "depth_k": "k", "tree_budget": "tree", "batch_size": "batch", "kv_len": "context", "temperature": "T",
        "num_threads": "threads", "concurrency": "concurrency",
    }  # fmt: skip
    return f"{short[column]}={value:g}" if column in short else str(value)
