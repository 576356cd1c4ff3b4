"""SQL queries over every benchmark ever run: DuckDB over the Parquet files of the history.

Each query opens an in-memory database, makes the views of views.sql over the files that are there now, and locks it:
one SELECT or EXPLAIN, no extensions, no settings, and no files at all, since Arrow reads the history for it (a COPY
inside a WITH or an EXPLAIN ANALYZE parses as a SELECT, and would write wherever DuckDB may read). Any number of
processes may query while others write (storage/history/write.py): the one lock only delays the deletion of merged
files.

A repeated measurement is another session of the same key (storage/artifacts/sessions.py). The tables hold the rows
of every session; the views show the newest valid session of each key, or every one on request.

The usual questions have names: queries.sql holds each with a line about it and typed parameters. `measured_of` selects
what a comparison of two drafters reads (components/speedup/comparison).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from components.contract import UserError
from components.promotion import ArmPrompt, MeasuredRows
from components.rows import AcceptanceMap, grouped
from components.text import nearest
from storage.artifacts.sync import catch_up
from storage.history.comments import VIEWS, comment_statements
from storage.history.files import damaged_files, history_dir, open_table
from storage.history.schema import all_tables
from storage.history.segments import REPAIR_HINT, DamagedHistory, faulty_files, reading

# What views.sql builds on: the rows that `newest` leaves out, and what tells the earlier sessions of a selection apart.
NEWEST = """CREATE VIEW v_left_out AS SELECT created_at, artifact_key FROM superseded;
             CREATE MACRO earlier_run(made_at, made, run_id) AS NULL;"""
_EVERY = """CREATE VIEW v_left_out AS SELECT created_at, artifact_key FROM superseded WHERE false;
            CREATE MACRO earlier_run(made_at, made, run_id) AS
              CASE WHEN (made_at, made) IN (SELECT (created_at, artifact_key) FROM superseded) THEN run_id END;"""


_ARMS = Path(__file__).with_name("paired_prompts.sql")
_MAPS = """
SELECT target_key, draft_key, method, prompt_id, workload, k_max, trained_depth, num_tokens, accepted,
       [] AS proxy_accepted, repeated_bigrams, dtype, tree_budget
