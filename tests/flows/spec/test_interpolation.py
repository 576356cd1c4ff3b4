"""`${params.x}` and `${matrix.y}`: one alone keeps its type, among text it becomes text, wherever it is nested."""

from __future__ import annotations

from flows.spec.interpolation import fill, inserts_in, params_at, params_in

SCOPES = {"params": {"steps": 6, "sunny": True}, "matrix": {"method": "fern"}}
NESTED = {"a": ["${params.steps}", {"b": "take ${params.steps} of ${matrix.method}"}], "c": 3}


def test_one_alone_keeps_its_type_and_text_around_it_makes_text() -> None:
    assert fill(NESTED, SCOPES) == {"a": [6, {"b": "take 6 of fern"}], "c": 3}
    assert fill("it is ${ params.sunny }", SCOPES) == "it is true"


def test_every_insert_is_found_at_its_place() -> None:
    assert [place for place, _ in inserts_in(NESTED)] == [("a", 0), ("a", 1, "b"), ("a", 1, "b")]
    assert params_in(NESTED) == ["steps", "steps"]
    assert params_at(NESTED, ("a", 1, "b")) == ["steps"] and params_at(NESTED, ("c",)) == []
