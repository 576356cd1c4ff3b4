"""Rows are written as they are read, whole tables at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from components.rows import TABLES, QualityFlag, Request, Round, read_rows, table_of, write_rows

FLAG = QualityFlag("s", "d", "mtp", "C", "info", 1.0, "detail")
ROUND = Round("r", 1, 0, 3, 2, 3, 10)


def test_rows_of_several_tables_come_back_and_an_absent_table_is_empty(tmp_path: Path) -> None:
    write_rows(tmp_path, [FLAG, ROUND, dataclasses.replace(FLAG, code="D")])
    assert read_rows(tmp_path, QualityFlag) == [FLAG, dataclasses.replace(FLAG, code="D")]
    assert read_rows(tmp_path, Round) == [ROUND] and read_rows(tmp_path, Request) == []
    write_rows(tmp_path, [FLAG])
    assert read_rows(tmp_path, QualityFlag) == [FLAG], "a file is replaced whole"


def test_every_table_has_one_type_of_rows() -> None:
    assert [table_of(row_type) for row_type in TABLES.values()] == list(TABLES)
