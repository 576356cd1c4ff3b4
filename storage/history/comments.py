"""What every table, view and column of the history means, and the SQL comments that say so to whoever connects.

Each is written beside what it describes: a table in the docstring of its rows, a view in the comment above it in
views.sql, a published number in components/definitions.py, every other column in columns.toml. A test holds the four
complete. `draftsmith query` gives the comments to a question that asks for them, an exported database keeps them.
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final

from components.definitions import DEFINITIONS
from storage.history.records import MEASURED, RECORDS

VIEWS: Final = Path(__file__).with_name("views.sql")
_COLUMNS = Path(__file__).with_name("columns.toml")
_LEFT_OUT = "The sessions that views leave out, since a newer valid one of the same key stands in their place."


@cache
def about_tables() -> dict[str, str]:
    """Every table and view -> what its rows are."""
    rows = {name: (inspect.getdoc(type_) or "").partition("\n\n")[0] for name, type_ in {**MEASURED, **RECORDS}.items()}
    above = re.findall(r"((?:^--.*\n)*)^CREATE VIEW (\w+) AS", VIEWS.read_text(encoding="utf-8"), re.MULTILINE)
    views = {name: " ".join(line.lstrip("- ") for line in comment.splitlines()) for comment, name in above}
    return {name: " ".join(text.split()) for name, text in {**views, "v_left_out": _LEFT_OUT, **rows}.items()}


def about_column(table: str, column: str) -> str:
    """What a column of a table or view means; "" where nobody has said it."""
    sections = _sections()
    here = sections.get(table, {}).get(column)
    if here is None and (number := DEFINITIONS.get(column)) is not None:
        return f"{number.formula}; {number.unit}. {number.counts}"
    return here or sections["any"].get(column, "")


def comment_statements(columns: Mapping[str, Iterable[str]], tables: Iterable[str] = ()) -> str:
    """COMMENT ON for these relations and their columns. tables: those of them that are no views."""
    lines = []
    for name, its_columns in columns.items():
        kind = "TABLE" if name in set(tables) else "VIEW"
        lines.append(f"COMMENT ON {kind} {_quoted(name)} IS {_text(about_tables()[name])};")
        lines += [
            f"COMMENT ON COLUMN {_quoted(name)}.{_quoted(column)} IS {_text(about_column(name, column))};"
            for column in its_columns
        ]
    return "\n".join(lines)


@cache
def _sections() -> dict[str, dict[str, str]]:
    return tomllib.loads(_COLUMNS.read_text(encoding="utf-8"))


def _quoted(name: str) -> str:
    return f'"{name}"'


def _text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
