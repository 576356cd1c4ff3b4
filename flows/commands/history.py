"""Commands that ask the history as engineers do: what changed between runs, what a version was made from, all of it.

What they say is the answer of named queries (storage/history/queries.sql), which `draftsmith query` gives as rows; the
names of changed code alone are read from the records of the artifacts.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from components.contract import UserError
from components.outside_json import JsonObject
from components.tables import duration, format_estimate
from components.text import shorten
from flows.commands.terminal import echo, out, print_answer, print_json_object
from flows.planning.step_signature import resolve
from flows.spec.references import NAMED_VERSION
from storage.artifacts.store import DamagedRecord, Store, default_home
from storage.history.export import export_history
from storage.history.query import RunQuery, as_records, ask_named_query, open_history

Row = dict[str, Any]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]
WIDEST = 60  # letters of a value


def diff(
    a: Annotated[
        str, typer.Argument(help="A run's id or pipeline (its newest run), a key or NAME@ALIAS; else the newest run.")
    ] = "",
    b: Annotated[
        str, typer.Argument(help="Likewise, the later one; left out: A is the later one, beside the run before it.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """What changed from run A to run B: settings, code, data, machine, libraries; then numbers and seconds by step."""
    store = Store()
    with open_history(store.home) as run:
        before, after = find_runs(run, a, b)
        parameters = {"run": after["run_id"], "before": before["run_id"]}
        changes = with_code(store, run, parameters, ask(run, "changes", parameters))
        outcomes, times = ask(run, "outcomes", parameters), ask(run, "times", parameters)
    if as_json:
        print_json_object({"before": before, "after": after, "changes": changes, "outcomes": outcomes, "times": times})
        return
    for side, one in (("before", before), ("after", after)):
        started = f"{one['started_at']:%Y-%m-%d %H:%M:%S} UTC"
        echo(f"{side:<7} {one['run_id']}  {one['pipeline']}  {one['status']}  {started}")
    echo("")
    if changes:
        names = ("what", "name", "before", "after", "steps")
        print_answer(out, names, [[shorten(str(row[name] or ""), WIDEST) for name in names] for row in changes])
    else:
        echo("nothing changed: the same parameters, steps, settings, code, data, machine and libraries")
    if outcomes:
        echo("\nwhat was chosen and measured, 95 % intervals over prompts")
        numbers = ("drafter", "batch", "run", "depth", "verdict", "AL", "predicted", "measured", "machine")
        print_answer(out, numbers, outcome_table(outcomes))
    if times:
        echo("\nseconds and peak memory by step")
        head = ("step", "before", "after", "MiB before", "MiB after")
        print_answer(out, head, [list(time_cells(row)) for row in times])
    if outcomes:
        echo(f"\nwhich is faster on the same prompts: draftsmith compare {before['run_id']} {after['run_id']}")


def ask(run: RunQuery, name: str, values: Mapping[str, str]) -> list[Row]:
    """The answer of a named query, a dictionary for each row."""
    return as_records(ask_named_query(run, name, values))


def find_runs(run: RunQuery, a: str, b: str) -> tuple[Row, Row]:
    """The earlier and the later run that two names mean.

    Raises:
        UserError: a name means no run or several, both mean the same, or there is none before it.
    """
    if a and b:
        before, after = find_run(run, a), find_run(run, b)
        if before["run_id"] == after["run_id"]:
            raise UserError(f"diff: {a} and {b} are the same run, {after['run_id']}; name two")
        return before, after
    newest = run("SELECT newest_run()", {})[1][0][0]
    if not a and newest is None:
        raise UserError("diff: no run has ended yet; `draftsmith run NAME` makes one")
    after = find_run(run, a or newest)
    earlier = run("SELECT run_before($run)", {"run": after["run_id"]})[1][0][0]
    if earlier is None:
        raise UserError(f"diff: {after['run_id']} is the first run of {after['pipeline']}; name two runs")
    return find_run(run, earlier), after


def find_run(run: RunQuery, name: str) -> Row:
    """The run that a name means, with its pipeline, status and start. Raises UserError where that is not one run."""
    matches = ask(run, "find-run", {"name": name.removeprefix("registry:")})
    if len({row["run_id"] for row in matches}) != 1:
        several = ", ".join(row["run_id"] for row in matches[:4])
        what = f"means several runs ({several}, ...): say more of it" if matches else "means no run that has ended"
        raise UserError(f"diff: {name} {what}; `draftsmith query runs` lists them")
    if matches[0]["pipeline"] is None:
        raise UserError(f"diff: the history does not have run {matches[0]['run_id']}, which made {name}")
    return matches[0]


def with_code(store: Store, run: RunQuery, parameters: Mapping[str, str], changes: Sequence[Row]) -> list[Row]:
    """The changes, with each changed piece of code by name where both records of the step are still there."""
    steps = {step for row in changes if row["what"] == "code" for step in row["steps"].split(", ")}
    sql = "SELECT run_id, step, artifact_key FROM step WHERE artifact_key IS NOT NULL AND run_id IN ($run, $before)"
    keys = {(run_id, step): key for run_id, step, key in run(sql, parameters)[1] if step in steps}
    symbols: dict[tuple[str, str, str], list[str]] = {}
    named = set[str]()
    for step in sorted(steps):
        old, new = (_code_of(store, keys[parameters[side], step]) for side in ("before", "run"))
        for symbol in sorted(old.keys() | new.keys()) if old and new else []:
            if old.get(symbol) != new.get(symbol):
                pair = (symbol, old.get(symbol, "")[:12], new.get(symbol, "")[:12])
                symbols.setdefault(pair, []).append(step)
                named.add(step)
    rows = []
    for row in changes:
        if row["what"] != "code" or not set(row["steps"].split(", ")) <= named:
            rows.append(row)
        elif symbols:
            rows += [
                {"what": "code", "name": symbol, "before": old, "after": new, "steps": ", ".join(steps)}
                for (symbol, old, new), steps in symbols.items()
            ]
            symbols = {}
    return rows


def _code_of(store: Store, key: str) -> Mapping[str, str]:
    """Symbol -> digest of the code behind an artifact; {} where its record is gone."""
    try:
        return (store.record_of(key)["record"].get("parts") or {}).get("code") or {}
    except (FileNotFoundError, DamagedRecord):
        return {}


def outcome_table(outcomes: Sequence[Row]) -> list[list[str]]:
    """The rows of `outcomes` as people read them; what both runs have measured alike, or shared, is one row."""
    table: list[list[str]] = []
    for cells in map(list, map(_outcome_cells, outcomes)):
        if table and [*table[-1][:2], *table[-1][3:]] == [*cells[:2], *cells[3:]]:
            table[-1][2] = "both"
        else:
            table.append(cells)
    return table


def _outcome_cells(row: Row) -> Iterator[str]:
    yield from (row["drafter"], str(row["batch_size"]), row["side"], str(row["depth_k"]), row["verdict"])
    length = "-" if row["al"] is None else f"{row['al']:.2f} [{row['al_lo']:.2f}, {row['al_hi']:.2f}]"
    yield from (length, format_estimate(row["speedup_pred"], row["pred_lo"], row["pred_hi"]))
    yield from (format_estimate(row["speedup_meas"], row["meas_lo"], row["meas_hi"]), row["machine_name"] or "")


def time_cells(row: Row) -> Iterator[str]:
    """A row of `times` as people read it; a reused step says what making it took."""
    yield row["step"]
    for side in ("before", "after"):
        status, seconds, making = (row[f"{name}_{side}"] for name in ("status", "seconds", "making_seconds"))
        took = duration(seconds) if seconds is not None else f"({duration(making)})" if making is not None else ""
        yield f"{took} {status}" if status and status != "completed" else took
    for side in ("before", "after"):
        peak = row[f"peak_rss_mib_{side}"]
        yield "" if peak is None else f"{peak:,.0f}"


def lineage(
    name: Annotated[str, typer.Argument(help="NAME@ALIAS or NAME@VERSION of the registry, or a key.")],
    as_json: AsJson = False,
) -> None:
    """What a registered version or an artifact was made from: sources, steps, data and settings, as a tree."""
    named = NAMED_VERSION.fullmatch(name)
    if named is not None:
        which = "version" if named["which"].isdecimal() else "alias"
        parameters = {"model": named["name"], which: named["which"]}
    else:
        parameters = {"artifact": name}
    with open_history(default_home()) as run:
        rows = ask(run, "lineage", parameters)
        sources = ask(run, "sources-of", {"keys": " ".join(row["artifact_key"] for row in rows)})
    roots = [row for row in rows if row["distance"] == 0]
    if len(roots) != 1 or roots[0]["kind"] is None:
        known = "`draftsmith query champions` lists the versions, `draftsmith query artifacts` keys"
        many = f"{len(roots)} artifacts begin with it: say more of it" if len(roots) > 1 else "the history has none"
        raise UserError(f"lineage: {name}: {many}; {known}")
    for row in rows:
        row |= {column: json.loads(row[column] or "{}") for column in ("settings", "inputs", "info")}
        row["sources"] = [source for source in sources if source["artifact_key"] == row["artifact_key"]]
    if as_json:
        print_json_object({"name": name, "artifacts": rows})
        return
    root = roots[0]
    echo(name if named is None else f"{root['model']} version {root['version']}: {_what_it_serves(root['info'])}")
    for line in tree({row["artifact_key"]: row for row in rows}, root["artifact_key"], str(root["draft_key"] or "")):
        echo(line)


def _what_it_serves(info: JsonObject) -> str:
    """The numbers of a release in a line."""
    speed = format_estimate(info.get("speedup_meas"), info.get("meas_lo"), info.get("meas_hi"))
    return f"{info.get('method')} at depth {info.get('depth_k')}, measured {speed}, verdict {info.get('verdict')}"


def tree(rows: Mapping[str, Row], root: str, draft_key: str) -> Iterator[str]:
    """The lines of the tree. draft_key: the drafter that is served; others of its run were only measured beside it."""
    shown = set[str]()

    def branch(label: str, key: str, indent: str, is_last: bool) -> Iterator[str]:
        row = rows.get(key) or {"kind": None}
        first, rest = ("└─ ", "   ") if is_last else ("├─ ", "│  ")
        lead, below = (indent + first, indent + rest) if label else (indent, indent)
        if row["kind"] is None:
            yield f"{lead}{label}{key[:12]}  not in the history"
            return
        head = f"{lead}{label}{row['uses']}  {row['kind']} {key[:12]}"
        if key in shown:
            yield f"{head}  (above)"
            return
        shown.add(key)
        took = "" if row["seconds"] is None else f", {duration(row['seconds'])}"
        yield f"{head}  {row['created_at']:%Y-%m-%d %H:%M}{took}, {row['machine_name'] or 'machine unknown'}"
        inputs = [
            (parameter, one.partition(".")[0]) for parameter, keys in row["inputs"].items() for one in _list(keys)
        ]
        beside = {
            one for _, one in inputs if draft_key and one != draft_key and rows.get(one, {}).get("kind") == "Draft"
        }
        beside = beside if row["kind"] != "Draft" else set()
        children = [(parameter, one) for parameter, one in inputs if one not in beside]
        line = "│  " if children else "   "
        for text in _details(row, len(beside)):
            yield f"{below}{line}{text}"
        groups = _groups(children, shown)
        for number, (parameter, keys) in enumerate(groups, start=1):
            if len(keys) > 1:
                listed = ", ".join(key[:12] for key in keys)
                yield f"{below}{'└─ ' if number == len(groups) else '├─ '}{parameter}: {listed}  (above)"
            else:
                yield from branch(f"{parameter}: ", keys[0], below, number == len(groups))

    yield from branch("", root, "", True)


def _groups(children: Sequence[tuple[str, str]], shown: Container[str]) -> list[tuple[str, list[str]]]:
    """(parameter, keys): artifacts of one parameter that stand above already are one line, every other has its own."""
    groups: list[tuple[str, list[str]]] = []
    for parameter, key in children:
        if groups and key in shown and groups[-1][0] == parameter and groups[-1][1][0] in shown:
            groups[-1][1].append(key)
        else:
            groups.append((parameter, [key]))
    return groups


def _list(value: Any) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else [str(value)]


def _details(row: Row, num_beside: int) -> Iterator[str]:
    """What an artifact was told and what it read, beyond the defaults of its step."""
    settings = {name: value for name, value in row["settings"].items() if value != _defaults(row["uses"]).get(name)}
    if settings:
        yield "with " + ", ".join(f"{name}={shorten(str(value), WIDEST)}" for name, value in settings.items())
    for source in row["sources"]:
        read = "" if source["rows_read"] is None else f"{source['rows_read']:,} rows read, "
        licence = source["licence"] or "licence not stated"
        yield f"source {source['source']}: {read}{source['rows_kept']:,} kept, {licence}"
    if num_beside:
        yield f"{num_beside} other {'drafter was' if num_beside == 1 else 'drafters were'} measured beside it"


def _defaults(uses: str) -> JsonObject:
    """The defaults of a step's settings; {} for a step that is not there any more."""
    try:
        return dict(resolve(uses).defaults)
    except UserError:
        return {}


class Action(StrEnum):
    """What can be done with the history as a whole."""

    export = "export"


def history(
    action: Annotated[Action, typer.Argument(help="export: write a copy that any DuckDB opens.")],
    file: Annotated[Path, typer.Argument(help="The file to write, such as history.duckdb; one of before is replaced.")],
) -> None:
    """The whole history in one DuckDB file: tables, views and what each column means."""
    assert action is Action.export
    rows = export_history(default_home(), file)
    echo(f"{sum(rows.values()):,} rows of {sum(map(bool, rows.values()))} tables, and the views over them: {file}")
