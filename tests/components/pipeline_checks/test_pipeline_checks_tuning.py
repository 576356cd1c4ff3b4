"""A step that contradicts the tuning it takes is refused before anything runs, in one line; one that agrees is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from pipeline_builder import step
from usual_pipeline import USUAL

from components.contract import UserError
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec


def check(tmp_path: Path, tuned: str = "target", dtype: str = "bfloat16", threads: int = 0, seconds: float = 0) -> None:
    drafts = USUAL.up_to("cost").with_step_keys("draft", {"matrix": {"method": ["eagle3", "mtp"]}})
    tuned_cost = (
        drafts.with_setting("draft", method="${matrix.method}")
        .with_inputs("cost", tuning="tuning")
        .with_setting("cost", dtype=dtype, num_threads=threads)
        .with_steps(
            other=step("targets.load_target", model="builtin", dtype="bfloat16"),
            tuning=step("bench.autotune", "prompts", {"target": tuned}, dtype="bfloat16", seconds=seconds),
        )
    )
    file = tmp_path / "pipelines.yaml"
    file.write_text(tuned_cost.text)
    check_spec(load_spec(file), outside=lambda name: "Draft")


def test_one_that_agrees_is_right(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "line", "said"),
    [
        ({"dtype": "float32"}, 17, "dtype is float32, and 'tuning' chooses for bfloat16: give both the same"),
        ({"threads": 1}, 17, "'tuning' chooses the threads: leave num_threads out, or the input 'tuning'"),
        ({"tuned": "other"}, 16, "it measures 'target', and 'tuning' chooses for 'other': give each its own"),
    ],
)
def test_one_that_contradicts_costs_one_line_at_its_place(
    changes: dict[str, object], line: int, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as error:
        check(tmp_path, **changes)  # type: ignore[arg-type]
    (told,) = str(error.value).splitlines()
    assert f"pipelines.yaml:{line}: step 'cost': {said}" in told


def test_a_tuning_whose_settings_are_wrong_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pipelines\.yaml:19: step 'tuning': .*seconds"):
        check(tmp_path, dtype="float32", seconds=-1)
