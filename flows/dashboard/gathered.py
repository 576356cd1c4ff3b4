"""Gathers what the dashboard of a home shows: from the history, the journals and the disk.

Each part says which question gave it, so that whoever doubts a point can ask again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from components.report.board import (
    Ancestor,
    AtDepth,
    Board,
    Champion,
    Chosen,
    DriftSeen,
    Failure,
    Interval,
    MachineUse,
    Move,
    Origin,
    Question,
    Room,
    RunSeen,
)
from components.report.charts.vega import javascript
from components.report.pages.dashboard import write_dashboard
from flows.services.client import NEWER_PAGES, mlflow_address, running
from storage import collect, journal
from storage.artifacts.remote import shared_store
from storage.history.query import Parameters, RunQuery, as_records, ask_named_query, open_history
from storage.history.records import now
from storage.redaction import without_secrets

CHOICES = """
SELECT c.created_at, c.model, c.method, c.pipeline, c.depth_k, c.verdict, c.reasons,
       c.batch_size, c.speedup_meas, c.meas_lo, c.meas_hi, c.speedup_pred, c.pred_lo,
       c.pred_hi, d.al, d.al_lo, d.al_hi, c.machine_id, c.run_id, c.draft_key, c.artifact_key
FROM v_choice c LEFT JOIN v_depth d
  ON (d.created_at, d.artifact_key, d.selection_id, d.draft_key, d.method, d.workload, d.batch_size, d.depth_k)
   = (c.created_at, c.artifact_key, c.selection_id, c.draft_key, c.method, c.workload, c.batch_size, c.depth_k)
  AND d.tree_budget IS NULL
WHERE c.created_at >= $since AND c.workload = 'all' AND c.kv_len IS NULL
ORDER BY c.created_at, c.method"""
DEPTHS = """
SELECT created_at, model, method, depth_k, batch_size, cost_ratio, t_verify_ms, t_draft_ms, al, al_lo, al_hi,
       speedup_pred, pred_lo, pred_hi, speedup_meas, meas_lo, meas_hi, run_id, draft_key, artifact_key
FROM v_depth WHERE workload = 'all' AND tree_budget IS NULL
QUALIFY created_at = max(created_at) OVER (PARTITION BY model)
    AND batch_size = min(batch_size) OVER (PARTITION BY model)
ORDER BY model, method, draft_key, depth_k"""
DRIFT = """
SELECT created_at, model, method, al_then, al_now, change, lo, hi, drifted, num_prompts_now, run_id, draft_key,
       artifact_key
FROM named('drift') WHERE created_at >= $since AND workload = 'all' ORDER BY created_at"""
MOVES = """
SELECT promoted_at, name, alias, action, from_version, to_version, who, why, numbers
FROM promotion ORDER BY promoted_at, promotion_id"""
_MACHINES = "SELECT machine_id, machine_name FROM v_machine"
_TARGETS = "SELECT target_key, model FROM v_target"
_PAGES = """
SELECT run_id, arg_max(artifact_key, ended_at)
FROM step WHERE kind = 'Page' AND artifact_key IS NOT NULL GROUP BY run_id"""
_LINEAGE = """
WITH near AS MATERIALIZED (FROM lineage_of([$key], ['start_from', 'champion', 'seen'])),
shown AS (
  SELECT artifact_key, distance FROM near
  UNION ALL SELECT input_key, distance + 1 FROM near JOIN v_input USING (artifact_key) WHERE parameter = 'start_from')
