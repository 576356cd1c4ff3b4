"""Every step of the room hands all of its settings to an implementation, which has no defaults of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from components.targets import config, steps
from components.targets.pretraining import pretrain


@pytest.mark.parametrize(
    ("step", "work"),
    [(steps.load_target, config.load_target), (steps.pretrain_target, pretrain.pretrain_target)],
)
def test_a_step_and_its_work_take_the_same(step: Callable[..., Any], work: Callable[..., Any]) -> None:
    parameters = inspect.signature(work).parameters
    assert [*parameters] == [*inspect.signature(step).parameters]
    assert all(parameter.default is inspect.Parameter.empty for parameter in parameters.values())
