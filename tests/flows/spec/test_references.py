"""Inserts and references of pipelines.yaml: what they may say, and what a wrong one is told."""

from __future__ import annotations

import pytest

from components.contract import Draft, Page
from flows.spec.references import (
    fill,
    inserts_in,
    is_outside,
    params_at,
    params_in,
    reference_error,
    source_misfit,
    source_name,
)

SCOPES = {"params": {"steps": 6, "sunny": True}, "matrix": {"method": "fern"}}
NESTED = {"a": ["${params.steps}", {"b": "take ${params.steps} of ${matrix.method}"}], "c": 3}


def test_one_alone_keeps_its_type_and_text_around_it_makes_text() -> None:
    assert fill(NESTED, SCOPES) == {"a": [6, {"b": "take 6 of fern"}], "c": 3}
    assert fill("it is ${ params.sunny }", SCOPES) == "it is true"


def test_every_insert_is_found_at_its_place() -> None:
    assert [place for place, _ in inserts_in(NESTED)] == [("a", 0), ("a", 1, "b"), ("a", 1, "b")]
    assert params_in(NESTED) == ["steps", "steps"]
    assert params_at(NESTED, ("a", 1, "b")) == ["steps"] and params_at(NESTED, ("c",)) == []


def test_a_colon_makes_an_input_from_outside() -> None:
    assert is_outside("store:abc") and not is_outside("draft[eagle3]")


@pytest.mark.parametrize(
    ("reference", "fault"),
    [
        ("store:0123abcd", ""),
        ("path:some/folder", ""),
        ("registry:drafter@champion", ""),
        ("registry:drafter", "write registry:NAME@champion"),
        ("store: ", "names nothing after the colon"),
        ("sotre:abc", "did you mean 'store'?"),
        ("query:SELECT 1", "an answer changes with the history"),
    ],
)
def test_each_scheme_has_its_form(reference: str, fault: str) -> None:
    assert (fault in reference_error(reference)) if fault else reference_error(reference) == ""


def test_a_registered_version_gives_its_lineage_and_no_page() -> None:
    assert source_name("registry:drafter@3", Draft) == "registry:drafter@3 (Draft)"
    assert source_name("store:abc", Draft) == "store:abc"
    assert source_misfit("registry:drafter@3", Draft) == "" == source_misfit("store:abc", Page)
    assert source_misfit("registry:drafter@3", Page).startswith("wants Page, but 'registry:drafter@3' gives a Release")
