"""Every table, view and column says what it means, and nothing is said of what is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.definitions import DEFINITIONS
from storage.history.comments import _sections, about_column, about_tables
from storage.history.query import open_history, query, run_named_query, view_names


def test_everything_in_the_history_has_a_meaning_and_its_name_says_whether_it_is_a_view(home: Path) -> None:
    names = view_names()
    with open_history(home) as run_query:
        columns = {name: run_query(f"SELECT * FROM {name} LIMIT 0", {})[0] for name in names}
    assert [name for name in columns if not about_tables().get(name)] == []
    assert [(name, c) for name in columns for c in columns[name] if not about_column(name, c)] == []
    known = {column for its_columns in columns.values() for column in its_columns}
    meanings = _sections()
    unknown = [
        (name, c) for name in meanings if name != "any" for c in meanings[name] if c not in columns.get(name, ())
    ]
    assert unknown == [] and set(meanings["any"]) <= known - set(DEFINITIONS)
    stored = {name for name in columns if not name.startswith("v_")}
    assert "run" in stored and not {f"{name}s" for name in stored} & set(columns), "one name a thing"


def test_a_question_for_comments_gets_them(home: Path, make: Any) -> None:
    rows = query("SELECT comment FROM duckdb_columns() WHERE table_name = 'v_choice' AND column_name = 'depth_k'", home)
    assert rows[1] == [("Draft tokens a round; 0: none.",)]
    _, rows = run_named_query(home, "columns", {})
    assert len(rows) > 1000 and all(row[3] for row in rows)
    assert {row[0] for row in rows} == set(view_names())