SELECT artifact_key, kind, step, pipeline, created_at, seconds, machine_id, inputs, settings, info
FROM (SELECT artifact_key, min(distance) AS distance FROM shown GROUP BY ALL)
JOIN newest('artifact') USING (artifact_key)
ORDER BY distance, created_at DESC, step, artifact_key LIMIT $most"""
_POINT = """
SELECT * FROM {view} WHERE created_at = TIMESTAMP '{at}' AND artifact_key = '{key}' AND draft_key = '{draft}'
  AND workload = 'all'{more}"""
NUM_RUNS, NUM_FAILURES, MOST_ANCESTORS = 200, 40, 40
_DEPTH = " AND tree_budget IS NULL AND depth_k = {depth_k} AND batch_size = {batch_size}"
Rows = list[dict[str, Any]]


def gather(home: Path, *, days: int, reports: str) -> Board:
    """Everything on the dashboard of a home.

    days: how far back charts over time and lists of runs look. reports: the address under which the folders of report
    pages are found, "{key}/index.html" below it; on Prefect's own server, links to its runs bear no address either.
    """
    at = now()
    since: Parameters = {"since": at - timedelta(days=days)}
    with open_history(home) as run:
        names = dict(run(_MACHINES, {})[1])
        models = dict(run(_TARGETS, {})[1])
        moves = tuple(_move(row, models) for row in _rows(run, MOVES))
        depths = _depths(_rows(run, DEPTHS), moves)
        drift = tuple(_drift(i, row) for i, row in enumerate(_rows(run, DRIFT, since)))
        pages = dict(run(_PAGES, {})[1])
        champions = _champions(_named(run, "champions"), moves, lambda key: _lineage(run, key, names))
        runs, failures = _named(run, "runs", limit=str(NUM_RUNS)), _named(run, "failures", limit=str(NUM_FAILURES))
    with open_history(home, all_sessions=True) as run:
        choices = _choices(_rows(run, CHOICES, since), names, moves)
    services = running(home)
    is_served = reports.startswith("/")
    prefect = NEWER_PAGES if is_served else services.prefect_pages if services is not None else None
    remote = shared_store() if is_served else None
    shared = (remote.keys() or {}) if remote is not None else {}
    pages = {run: key for run, key in pages.items() if key in shared or (home / "store" / key / "index.html").exists()}
    return Board(
        home=str(home),
        made_at=at,
        days=days,
        champions=champions,
        moves=moves,
        choices=choices,
        depths=depths,
        drift=drift,
        runs=_runs(home, runs, pages, reports, prefect, at - timedelta(days=days), _promoted(moves)),
        failures=_failures(failures, at - timedelta(days=days)),
        machines=_machines(choices),
        room=_room(home),
        questions=_questions(since),
        mlflow=mlflow_address(home),
    )


def _rows(run: RunQuery, sql: str, parameters: Mapping[str, Any] | None = None) -> Rows:
    return as_records(run(sql, parameters or {}))


def _named(run: RunQuery, name: str, **parameters: str) -> Rows:
    return as_records(ask_named_query(run, name, parameters))


def _questions(since: Mapping[str, Any]) -> dict[str, Question]:
    """Part of the page -> how it was asked for."""

    def sql(text: str, flag: str = "") -> str:
        one_line = " ".join(text.split()).replace("$since", f"TIMESTAMP '{since['since']:%Y-%m-%d %H:%M:%S}'")
        return f'draftsmith query {flag}"{one_line}"'

    return {
        "champions": Question("the champions", "draftsmith query champions"),
        "moves": Question("every move of an alias", sql(MOVES)),
        "choices": Question("speed and acceptance over time", sql(CHOICES, "--all-sessions ")),
        "depths": Question("cost, acceptance and speed by depth", sql(DEPTHS)),
        "drift": Question("drift", sql(DRIFT)),
        "runs": Question("runs", f"draftsmith query runs -p limit={NUM_RUNS}"),
        "failures": Question("failures", f"draftsmith query failures -p limit={NUM_FAILURES}"),
        "machines": Question("machines", "draftsmith query machines"),
        "room": Question("disk", "draftsmith du"),
    }


def _interval(row: Mapping[str, Any], value: str, lo: str, hi: str) -> Interval | None:
    return None if row[value] is None else Interval(row[value], row[lo], row[hi])


def _certain(row: Mapping[str, Any], value: str, lo: str, hi: str) -> Interval:
    return Interval(row[value], row[lo], row[hi])


def _origin(anchor: str, row: Mapping[str, Any], view: str, more: str = "") -> Origin:
    keys = {"key": row["artifact_key"], "draft": row["draft_key"]}
    sql = " ".join(_POINT.format(view=view, at=row["created_at"], more=more, **keys).split())
    return Origin(anchor, row["run_id"] or "", row["artifact_key"], sql)


def _ever_champion(moves: Sequence[Move]) -> dict[str, str]:
    """Drafter -> the version as which it was champion."""
    return {m.facts.get("draft_key", ""): str(m.version) for m in moves if m.alias == "champion" and m.version}


def _choices(rows: Rows, names: Mapping[str, str], moves: Sequence[Move]) -> tuple[Chosen, ...]:
    champions = _ever_champion(moves)
    return tuple(
        Chosen(
            origin=_origin(f"p{i}", row, "v_choice", f" AND kv_len IS NULL AND batch_size = {row['batch_size']}"),
            at=row["created_at"],
            model=row["model"] or "unknown",
            method=row["method"],
            pipeline=row["pipeline"],
            depth=row["depth_k"],
            verdict=row["verdict"],
            reasons=tuple(row["reasons"]),
            speed=_interval(row, "speedup_meas", "meas_lo", "meas_hi"),
            predicted=_certain(row, "speedup_pred", "pred_lo", "pred_hi"),
            acceptance=_interval(row, "al", "al_lo", "al_hi"),
            machine=names.get(row["machine_id"], row["machine_id"] or "unknown"),
            draft_key=row["draft_key"],
            champion=champions.get(row["draft_key"], ""),
        )
        for i, row in enumerate(rows)
    )


def _depths(rows: Rows, moves: Sequence[Move]) -> tuple[AtDepth, ...]:
    """Drafters of one method are told apart by their version, or by their keys."""
    champions = _ever_champion(moves)
    drafters = {(row["model"], row["method"], row["draft_key"]) for row in rows}
    several = {(m, method) for m, method, _ in drafters if sum(one[:2] == (m, method) for one in drafters) > 1}
    collected = []
    for i, row in enumerate(rows):
        version = champions.get(row["draft_key"])
        name = f"version {version}" if version else row["draft_key"][:6]
        apart = f" {name}" if version or (row["model"], row["method"]) in several else ""
        collected.append(
            AtDepth(
                origin=_origin(f"d{i}", row, "v_depth", _DEPTH.format(**row)),
                model=row["model"] or "unknown",
                series=row["method"] + apart,
                depth=row["depth_k"],
                cost=row["cost_ratio"],
                verify_ms=row["t_verify_ms"],
                draft_ms=row["t_draft_ms"],
                acceptance=_certain(row, "al", "al_lo", "al_hi"),
                predicted=_certain(row, "speedup_pred", "pred_lo", "pred_hi"),
                speed=_interval(row, "speedup_meas", "meas_lo", "meas_hi"),
            )
        )
    return tuple(collected)


def _drift(number: int, row: Mapping[str, Any]) -> DriftSeen:
    return DriftSeen(
        origin=_origin(f"t{number}", row, "drift"),
        at=row["created_at"],
        model=row["model"] or "unknown",
        method=row["method"],
        then=row["al_then"],
        now=row["al_now"],
        change=_certain(row, "change", "lo", "hi"),
        drifted=row["drifted"],
        prompts=row["num_prompts_now"],
    )


def _move(row: Mapping[str, Any], models: Mapping[str, str]) -> Move:
    numbers = json.loads(row["numbers"] or "{}")
    facts = {name.removeprefix("draftsmith."): str(value) for name, value in numbers.items()}
    return Move(
        at=row["promoted_at"],
        name=row["name"],
        model=models.get(facts.get("target_key", ""), facts.get("target", row["name"])),
        alias=row["alias"],
        action=row["action"],
        before=row["from_version"],
        version=row["to_version"],
        who=row["who"],
        why=without_secrets(row["why"]),
        facts=facts,
    )


def _champions(
    rows: Rows, moves: Sequence[Move], lineage: Callable[[str], tuple[tuple[Ancestor, ...], bool]]
) -> tuple[Champion, ...]:
    """The champions of now, each with the newest evidence about its version. rows: of the query `champions`."""
    collected = []
    for row in rows:
        if row["alias"] == "champion":
            of_version = [m for m in moves if (m.name, m.version) == (row["name"], row["version"])]
            move = next(m for m in reversed(of_version) if m.alias == "champion")
            facts = of_version[-1].facts
            collected.append(Champion(move, facts, *lineage(facts.get("key", ""))))
    return tuple(collected)


def _lineage(run: RunQuery, key: str, names: Mapping[str, str]) -> tuple[tuple[Ancestor, ...], bool]:
    """What went into a release, the nearest first, and whether its drafter goes on from another, where this ends."""
    rows = _rows(run, _LINEAGE, {"key": key, "most": MOST_ANCESTORS})
    return tuple(_ancestor(row, names) for row in rows), any('"start_from"' in row["inputs"] for row in rows)


def _ancestor(row: Mapping[str, Any], names: Mapping[str, str]) -> Ancestor:
    settings, info = json.loads(row["settings"] or "{}"), json.loads(row["info"] or "{}")
    inputs = json.loads(row["inputs"] or "{}").values()
    note = next((str(facts[name]) for facts in (settings, info) for name in _TELLING if facts.get(name)), "")
    return Ancestor(
        key=row["artifact_key"],
        kind=row["kind"],
        step=row["step"],
        pipeline=row["pipeline"],
        note=without_secrets(note),
        at=row["created_at"],
        seconds=row["seconds"],
        machine=names.get(row["machine_id"], row["machine_id"] or ""),
        inputs=tuple(dict.fromkeys(one for value in inputs for one in (value if isinstance(value, list) else [value]))),
    )


_TELLING = ("source", "model", "method", "formats")  # settings and facts that tell one artifact from its like


def _machines(choices: Sequence[Chosen]) -> tuple[MachineUse, ...]:
    """What was measured where, the machine that measured last first. choices: oldest first."""
    uses = []
    for name in dict.fromkeys(choice.machine for choice in reversed(choices)):
        here = [choice for choice in choices if choice.machine == name]
        newest = {choice.method: choice.speed.value for choice in here if choice.speed is not None}
        runs = {choice.origin.run_id for choice in here}
        uses.append(MachineUse(name, len(runs), newest, here[-1].at))
    return tuple(uses)


def _promoted(moves: Sequence[Move]) -> set[str]:
    """The runs whose release became champion, then or later."""
    return {move.facts.get("run_id", "") for move in moves if move.alias == "champion" and move.version is not None}


def _runs(
    home: Path,
    rows: Rows,
    pages: Mapping[str, str],
    reports: str,
    prefect: str | None,
    since: datetime,
    promoted: set[str],
) -> tuple[RunSeen, ...]:
    collected = []
    for row in rows:
        if row["started_at"] < since:
            continue
        page = pages.get(row["run_id"], "")
        flow_run = _flow_run(home, row["run_id"]) if prefect is not None else ""
        sentence = without_secrets(row["reason"] or "")
        collected.append(
            RunSeen(
                run_id=row["run_id"],
                started_at=row["started_at"],
                pipeline=row["pipeline"],
                status=row["status"],
                outcome=_outcome(row["status"], sentence, row["run_id"] in promoted),
                sentence=sentence or f"{row['num_executed']} steps made, {row['num_reused']} reused",
                seconds=row["seconds"],
                executed=row["num_executed"],
                reused=row["num_reused"],
                report=f"{reports}/{page}/index.html" if page else "",
                prefect=f"{prefect}/runs/flow-run/{flow_run}" if flow_run else "",
            )
        )
    return tuple(collected)


def _outcome(status: str, sentence: str, promoted: bool) -> str:
    """How a run ended, in a word: a promotion, new things, nothing new, a failure, a kill."""
    if status != "completed":
        return status
    return "nothing new" if sentence.startswith("nothing new") else "promoted" if promoted else "made"


def _flow_run(home: Path, run_id: str) -> str:
    """Prefect's id of a run, from its journal; "" for a run without Prefect."""
    file = home / "runs" / f"{run_id}.jsonl"
    start = journal.first(journal.read(file), "run") if file.is_file() else None
    return str((start or {}).get("flow_run_id", ""))


def _failures(rows: Rows, since: datetime) -> tuple[Failure, ...]:
    return tuple(
        Failure(row["ended_at"], row["pipeline"], row["step"] or "", without_secrets(row["why"] or ""), row["run_id"])
        for row in rows
        if row["ended_at"] >= since
    )


def _room(home: Path) -> tuple[Room, ...]:
    uses = collect.usage(home) if home.is_dir() else []

    def totals(by: str, sizes: Iterable[tuple[str, str, int]]) -> list[Room]:
        return [Room(by, name, keys, size) for name, keys, size in collect.totals(sizes)]

    kinds = totals("kind", ((use.what, use.key, use.num_bytes) for use in uses))
    pipelines = totals("pipeline", ((use.pipeline, use.key, use.num_bytes) for use in uses if use.pipeline))
    return (*kinds, *pipelines)


def make_dashboard(home: Path, to: Path, *, days: int, reports: str) -> Board:
    """Write the dashboard of a home into one file, and return what is on it. days, reports: as for `gather`."""
    board = gather(home, days=days, reports=reports)
    folder = home / "dashboard"
    folder.mkdir(parents=True, exist_ok=True)
    to.write_text(write_dashboard(board, javascript(folder)), encoding="utf-8")
    return board
