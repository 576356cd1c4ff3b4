"""What serving engines did with a drafter stands in the promotion gate and beside our own numbers in the history."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.rows import EngineComparison
from components.speedup.comparison.promotion_rule import judge
from storage.history.query import run_named_query
from storage.history.write import record_artifact
from storage.registry.promotion_gate import decide

TAGS = {"draftsmith.draft_key": "new", "draftsmith.depth_k": "3", "gate.status": "passed", "gate.checks": "[]"}


def compared(verdict: str, engine: str = "vllm", draft: str = "new", workload: str = "all") -> EngineComparison:
    counts = (8, 8, 8, 0, 0, 8, 0, 100, 180, 100, 180)
    numbers = (1.8, 1.8, 1.75, 1.2, 1.3, 1.25, 0.02)
    return EngineComparison(
        "s", "t", draft, "eagle3", 3, workload, engine, "1.0", 1, *counts, "maps", *numbers, verdict
    )


def test_an_engine_mismatch_blocks_promotion_until_it_is_measured_mended(home: Path, make: Any) -> None:
    assert [check.name for check in decide(home, TAGS, None, None, judge).checks] == ["own_gate"]
    record_artifact(home, make("a", rows=[compared("mismatch"), compared("equal", "llama.cpp")]).path)
    decision = decide(home, TAGS, None, None, judge)
    assert not decision.passed and decision.refusal().startswith(
        "engine runs that differ from our own decoding: measured 1, asked 0 of"
    )
    assert "vllm 1.0" in decision.refusal() and "llama.cpp" not in decision.refusal()
    record_artifact(home, make("b", rows=[compared("close")]).path)
    assert decide(home, TAGS, None, None, judge).passed


@pytest.mark.parametrize("verdicts", [("equal", "mismatch"), ("mismatch", "equal")])
def test_any_mismatch_among_the_rows_of_one_comparison_blocks(home: Path, make: Any, verdicts: tuple[str, str]) -> None:
    record_artifact(home, make("a", rows=[compared(verdict) for verdict in verdicts]).path)
    assert not decide(home, TAGS, None, None, judge).passed


def test_a_newer_run_that_compared_nothing_does_not_clear_a_mismatch(home: Path, make: Any) -> None:
    record_artifact(home, make("a", rows=[compared("mismatch")]).path)
    record_artifact(home, make("b", rows=[compared("not_compared")]).path)
    assert not decide(home, TAGS, None, None, judge).passed


@pytest.mark.parametrize("other", [compared("mismatch", draft="old"), compared("mismatch", workload="code")])
def test_other_drafters_and_single_workloads_do_not_block(home: Path, make: Any, other: EngineComparison) -> None:
    record_artifact(home, make("a", rows=[other, compared("equal")]).path)
    assert decide(home, TAGS, None, None, judge).passed


def test_predicted_ours_and_the_engine_stand_side_by_side(home: Path, make: Any) -> None:
    record_artifact(home, make("a", rows=[compared("equal"), compared("equal", workload="code")]).path)
    names, rows = run_named_query(home, "engines_beside_ours", {})
    (row,) = (dict(zip(names, one, strict=True)) for one in rows)
    assert (row["al_pred"], row["al_ours"], row["al_engine"]) == (1.75, 1.8, 1.8)
    assert (row["speedup_pred"], row["speedup_ours"], row["speedup_engine"]) == (1.25, 1.3, 1.2)
    assert (row["verdict"], row["num_identical"], row["num_compared"]) == ("equal", 8, 8)
    assert len(run_named_query(home, "engines_beside_ours", {"workload": ""})[1]) == 2
