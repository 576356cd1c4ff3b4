"""`flows.catalog.NAME` is the flow of pipeline NAME, looked up in pipelines.yaml when somebody asks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows import catalog


def test_a_name_is_looked_up_when_it_is_asked_for(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_PIPELINES", str(file))
    monkeypatch.setattr(catalog, "garden", None, raising=False)
    monkeypatch.delattr(catalog, "garden")
    flow = catalog.garden
    assert flow.name == "garden" and flow.description == "Toys." and flow is catalog.garden
    monkeypatch.delattr(catalog, "garden")


def test_a_name_that_is_no_pipeline_is_told_with_the_one_that_was_meant(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_PIPELINES", str(file))
    with pytest.raises(AttributeError, match=r"no pipeline 'gadren' .did you mean 'garden'"):
        _ = catalog.gadren
