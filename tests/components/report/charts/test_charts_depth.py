"""Charts by depth show what was measured beside what was predicted, and prompt lookup where it was timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from report_study import make_report_study

from components.policy import read_policy
from components.report.charts.depth import speedup_chart
from components.rows import DepthChoice, DepthEval, read_rows


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_report_study(tmp_path_factory.mktemp("study"))


def test_prompt_lookup_is_drawn_beside_depths_of_its_own_batch_size(study: dict[str, Any]) -> None:
    choice = read_rows(study["policy"].path, DepthChoice)[0]
    evals = [e for e in read_rows(study["policy"].path, DepthEval) if e.draft_key == choice.draft_key]
    lookup, elsewhere = (
        dataclasses.replace(read_policy(study["policy"].path).arms[0], method="ngram", speedup=1.5, batch_size=size)
        for size in (choice.batch_size, choice.batch_size + 1)
    )
    assert "prompt lookup" in speedup_chart(evals, [lookup], choice)
    assert "prompt lookup" not in speedup_chart(evals, [elsewhere], choice)
