"""A drafter that takes its method from another is given that other; else it costs one line before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest
from usual_pipeline import USUAL

from components.contract import UserError
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec


def test_the_method_of_another_drafter_needs_one(tmp_path: Path) -> None:
    file = tmp_path / "pipelines.yaml"
    drafts = USUAL.up_to("draft").with_setting("draft", method="auto")
    file.write_text(drafts.with_inputs("draft", start_from="registry:builtin@champion").text)
    check_spec(load_spec(file), outside=lambda name: "Draft")
    file.write_text(drafts.text)
    with pytest.raises(
        UserError, match=r"step 'draft': method: auto is the method of start_from: give that under 'in'"
    ):
        check_spec(load_spec(file), outside=lambda name: "Draft")
