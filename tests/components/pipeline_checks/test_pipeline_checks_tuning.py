"""A step that contradicts the tuning it takes is refused before anything runs, in one line; one that agrees is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.contract import UserError
from flows.planning.wiring import check_spec
from flows.spec.schema import load_spec

PIPELINE = """\
pipelines:
  p:
    steps:
      target:  {{uses: targets.load_target, with: {{model: builtin}}}}
      other:   {{uses: targets.load_target, with: {{model: builtin, dtype: bfloat16}}}}
      prompts: {{uses: data.collect_prompts, with: {{source: python-stdlib}}}}
      answers: {{uses: data.write_answers, in: {{target: target, prompts: prompts}}}}
      features: {{uses: data.record_features, in: {{target: target, answers: answers}}}}
      draft:
        uses: drafts.train_draft
        in: {{target: target, features: features}}
        matrix: {{method: [eagle3, mtp]}}
        with: {{method: "${{matrix.method}}"}}
      tuning:
        uses: bench.autotune
        in: {{target: {tuned}, prompts: prompts}}
        with: {{dtype: bfloat16, seconds: {seconds}}}
      cost:
        uses: bench.measure_step_cost
        in: {{target: target, drafts: draft, prompts: prompts, tuning: tuning}}
        with: {{dtype: {dtype}, num_threads: {threads}}}
"""


def check(tmp_path: Path, tuned: str = "target", dtype: str = "bfloat16", threads: int = 0, seconds: float = 0) -> None:
    file = tmp_path / "pipelines.yaml"
    file.write_text(PIPELINE.format(tuned=tuned, dtype=dtype, threads=threads, seconds=seconds))
    check_spec(load_spec(file), outside=lambda name: "Draft")


def test_one_that_agrees_is_right(tmp_path: Path) -> None:
    check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "line", "said"),
    [
        ({"dtype": "float32"}, 21, "dtype is float32, and 'tuning' chooses for bfloat16: give both the same"),
        ({"threads": 1}, 21, "'tuning' chooses the threads: leave num_threads out, or the input 'tuning'"),
        ({"tuned": "other"}, 20, "it measures 'target', and 'tuning' chooses for 'other': give each its own"),
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
    with pytest.raises(UserError, match=r"pipelines\.yaml:17: step 'tuning': .*seconds"):
        check(tmp_path, dtype="float32", seconds=-1)
