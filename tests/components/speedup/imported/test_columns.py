"""Every header means one column, whatever its spelling, with its unit; cells that hold nothing are absent."""

from __future__ import annotations

import pytest

from components.speedup.imported.columns import (
    ALIASES,
    COLUMNS,
    LISTS,
    NUMBERS,
    TEXTS,
    TIMES,
    as_milliseconds,
    column_of,
    is_absent,
    is_known,
)
from components.speedup.imported.rows import ImportedRow


def test_every_column_is_known_by_its_kind() -> None:
    assert set(ImportedRow.model_fields) == set(COLUMNS) == {*TEXTS, *LISTS, *NUMBERS}
    assert len(COLUMNS) == len(set(COLUMNS)) and {*TIMES} <= {*NUMBERS} and {*ALIASES.values()} <= {*COLUMNS}


@pytest.mark.parametrize(
    ("header", "name", "unit"),
    [
        ("T_verify (us)", "t_verify", "us"),
        ("t_verify_\u00b5s", "t_verify", "us"),
        ("t_target", "t_target", None),
        ("Depth-K", "k", None),
        ("AL(k)", "al", None),
        (" Mean acceptance length ", "al", None),
        ("batch_s", "batch_s", None),
    ],
)
def test_a_header_is_read_in_any_spelling(header: str, name: str, unit: str | None) -> None:
    assert column_of(header) == (name, unit)
    assert is_known(header) == (name in COLUMNS)


def test_times_are_milliseconds_and_nothing_is_absent() -> None:
    assert as_milliseconds("76000", "us") == pytest.approx(76.0) and as_milliseconds("soon", "s") == "soon"
    assert all(map(is_absent, (None, "", " N/A ", "-", float("nan")))) and not any(map(is_absent, (0, "0", "no", [])))
