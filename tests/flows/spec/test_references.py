"""How an input from outside is written: each scheme has its form, and a wrong one costs one line."""

from __future__ import annotations

import pytest

from components.contract import Draft, Page
from flows.spec.references import is_outside, reference_error, source_misfit, source_name


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
