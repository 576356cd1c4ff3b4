"""The named queries: the usual questions, each with a line about it and typed parameters, read from queries.sql."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from components.contract import UserError

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
        near = get_close_matches(name, queries, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`draftsmith query --list` names them"
        raise UserError(f"query: {name!r} is no named query, {hint}")
    return queries[name]


def run_named_query(
    home: Path, name: str, texts: Mapping[str, str], *, all_sessions: bool = False
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows that a named query gives over the history of `home`.

    all_sessions: of what was measured again every session, not the newest valid one alone.

    Raises:
        UserError: there is no such query or parameter.
    """
    from storage.results import open_history

    named = find_query(name)
    values = named.values(texts)
    with open_history(home, all_sessions=all_sessions) as run:
        for variable, sql in named.first:
            values[variable] = run(sql, _parameters_in(values, sql))[1][0][0]
        return run(named.sql, _parameters_in(values, named.sql))


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


def _parameters_in(values: Mapping[str, Any], sql: str) -> dict[str, Any]:
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
