"""Questions about every benchmark ever run, in SQL: DuckDB over the Parquet files of the history.

Each question opens an in-memory database, makes the views of views.sql over the files that are there now, and is then
locked: one SELECT or EXPLAIN, no extensions, no settings, and no files at all, since Arrow reads the history for it (a
COPY inside a WITH or an EXPLAIN ANALYZE parses as a SELECT, and would write wherever DuckDB may read). Any number of
processes may ask while others write: the one lock held only puts off the deletion of merged files. What goes into the
history is read from artifact.json, the journals and the promotion log alone, so `rebuild` makes again exactly what the
runs made.

What was measured again is another session of the same key (storage/sessions.py), and its rows stand beside the earlier
ones. The tables hold every session; the views take of each key the newest that is valid, or every one on request.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
from pyarrow.dataset import Dataset, dataset, field

from components.contract import UserError
from storage import journal
from storage.artifacts import RECORD_FILE, Store
from storage.history import (
    compact,
    files_of,
    history_dir,
    sessions_known,
    write_measured,
    write_record,
)
from storage.records import (
    ArtifactRow,
    PromotionRow,
    Provenance,
    RunRow,
    StepRow,
    SupersededRow,
    as_time,
    draftsmith_version,
)
from storage.schema import all_tables, reading_schema
from storage.segments import CHECKED_PARQUET, HOW_TO_MEND, DamagedHistory, empty, faulty_files, reading
from storage.sessions import file_key, session_of
from storage.sharing import catch_up

__all__ = [
    "compact",
    "open_history",
    "query",
    "rebuild",
    "remember_all",
    "remember_artifact",
    "remember_promotion",
    "remember_run",
    "view_names",
]

UNREADABLE = (UserError, OSError, ValueError, KeyError, TypeError)
"""What reading an artifact raises whose artifact.json was cut short, or whose rows another version has written."""

_VIEWS = Path(__file__).with_name("views.sql")
# What views.sql builds on: the rows that `newest` leaves out, and what tells the earlier sessions of a selection apart.
_NEWEST = """CREATE VIEW left_out AS SELECT created_at, artifact_key FROM superseded;
             CREATE MACRO earlier_run(made_at, made, run_id) AS NULL;"""
_EVERY = """CREATE VIEW left_out AS SELECT created_at, artifact_key FROM superseded WHERE false;
            CREATE MACRO earlier_run(made_at, made, run_id) AS
              CASE WHEN (made_at, made) IN (SELECT (created_at, artifact_key) FROM superseded) THEN run_id END;"""


_WORD = re.compile(r"\w+")
Answer = tuple[list[str], list[tuple[Any, ...]]]
Ask = Callable[[str, Mapping[str, Any]], Answer]


@dataclass(frozen=True)
class Limits:
    """What one question may take: seconds, rows of its answer, and GiB of memory while DuckDB works on it."""

    seconds: float = 120.0
    rows: int = 500_000
    memory_gib: int = 4


def query(
    sql: str,
    home: Path,
    parameters: Mapping[str, Any] | None = None,
    *,
    all_sessions: bool = False,
    limits: Limits = Limits(),
) -> Answer:
    """The column names and rows that one SELECT gives over the history of `home`. Times are UTC.

    parameters: values of the $names in it; nothing is ever pasted into SQL. all_sessions: views show every session of
    what was measured again, not the newest valid one alone.

    Raises:
        UserError: the SQL is wrong, is not one SELECT, reaches outside the history, or takes more than its limits.
    """
    with open_history(home, all_sessions=all_sessions, limits=limits) as ask:
        return ask(sql, parameters or {})


@contextmanager
def open_history(home: Path, *, all_sessions: bool = False, limits: Limits = Limits()) -> Iterator[Ask]:
    """Several questions over one state of the history: ask(sql, parameters) answers as `query` does."""
    catch_up(home)
    with (
        reading(history_dir(home)),
        _connect(home, _EVERY if all_sessions else _NEWEST, limits.memory_gib) as connection,
    ):
        checked = set[str]()

        def ask(sql: str, parameters: Mapping[str, Any]) -> Answer:
            for table in sorted(_tables_of(sql) - checked):
                for name, why in faulty_files(history_dir(home) / table):
                    raise DamagedHistory(f"{history_dir(home) / table / name}: {why}; {HOW_TO_MEND}")
                checked.add(table)
            try:
                statements = connection.extract_statements(sql)
                allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
                if len(statements) != 1 or statements[0].type not in allowed:
                    raise UserError(
                        f"query: one SELECT, please: it reads and never writes. Views: {_names(connection)}"
                    )
                columns, rows = _in_time(connection, statements[0], parameters, limits)
            except duckdb.OutOfMemoryException as error:
                raise UserError(f"query: it takes more than {limits.memory_gib} GiB of memory: ask for less") from error
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                damaged = next(damaged_files(home), None)
                if damaged is not None:
                    raise UserError(f"{damaged}: is damaged; {HOW_TO_MEND}") from error
                raise UserError(f"query: {_one_line(error)}. Views: {_names(connection)}") from error
            if len(rows) > limits.rows:
                most = f"{limits.rows:,} rows"
                raise UserError(f"query: it has more than {most}: add a LIMIT, or allow more (--max-rows)")
            return columns, rows

        yield ask


def _tables_of(sql: str) -> set[str]:
    """The tables that a statement may read, by the words in it and in the views that they name."""
    named, waiting = set[str](), set(_WORD.findall(sql.lower()))
    while waiting:
        word = waiting.pop()
        named.add(word)
        waiting |= _words_of_views().get(word, set()) - named
    return named & set(all_tables())


@cache
def _words_of_views() -> dict[str, set[str]]:
    """Each view and macro, and the words that stand in what it is made of."""
    parts = re.split(r"\bCREATE (?:VIEW|MACRO) (\w+)", _NEWEST + _VIEWS.read_text(encoding="utf-8"))
    return {name: set(_WORD.findall(body.lower())) for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def _in_time(
    connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement, parameters: Mapping[str, Any], limits: Limits
) -> Answer:
    """The columns and rows of one statement; one row more than allowed tells that there are more.

    DuckDB works in a thread of its own: while it works in this one, Python hears neither a clock nor Ctrl-C.

    Raises:
        UserError: it takes longer than allowed.
    """
    answer: Future[Answer] = Future()

    def work() -> None:
        try:
            cursor = connection.execute(statement, dict(parameters) or None)
            columns = [str(column[0]) for column in cursor.description or []]
            answer.set_result((columns, cursor.fetchmany(limits.rows + 1)))
        except BaseException as error:  # handed to whoever asks
            answer.set_exception(error)

    worker = threading.Thread(target=work, name="query", daemon=True)
    worker.start()
    try:
        return answer.result(limits.seconds)
    except (TimeoutError, KeyboardInterrupt) as error:
        while worker.is_alive():
            connection.interrupt()  # a statement that has not begun yet does not hear it
            worker.join(0.1)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            f"query: no answer within {limits.seconds:g} s: ask for less, or allow more (--timeout)"
        ) from error
    finally:
        worker.join()


def view_names(home: Path) -> list[str]:
    """The views and tables that a question may name."""
    with reading(history_dir(home)), _connect(home, _NEWEST) as connection:
        return _names(connection).split(", ")


def remember_artifact(home: Path, path: Path) -> None:
    """Put a finished artifact into the history: what it is, and its measured rows if it has any. Idempotent.

    path: its directory, in the store or among its earlier sessions. Other sessions of its key stay as they are.

    Raises:
        UserError: a row does not have the columns and types of components/rows.py.
    """
    content = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    key, session = str(content["key"]), session_of(content)
    if session not in sessions_known(home, key):
        _remember_session(home, path, content)
    if len(sessions_known(home, key)) > 1:
        _mark_superseded(home, key)


def _remember_session(home: Path, path: Path, content: Mapping[str, Any]) -> None:
    """The rows of one session; that of the artifact itself comes last, since by it the session is known."""
    record: Mapping[str, Any] = content["record"]
    machine = record.get("machine") or {}
    provenance = Provenance(
        artifact_key=content["key"],
        pipeline=str(record.get("pipeline", "")),
        step=str(record.get("step", "")),
        run_id=str(record.get("run_id", "")),
        machine_id=machine.get("machine_id"),
        created_at=as_time(content["finished_at"]),
        draftsmith_version=str(record.get("draftsmith_version") or draftsmith_version()),
        session=session_of(content),
    )
    seconds = record.get("seconds")
    row = ArtifactRow(
        artifact_key=provenance.artifact_key,
        kind=content["kind"],
        pipeline=provenance.pipeline,
        step=provenance.step,
        run_id=provenance.run_id,
        uses=str(record.get("uses", "")),
        settings=_json(record.get("settings", {})),
        inputs=_json(record.get("inputs", {})),
        info=_json(content["info"]),
        seconds=None if seconds is None else float(seconds),
        machine_id=provenance.machine_id,
        machine=_json(machine),
        created_at=provenance.created_at,
        draftsmith_version=provenance.draftsmith_version,
        session=provenance.session,
    )
    write_measured(home, path, provenance)
    write_record(home, "artifact", file_key(row.artifact_key, row.session), [row])


def _mark_superseded(home: Path, key: str) -> None:
    """Note which sessions of a key are not its newest valid one; where none is valid, its newest.

    Whoever comes next notes what a kill has left out, and once a session has given way it never comes back.
    """
    columns = ["session", "created_at", "info"]
    with reading(history_dir(home)):
        rows = _opened(home, "artifact").to_table(columns=columns, filter=field("artifact_key") == key).to_pylist()
    newest = max(rows, key=lambda row: (json.loads(row["info"]).get("verdict") != "invalid", row["created_at"]))
    for row in rows:
        if row is not newest:
            session = row["session"] or ""
            made = SupersededRow(artifact_key=key, session=session, created_at=row["created_at"])
            write_record(home, "superseded", file_key(key, session), [made])


def remember_all(home: Path, store: Store) -> dict[str, str]:
    """Put every session of every artifact of a store into the history; key -> why, of those that cannot be read.

    They are left out, so that one bad artifact cannot hide the others.
    """
    store.settle_all()
    unread, keys = {}, store.keys()
    for key in keys:
        try:
            remember_key(home, store, key)
        except UNREADABLE as error:
            unread[key] = why_unread(error)
    return unread


def remember_key(home: Path, store: Store, key: str) -> None:
    """Put every session of one artifact into the history, those before the newest too if they are missing there."""
    for session in reversed(store.sessions(key)):
        if not session.is_newest:
            remember_artifact(home, session.path)
    remember_artifact(home, store.path_of(key))


def why_unread(error: Exception) -> str:
    """What `UNREADABLE` says of one artifact, in one line."""
    said = " ".join(str(error).split())
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"


def remember_run(home: Path, entries: list[dict[str, Any]]) -> None:
    """Put a finished run and its steps, read from its journal, into the history. Idempotent."""
    start, end = journal.first(entries, "run"), journal.first(entries, "end")
    if start is None or end is None:
        return
    steps = [entry for entry in entries if entry["entry"] == "step"]
    run = RunRow(
        run_id=start["run_id"],
        pipeline=start["pipeline"],
        params=_json(start["params"]),
        how=start["how"],
        status=end["status"],
        reason=end["reason"] or None,
        num_executed=sum(step["status"] != "reused" for step in steps),
        num_reused=sum(step["status"] == "reused" for step in steps),
        started_at=as_time(start["time"]),
        ended_at=as_time(end["time"]),
        git_commit=start["git_commit"],
        draftsmith_version=start["draftsmith_version"],
    )
    rows = [
        StepRow(
            run_id=run.run_id,
            pipeline=run.pipeline,
            step=step["step"],
            uses=step["uses"],
            kind=step["kind"],
            artifact_key=step["key"] or None,
            reused=step["status"] == "reused",
            why=step["why"],
            status=step["status"],
            seconds=step["seconds"],
            settings=_json(step["settings"]),
            inputs=_json(step["inputs"]),
            ended_at=as_time(step["time"]),
            session=step.get("session"),
        )
        for step in steps
    ]
    write_record(home, "step", run.run_id, rows)
    write_record(home, "run", run.run_id, [run])


def remember_promotion(home: Path, row: PromotionRow) -> None:
    """Put one entry of the promotion log into the history. Idempotent."""
    write_record(home, "promotion", row.promotion_id, [row])


def rows_of(home: Path, table: str) -> list[dict[str, Any]]:
    """Every row of a table of the history."""
    with reading(history_dir(home)):
        return list(_opened(home, table).to_table().to_pylist())


def _opened(home: Path, table: str) -> Dataset:
    """The files of a table; raises DamagedHistory where one of them is no file."""
    try:
        return dataset(files_of(home, table), schema=reading_schema(table), format=CHECKED_PARQUET)
    except (pa.ArrowException, OSError) as error:
        where = f"{history_dir(home) / table}: cannot be opened ({type(error).__name__})"
        raise DamagedHistory(f"{where}; {HOW_TO_MEND}") from error


def damaged_files(home: Path) -> Iterator[Path]:
    """The files of the history that count and are gone, or not as they were written, or cannot be read to their end."""
    for table in all_tables():
        folder = history_dir(home) / table
        faulty = {str(folder / name) for name, _ in faulty_files(folder, whole=True)}
        yield from map(Path, sorted(faulty))
        for name in sorted(set(files_of(home, table)) - faulty):
            try:
                dataset([name], schema=reading_schema(table), format=CHECKED_PARQUET).to_table()
            except (pa.ArrowException, OSError, ValueError):
                yield Path(name)


def rebuild(home: Path, store: Store) -> dict[str, int]:
    """Make the whole history anew from the store, the run journals and the promotion log; counts what was read.

    Artifacts that cannot be read are left out and counted as "refused".
    """
    empty(history_dir(home))
    refused = len(remember_all(home, store))
    counts = {"artifacts": len(store.keys()) - refused, "runs": 0, "promotions": 0, "refused": refused}
    for entries in journal.all_runs(home):
        remember_run(home, entries)
        counts["runs"] += 1
    for row in journal.promotions(home):
        remember_promotion(home, row)
        counts["promotions"] += 1
    return counts


def _connect(home: Path, which: str, memory_gib: int = Limits.memory_gib) -> duckdb.DuckDBPyConnection:
    """An in-memory database with every view, locked. which: _NEWEST or _EVERY session."""
    config = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # a table is never one of our variables
        "temp_directory": "",
        "memory_limit": f"{memory_gib}GiB",
    }
    connection = duckdb.connect(":memory:", config=config)
    try:
        for table in all_tables():
            connection.register(table, _opened(home, table))
        connection.execute(which + _VIEWS.read_text(encoding="utf-8")).fetchall()
    except (RuntimeError, duckdb.Error) as error:  # what DuckDB makes of a Ctrl-C while it works in this thread
        if "Query interrupted" in str(error) or "KeyboardInterrupt" in str(error):
            raise KeyboardInterrupt from error
        raise
    # A progress bar would stand in front of answers that other programs read.
    for setting in ("enable_progress_bar=false", "enable_external_access=false", "lock_configuration=true"):
        connection.execute(f"SET {setting}")
    return connection


def _names(connection: duckdb.DuckDBPyConnection) -> str:
    rows = connection.execute("SELECT view_name FROM duckdb_views() WHERE NOT internal").fetchall()
    return ", ".join(sorted((str(row[0]) for row in rows), key=lambda name: (name in all_tables(), name)))


def _one_line(error: Exception) -> str:
    """DuckDB's message without its picture of the query."""
    said = str(error).split("\n\nLINE ")[0]
    return " ".join(said.split()).rstrip(".!")


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
