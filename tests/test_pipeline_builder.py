"""The builder of pipelines writes what it was given, line for line, and no change of it is silently without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from pipeline_builder import Pipeline, edited, only, pipeline, step, written
from toy_garden import GARDEN

LINES = """\
pipelines:
  garden:
    about: Toys.
    params:
      steps: {type: int, default: 6, min: 1, max: 1000, about: Steps.}
      pause: {type: float, default: 0.0, min: 0}
      sunny: {type: bool, default: true}
    steps:
      corpus: {uses: toys.plant, with: {num_rows: 5}}
      draft:
        uses: toys.grow
        in: {corpus: corpus}
        matrix: {method: [fern, moss]}
        with: {method: '${matrix.method}', num_steps: '${params.steps}', pause_s: '${params.pause}'}
      judged: {uses: toys.judge, in: {draft: draft, corpus: corpus}}
      timed: {uses: toys.measure, in: {draft: draft}}
      page: {uses: toys.judge_all, in: {judged: judged}}
"""
CHANGES: dict[str, Callable[[Pipeline], object]] = {
    "no step to leave out": lambda it: it.without_step("pgae"),
    "no step to rename": lambda it: it.with_step_named("pgae", "leaf"),
    "no step to replace": lambda it: it.with_other_step("pgae", step("toys.plant")),
    "no step with a function": lambda it: it.with_function("pgae", "toys.plant"),
    "no step with inputs": lambda it: it.with_inputs("pgae", judged="judged"),
    "no step with settings": lambda it: it.with_setting("pgae", title="T"),
    "no step with keys": lambda it: it.with_step_keys("pgae", {"if": "params.sunny"}),
    "no setting to leave out": lambda it: it.without_setting("page", "title"),
    "no parameter to change": lambda it: it.with_param("step", default=3),
    "no parameter to replace": lambda it: it.with_other_param("step", type="int", default=3),
    "no parameter to rename": lambda it: it.with_param_named("step", "steps"),
}


def test_the_lines_of_the_garden_are_these() -> None:
    """Tests of errors name its lines."""
    assert GARDEN.text == LINES


def test_what_is_written_is_what_was_given() -> None:
    values = {"number": 5e-4, "words": ["yes", "on", "a: b", "x\ny", "7"], "nested": {"a": [None, True, -1]}}
    first = pipeline(
        "first", {"n": {"type": "int", "default": 1}}, keys={"overlap": "skip"}, a=step("toys.plant", **values)
    )
    content = yaml.safe_load(written(first, only("toys.hang", keys={"retries": 2})))
    assert content == {
        "pipelines": {
            "first": {
                "overlap": "skip",
                "params": {"n": {"type": "int", "default": 1}},
                "steps": {"a": {"uses": "toys.plant", "with": values}},
            },
            "p": {"steps": {"only": {"uses": "toys.hang", "retries": 2}}},
        }
    }


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_what_is_not_there_is_refused(what: str) -> None:
    with pytest.raises(KeyError, match=r"there is no '(pgae|title|step)' "):
        CHANGES[what](GARDEN)


def test_a_passage_to_edit_stands_once() -> None:
    assert edited("one two", ("one", "1"), ("two", "2")) == "1 2"
    for absent_or_twice in ("three", "o"):
        with pytest.raises(AssertionError, match="times in the text"):
            edited("one two", (absent_or_twice, ""))
