"""A model is named by its target, and the page of a version tells its facts and the gate's answer."""

from __future__ import annotations

import json

import pytest

from components.promotion import Check
from storage.registry.promotion_gate import Decision
from storage.registry.versions import description, model_name


@pytest.mark.parametrize(
    ("target", "name"),
    [("owner/model", "owner-model"), ("/models/my model", "my-model"), ("./here", "here"), ("./..", "target")],
)
def test_a_model_is_named_by_its_target(target: str, name: str) -> None:
    assert model_name(target) == name


def test_the_page_of_a_version_tells_facts_and_answers() -> None:
    tags = {
        "draftsmith.method": "mtp",
        "draftsmith.target": "owner/model",
        "draftsmith.speedup_meas": "1.5",
        "draftsmith.meas_lo": "1.4",
        "draftsmith.meas_hi": "1.6",
        "gate.checks": json.dumps([{"name": "parity", "passed": True, "value": 0.0, "limit": "0"}]),
    }
    decision = Decision((Check("own_gate", False, 1.0, None, None, "0 fail"),), 3)
    lines = description(tags, decision).splitlines()
    assert "| measured speedup | 1.50 | \\[1.40, 1.60\\] |" in lines
    assert "| parity | 0 | 0 | yes |" in lines
    assert any(line.startswith("| against version 3 ") for line in lines) and lines[-1].endswith("| NO |")
