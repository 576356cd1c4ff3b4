"""Every table has a schema from its dataclass, readers accept files older than a column, and a value is of its type."""

from __future__ import annotations

import pytest

from components.contract import UserError
from storage.history.records import columns_of
from storage.history.schema import all_tables, check_row, defaults_of, plain_type, reading_schema, schema_of


@pytest.mark.parametrize("table", all_tables())
def test_a_schema_has_the_columns_of_its_rows_and_readers_may_lack_any(table: str) -> None:
    assert schema_of(table).names == reading_schema(table).names == list(columns_of(table))
    assert all(field.nullable for field in reading_schema(table))
    assert set(defaults_of(table)) <= set(columns_of(table))


def test_a_whole_number_is_a_float_where_one_is_meant_and_nothing_else_is() -> None:
    assert check_row("toy", {"a": 1}, {"a": float}, "row 1") == {"a": 1.0}
    assert check_row("toy", {"a": None}, {"a": float | None}, "row 1") == {"a": None}
    assert plain_type(int | None) == (int, True) and plain_type(str) == (str, False)
    for value, hint in ((True, int), (2**63, int), ("x", list[int]), ([1.5], list[int]), (float("inf"), float)):
        with pytest.raises(UserError, match=r"row 1: toy\.a"):
            check_row("toy", {"a": value}, {"a": hint}, "row 1")


@pytest.fixture(autouse=True)
def toy_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "storage.history.schema.defaults_of", lambda table: {} if table == "toy" else defaults_of(table)
    )
