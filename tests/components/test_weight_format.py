"""The weight format of a drafter is read as quantise_draft wrote it, and told to people."""

from __future__ import annotations

from typing import Any

import pytest

from components.weight_format import Storage


def test_a_record_comes_back_and_an_unquantised_drafter_has_none() -> None:
    stored = {"weights": "int4", "group_size": 32, "keep": ["fc", "lm_head"]}
    storage = Storage.from_record({"storage": stored})
    assert storage == Storage("int4", 32, ("fc", "lm_head")) and storage.bits == 4
    assert storage.description == "int4, groups of 32; fc, lm_head in bf16"
    assert Storage.from_record({}) is None
    assert (Storage("bf16").description, Storage("bf16").bits) == ("bf16", None)
    assert Storage("int8").description == "int8, a scale for each output channel"


@pytest.mark.parametrize(
    "stored",
    [
        7,
        {"weights": "int3"},
        {"weights": "int8", "group_size": -1, "keep": []},
        {"weights": "int8", "group_size": True},
    ],
)
def test_a_format_that_is_none_is_refused(stored: Any) -> None:
    with pytest.raises(ValueError, match=r"none that drafts\.quantise_draft writes"):
        Storage.from_record({"storage": stored})