FROM newest('acceptance_map') WHERE list_contains($drafts, draft_key)
ORDER BY created_at DESC, artifact_key, prompt_id"""
_WORD = re.compile(r"\w+")
_ASKS_FOR_NAMES = re.compile(
    r"\bshow\b|\bcomment\b|\b(duckdb|pg|pragma|sqlite)_\w+|\binformation_schema\b", re.IGNORECASE
)
_ASKS_FOR_COMMENTS = re.compile(r"\bcomment\b|\bduckdb_\w+\(", re.IGNORECASE)
QueryResult = tuple[list[str], list[tuple[Any, ...]]]
Parameters = Mapping[str, Any]
"""The values of the $names of a SELECT."""
RunQuery = Callable[[str, Parameters], QueryResult]


@dataclass(frozen=True)
class Limits:
    """Limits of one query: seconds, rows of its result, and GiB of memory for DuckDB."""

    seconds: float = 120.0
    rows: int = 500_000
    memory_gib: int = 4


def query(
    sql: str,
    home: Path,
    parameters: Parameters | None = None,
    *,
    all_sessions: bool = False,
    limits: Limits = Limits(),
) -> QueryResult:
    """The column names and rows that one SELECT gives over the history of `home`. Times are UTC.

    parameters: values of the $names in it; nothing is ever pasted into SQL. all_sessions: views show every session of
    what was measured again, not the newest valid one alone.

    Raises:
        UserError: the SQL is wrong, is not one SELECT, reaches outside the history, or takes more than its limits.
    """
    with open_history(home, all_sessions=all_sessions, limits=limits) as run_query:
        return run_query(sql, parameters or {})


@contextmanager
def open_history(home: Path, *, all_sessions: bool = False, limits: Limits = Limits()) -> Iterator[RunQuery]:
    """Several queries over one state of the history: run_query(sql, parameters) returns what `query` does."""
    catch_up(home)
    with reading(history_dir(home)), _connect(limits.memory_gib) as connection:
        relations = _Relations(home, connection, _EVERY if all_sessions else NEWEST)
        checked_tables, has_comments = set[str](), False

        def run_query(sql: str, parameters: Parameters) -> QueryResult:
            nonlocal has_comments
            named = _names_in(sql)
            relations.make(None if _ASKS_FOR_NAMES.search(sql) else named)
            if not has_comments and _ASKS_FOR_COMMENTS.search(sql):  # a fifth of a second, which few questions need
                connection.execute(comment_statements(relation_columns(connection))).fetchall()
                has_comments = True
            for table in sorted(named & set(all_tables()) - checked_tables):
                for name, fault in faulty_files(history_dir(home) / table):
                    raise DamagedHistory(f"{history_dir(home) / table / name}: {fault}; {REPAIR_HINT}")
                checked_tables.add(table)
            try:
                statements = connection.extract_statements(sql)
                allowed = {duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN}
                if len(statements) != 1 or statements[0].type not in allowed:
                    raise UserError(
                        f"query: one SELECT, please: it reads and never writes. Views: {', '.join(view_names())}"
                    )
                try:
                    columns, rows = _execute_within(connection, statements[0], parameters, limits)
                except duckdb.CatalogException:  # a computed name, as in query_table($table), or there is none such
                    relations.make(None)
                    columns, rows = _execute_within(connection, statements[0], parameters, limits)
            except duckdb.OutOfMemoryException as error:
                raise UserError(f"query: it takes more than {limits.memory_gib} GiB of memory: ask for less") from error
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                damaged = next(damaged_files(home), None)
                if damaged is not None:
                    raise UserError(f"{damaged}: is damaged; {REPAIR_HINT}") from error
                raise UserError(f"query: {_one_line(error)}. Views: {', '.join(view_names())}") from error
            if len(rows) > limits.rows:
                most = f"{limits.rows:,} rows"
                raise UserError(f"query: it has more than {most}: add a LIMIT, or allow more (--max-rows)")
            return columns, rows

        yield run_query


class _Relations:
    """The tables, views and macros of a connection, each made when a statement first names it: all take 0.1 s.

    which: NEWEST or _EVERY session.
    """

    def __init__(self, home: Path, connection: duckdb.DuckDBPyConnection, which: str) -> None:
        self.home, self.connection = home, connection
        self.missing = dict.fromkeys(all_tables(), "") | _definitions(which)

    def make(self, names: set[str] | None) -> None:
        """Make those of these names (None: all) that are not there yet."""
        for name in [name for name in self.missing if names is None or name in names]:
            try:
                if statement := self.missing[name]:
                    self.connection.execute(statement).fetchall()
                else:
                    self.connection.register(name, open_table(self.home, name))
            except (RuntimeError, duckdb.Error) as error:  # DuckDB's error for a Ctrl-C while it works in this thread
                if "Query interrupted" in str(error) or "KeyboardInterrupt" in str(error):
                    raise KeyboardInterrupt from error
                raise
            del self.missing[name]


@cache
def _definitions(which: str) -> dict[str, str]:
    """View or macro -> the statement that makes it, after those that it builds on."""
    parts = re.split(r"(\bCREATE (?:VIEW|MACRO) (\w+))", which + VIEWS.read_text(encoding="utf-8"))
    return {name: begin + rest for begin, name, rest in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)}


@cache
def _words_of_views() -> dict[str, set[str]]:
    """View or macro -> the words of its definition."""
    return {name: set(_WORD.findall(text.lower())) for name, text in _definitions(NEWEST).items()}


def _names_in(sql: str) -> set[str]:
    """The words of a statement and of the views that it names, theirs included: every table that it may read is one."""
    named, pending = set[str](), set(_WORD.findall(sql.lower()))
    while pending:
        word = pending.pop()
        named.add(word)
        pending |= _words_of_views().get(word, set()) - named
    return named


def _execute_within(
    connection: duckdb.DuckDBPyConnection, statement: duckdb.Statement, parameters: Parameters, limits: Limits
) -> QueryResult:
    """The columns and rows of one statement; one row more than allowed means that there are more.

    DuckDB works in a thread of its own: while it works in this one, neither a timeout nor Ctrl-C takes effect.

    Raises:
        UserError: it takes longer than allowed.
    """
    result: Future[QueryResult] = Future()

    def work() -> None:
        try:
            cursor = connection.execute(statement, dict(parameters) or None)
            columns = [str(column[0]) for column in cursor.description or []]
            result.set_result((columns, cursor.fetchmany(limits.rows + 1)))
        except BaseException as error:  # raised again by result.result()
            result.set_exception(error)

    worker = threading.Thread(target=work, name="query", daemon=True)
    worker.start()
    try:
        return result.result(limits.seconds)
    except (TimeoutError, KeyboardInterrupt) as error:
        while worker.is_alive():
            connection.interrupt()  # without effect on a statement that has not begun
            worker.join(0.1)
        if isinstance(error, KeyboardInterrupt):
            raise
        raise UserError(
            f"query: no answer within {limits.seconds:g} s: ask for less, or allow more (--timeout)"
        ) from error
    finally:
        worker.join()


def measured_of(home: Path, *draft_keys: str) -> MeasuredRows:
    """The measured rows of some drafters. Maps come the newest first; their proxy_accepted is left out (empty)."""
    drafts: Parameters = {"drafts": [key for key in draft_keys if key]}
    with open_history(home) as run_query:
        arms, maps = run_query(_ARMS.read_text(encoding="utf-8"), drafts), run_query(_MAPS, drafts)
    return MeasuredRows(
        [ArmPrompt(**row) for row in as_records(arms)],
        [AcceptanceMap(**row) for row in as_records(maps)],
    )


def view_names() -> list[str]:
    """The views and tables that a query may name."""
    views = (name for name, text in _definitions(NEWEST).items() if text.startswith("CREATE VIEW"))
    return [*sorted(views), *sorted(all_tables())]


def _connect(memory_gib: int) -> duckdb.DuckDBPyConnection:
    """An in-memory database, locked."""
    config = {
        "autoinstall_known_extensions": False,
        "autoload_known_extensions": False,
        "python_enable_replacements": False,  # a table is never one of our variables
        "temp_directory": "",
        "memory_limit": f"{memory_gib}GiB",
    }
    connection = duckdb.connect(":memory:", config=config)
    # A progress bar would stand in front of answers that other programs read.
    for setting in ("enable_progress_bar=false", "enable_external_access=false", "lock_configuration=true"):
        connection.execute(f"SET {setting}")
    return connection


def relation_columns(connection: duckdb.DuckDBPyConnection) -> dict[str, list[str]]:
    """Every table and view -> its columns."""
    rows = connection.execute("SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal").fetchall()
    return {table: [column for _, column in of_table] for table, of_table in grouped(rows, lambda row: row[0]).items()}


def _one_line(error: Exception) -> str:
    """DuckDB's message without its picture of the query."""
    message = str(error).split("\n\nLINE ")[0]
    return " ".join(message.split()).rstrip(".!")


