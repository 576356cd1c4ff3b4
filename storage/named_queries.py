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
    """A value that a query can be given. default None: not given, filters nothing."""

    name: str
    kind: str
    default: Any
    about: str


@dataclass(frozen=True)
class NamedQuery:
    """One SELECT with a name. first: (name, SELECT of one value) that become parameters of it before it is asked."""

    name: str
    about: str
    parameters: tuple[Parameter, ...]
    first: tuple[tuple[str, str], ...]
    sql: str

    def values(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Every parameter's value, those given converted to their type.

        Raises:
            UserError: there is no such parameter, or its value is not of its type.
        """
        known = {parameter.name: parameter for parameter in self.parameters}
        values = {name: parameter.default for name, parameter in known.items()}
        for name, text in given.items():
            if name not in known:
                names = ", ".join(known) or "none"
                raise UserError(f"query {self.name}: no parameter {name!r}; it has: {names}")
            values[name] = _value(known[name], text, self.name)
        return values


@cache
def named_queries() -> dict[str, NamedQuery]:
    """Name -> query, in the order of the file."""
    found = {}
    for block in re.split(r"^(?=-- query: )", _FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        lines = block.splitlines()
        head = [line for line in lines if line.startswith("-- ")]
        name, about = head[0].removeprefix("-- query: "), head[1].removeprefix("-- about: ")
        assert head[1].startswith("-- about: "), f"queries.sql: {name} does not say what it answers"
        first = [line.removeprefix("-- first: ").split(" = ", 1) for line in head if line.startswith("-- first: ")]
        parameters = tuple(_parameter(name, line) for line in head[2:] if not line.startswith("-- first: "))
        sql = "\n".join(line for line in lines if not line.startswith("-- ")).strip()
        found[name] = NamedQuery(name, about, parameters, tuple((variable, ask) for variable, ask in first), sql)
    return found


def find_query(name: str) -> NamedQuery:
    """The query of this name.

    Raises:
        UserError: there is none; the error suggests the nearest name.
    """
    known = named_queries()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "`draftsmith query --list` names them"
        raise UserError(f"query: {name!r} is no named query, {hint}")
    return known[name]


def ask_by_name(
    home: Path, name: str, given: Mapping[str, str], *, all_sessions: bool = False
) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows that a named query gives over the history of `home`.

    all_sessions: of what was measured again every session, not the newest valid one alone.

    Raises:
        UserError: there is no such query or parameter.
    """
    from storage.results import open_history

    found = find_query(name)
    values = found.values(given)
    with open_history(home, all_sessions=all_sessions) as ask:
        for variable, sql in found.first:
            values[variable] = ask(sql, _used(values, sql))[1][0][0]
        return ask(found.sql, _used(values, found.sql))


def is_name(question: str) -> bool:
    """Whether a question is a name rather than SQL."""
    return re.fullmatch(r"[A-Za-z][\w-]*", question) is not None


def list_rows() -> tuple[Sequence[str], list[tuple[str, str, str]]]:
    """Columns and rows of the list of queries."""
    rows = []
    for query in named_queries().values():
        told = [f"{p.name}{'' if p.default is None else f'={p.default}'}" for p in query.parameters]
        rows.append((query.name, ", ".join(told), query.about))
    return ("name", "parameters", "about"), rows


def _used(values: Mapping[str, Any], sql: str) -> dict[str, Any]:
    """The parameters that a SELECT names; others would be refused."""
    return {name: values[name] for name in re.findall(r"\$(\w+)", sql)}


def _parameter(query: str, line: str) -> Parameter:
    match = _PARAM.fullmatch(line)
    assert match is not None, f"queries.sql: {query}: not a parameter: {line}"
    name, kind, default, about = match.groups()
    return Parameter(name, kind, None if default is None else _TYPES[kind](default), about)


def _value(parameter: Parameter, text: str, query: str) -> Any:
    if text == "":
        return None
    try:
        return _TYPES[parameter.kind](text)
    except ValueError as error:
        raise UserError(f"query {query}: {parameter.name} is {text!r}, expected {parameter.kind}") from error
