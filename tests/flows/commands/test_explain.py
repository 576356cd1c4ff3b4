"""explain: what steps, methods and pipelines can be told, as the code and pipelines.yaml say it."""

from __future__ import annotations

from pathlib import Path

import pytest
from toy_garden import Cli

from flows.planning.step_signature import resolve, step_addresses


def test_a_step_is_told_with_its_purpose_inputs_and_every_setting(draftsmith: Cli) -> None:
    code, out, err = draftsmith("explain", "drafts.train_draft")
    assert (code, err) == (0, "")
    assert out.startswith("drafts.train_draft makes Draft\n\nTrain a drafter for a target")
    assert "  features: Features, optional\n      its hidden states over its own answers" in out
    assert "  num_steps: int, at least 1 = 400\n      optimiser steps.\n" in out
    step = resolve("drafts.train_draft")
    assert [name for name in step.setting_names if f"\n  {name}: " not in out] == []
    assert "model: text, must be given" in draftsmith("explain", "drafts.import_draft")[1], "one without a default"
    assert "drafts.train_draft makes Draft" in draftsmith("explain", "train_draft")[1], "the room may be left out"


def test_a_method_and_a_pipeline_are_told_too(draftsmith: Cli, file: Path) -> None:
    code, out, _ = draftsmith("explain", "eagle3")
    assert code == 0 and "\nsettings: {eagle3: ...} of drafts.train_draft\n" in out and "\n  ttt_steps: int, " in out
    code, out, _ = draftsmith("explain", "garden", "-f", file)
    assert code == 0 and out.startswith("garden: Toys.\n")
    assert (
        "  steps: int, 1 to 1000 = 6\n      Steps.\n  pause: float, at least 0 = 0.0\n  sunny: true or false = true\n"
        in out
    )
    assert "  timed: toys.measure\n" in out


def test_without_a_name_every_step_is_listed(draftsmith: Cli) -> None:
    code, out, _ = draftsmith("explain")
    listed = [line.split(": ")[0] for line in out.splitlines() if not line.startswith(" ")]
    assert code == 0 and set(step_addresses()) <= set(listed) and "toys.grow" in listed


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("drafts.train_darft", "drafts.train_draft"),
        ("trian_draft", "train_draft"),
        ("eagel3", "eagle3"),
        ("gardne", "garden"),
    ],
)
def test_a_mistyped_name_gets_its_neighbour(draftsmith: Cli, file: Path, name: str, near: str) -> None:
    code, out, err = draftsmith("explain", name, "-f", file)
    assert (code, out) == (2, "")
    assert err.startswith(f"explain {name}: no step, method or pipeline has this name (did you mean '{near}'?); ")


def test_an_explanation_needs_no_pipelines_file(
    draftsmith: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert draftsmith("explain", "bench.autotune")[0] == 0
    code, _, err = draftsmith("explain", "no-such-thing")
    assert code == 2 and "no step, method or pipeline has this name" in err