_FILE = Path(__file__).with_name("queries.sql")
_TYPES: dict[str, type[Any]] = {"text": str, "int": int, "float": float}
_PARAM = re.compile(r"-- param: (\w+) (text|int|float)(?: = (\S+))?  (.+)")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a named query. default None: it filters nothing unless it is given."""

    name: str
    kind: str
    default: Any
    about: str


@dataclass(frozen=True)
class NamedQuery:
    """One SELECT with a name. first: (name, SELECT of one value), run before it to fill in parameters of that name."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    first: tuple[tuple[str, str], ...]
    sql: str

    def values(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Every parameter's value: its default, or its text converted to its type.

        Raises:
            UserError: there is no such parameter, or its value is not of its type.
        """
        parameters = {parameter.name: parameter for parameter in self.parameters}
        values = {name: parameter.default for name, parameter in parameters.items()}
        for name, text in texts.items():
            if name not in parameters:
                names = ", ".join(parameters) or "none"
                raise UserError(f"query {self.name}: no parameter {name!r}; it has: {names}")
            values[name] = _parse_value(parameters[name], text, self.name)
        return values


@cache
def named_queries() -> dict[str, NamedQuery]:
    """Name -> query, in the order of the file."""
    queries = {}
    for block in re.split(r"^(?=-- query: )", _FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        lines = block.splitlines()
        head = [line for line in lines if line.startswith("-- ")]
        name, about = head[0].removeprefix("-- query: "), head[1].removeprefix("-- about: ")
        assert head[1].startswith("-- about: "), f"queries.sql: {name} does not say what it answers"
        selects = [line.removeprefix("-- first: ") for line in head if line.startswith("-- first: ")]
        first = tuple((variable, select) for variable, _, select in (line.partition(" = ") for line in selects))
        parameters = tuple(_parse_parameter(name, line) for line in head[2:] if not line.startswith("-- first: "))
        sql = "\n".join(line for line in lines if not line.startswith("-- ")).strip()
        queries[name] = NamedQuery(name, about, parameters, first, sql)
    return queries


def find_query(name: str) -> NamedQuery:
    """The query of this name.

    Raises:
        UserError: there is none; the error suggests the nearest name.
    """
    queries = named_queries()
    if name not in queries:
        near = nearest(name, queries)
        hint = f"did you mean {near!r}?" if near else "`draftsmith query --list` names them"
        raise UserError(f"query: {name!r} is no named query, {hint}")
    return queries[name]


def run_named_query(home: Path, name: str, texts: Mapping[str, str], *, all_sessions: bool = False) -> QueryResult:
    """The columns and rows that a named query gives over the history of `home`.

    all_sessions: of what was measured again every session, not the newest valid one alone.

    Raises:
        UserError: there is no such query or parameter.
    """
    find_query(name).values(texts)  # what is wrong is told before anything is opened
    with open_history(home, all_sessions=all_sessions) as run:
        return ask_named_query(run, name, texts)


def ask_named_query(run: RunQuery, name: str, texts: Mapping[str, str]) -> QueryResult:
    """What `run_named_query` gives, of an open history: several questions cost one opening, and see one state."""
    named = find_query(name)
    values = named.values(texts)
    for variable, sql in named.first:
        values[variable] = run(sql, _parameters_in(values, sql))[1][0][0]
    return run(named.sql, _parameters_in(values, named.sql))


def as_records(result: QueryResult) -> list[dict[str, Any]]:
    """The rows of an answer, each as column -> value."""
    columns, rows = result
    return [dict(zip(columns, row, strict=True)) for row in rows]


def is_name(question: str) -> bool:
    """Whether a question is a name rather than SQL."""
    return re.fullmatch(r"[A-Za-z][\w-]*", question) is not None


def list_rows() -> tuple[Sequence[str], list[tuple[str, str, str]]]:
    """Columns and rows of the list of queries."""
    rows = []
    for query in named_queries().values():
        parameters = [f"{p.name}{'' if p.default is None else f'={p.default}'}" for p in query.parameters]
        rows.append((query.name, ", ".join(parameters), query.about))
    return ("name", "parameters", "about"), rows


def _parameters_in(values: Parameters, sql: str) -> dict[str, Any]:
    """The values of the parameters that a SELECT names; DuckDB refuses others."""
    return {name: values[name] for name in re.findall(r"\$(\w+)", sql)}


def _parse_parameter(query: str, line: str) -> Parameter:
    match = _PARAM.fullmatch(line)
    assert match is not None, f"queries.sql: {query}: not a parameter: {line}"
    name, kind, default, about = match.groups()
    return Parameter(name, kind, None if default is None else _TYPES[kind](default), about)


def _parse_value(parameter: Parameter, text: str, query: str) -> Any:
    if text == "":
        return None
    try:
        return _TYPES[parameter.kind](text)
    except ValueError as error:
        raise UserError(f"query {query}: {parameter.name} is {text!r}, expected {parameter.kind}") from error
