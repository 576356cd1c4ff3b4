"""A pipeline as a Prefect flow: its form enforces what `params:` says, its version follows what it says."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
from pydantic import TypeAdapter, ValidationError

from flows.orchestration.compiled_flow import annotation_of, version_of
from flows.spec.params import ParamSpec
from flows.spec.schema import PipelineSpec


@pytest.mark.parametrize(
    ("param", "good", "bad"),
    [
        (ParamSpec(type="int", default=5, min=1, max=9), [1, 9], [0, 10, "x", 1.5]),
        (ParamSpec(type="float", default=0.5, min=0), [0, 0.5], [-0.1, "x"]),
        (ParamSpec(type="bool", default=False), [True], ["perhaps"]),
        (ParamSpec(type="str", default=""), ["x"], [None, 3]),
        (ParamSpec(type="enum", default="a", choices=["a", "b"]), ["a", "b"], ["c"]),
        (ParamSpec(type="list", default=["a"], choices=["a", "b"], min=1), [["a"], ["a", "b"]], [[], ["c"], "a"]),
    ],
)
def test_the_form_enforces_what_params_says(param, good, bad):
    form = TypeAdapter(annotation_of(param))
    for value in good:
        assert form.validate_python(value) == value
    for value in bad:
        with pytest.raises(ValidationError):
            form.validate_python(value)
    if param.type == "enum":
        assert get_args(annotation_of(param)) == get_args(Literal["a", "b"])


def test_a_flow_has_a_new_version_when_its_pipeline_says_something_else():
    one = PipelineSpec.model_validate({"about": "A.", "steps": {"a": {"uses": "data.collect_prompts"}}})
    other = PipelineSpec.model_validate(
        {"about": "A.", "steps": {"a": {"uses": "data.collect_prompts", "with": {"num_train": 3}}}}
    )
    assert version_of(one) == version_of(one.model_copy(deep=True)) != version_of(other)
