"""A row comes back as it was written, and one that is not as its table says is refused with its place."""

from __future__ import annotations

import dataclasses
import json
import shutil
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.contract import UserError
from components.rows import TABLES, QualityFlag, read_rows, write_rows
from storage.history.files import is_known, rows_of, sessions_known, write_measured
from storage.history.query import query
from storage.history.records import Provenance, now
from storage.history.schema import plain_type
from storage.history.write import record_artifact

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    str: st.text(st.characters(codec="utf-8"), max_size=5),
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**50), 2**50).map(float),
    bool: st.booleans(),
    list[int]: st.lists(st.integers(0, 9), max_size=4),
    list[float]: st.lists(st.floats(0.0, 1.0), max_size=4),
    list[list[float]]: st.lists(st.lists(st.floats(0.0, 1.0), max_size=3), max_size=3),
    list[str]: st.lists(st.text(st.characters(codec="utf-8"), max_size=3), max_size=3),
}


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    kind, nullable = plain_type(hint)
    return VALUES[kind] | st.none() if nullable else VALUES[kind]


@st.composite
def any_rows(draw: st.DrawFn) -> list[Any]:
    row_type = draw(st.sampled_from(list(TABLES.values())))
    fields = {name: values_of(hint) for name, hint in get_type_hints(row_type).items()}
    return draw(st.lists(st.builds(row_type, **fields), min_size=1, max_size=3))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=any_rows())
def test_every_row_comes_back_as_it_was_written_with_the_types_of_its_table(tmp_path, rows):
    place = tmp_path / "h"
    shutil.rmtree(place, ignore_errors=True)
    source = place / "out"
    source.mkdir(parents=True)
    write_rows(source, rows)
    write_measured(place, source, Provenance("k", "p", "s", "r", None, now(), "0"))
    table = next(name for name, kind in TABLES.items() if kind is type(rows[0]))
    names = ", ".join(f'"{field.name}"' for field in dataclasses.fields(rows[0]))
    found = [type(rows[0])(*row) for row in query(f"SELECT {names} FROM {table}", place)[1]]
    assert sorted(map(repr, found)) == sorted(map(repr, rows))
    assert read_rows(source, type(rows[0])) == rows


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"value": "0.5"}, "quality_flag.value is '0.5' (str), expected float"),
        ({"value": None}, "quality_flag.value is empty"),
        ({"value": float("nan")}, "write None for what was not measured"),
        ({"value": True}, "expected float"),
        ({"code": 3}, "quality_flag.code is 3 (int), expected str"),
        ({"surplus": 1}, "unknown column surplus"),
    ],
)
def test_a_drifted_row_is_refused_with_its_place_and_leaves_no_file(home, make, change, says):
    row = dataclasses.asdict(QualityFlag("s", "d", "mtp", "C", "info", 1.0, "")) | change
    artifact = make("bad", files={"quality_flag.jsonl": json.dumps(row) + "\n"})
    with pytest.raises(UserError) as refused:
        record_artifact(home, artifact.path)
    assert says in str(refused.value) and "\n" not in str(refused.value)
    assert not list(home.glob("history/**/bad.parquet"))


def test_a_line_that_is_not_json_is_named_by_its_number(home, make):
    with pytest.raises(UserError, match=r"quality_flag.jsonl:1: not a JSON row"):
        record_artifact(home, make("bad", files={"quality_flag.jsonl": "{oops\n"}).path)


def test_what_was_written_is_known_by_key_and_session(home, make):
    record_artifact(home, make("k1", rows=[QualityFlag("s", "d", "mtp", "C", "info", 1.0, "")]).path)
    (session,) = sessions_known(home, "k1")
    assert is_known(home, "quality_flag", f"k1.{session}") and not is_known(home, "quality_flag", "k2")
    assert [(row["code"], row["session"]) for row in rows_of(home, "quality_flag")] == [("C", session)]
