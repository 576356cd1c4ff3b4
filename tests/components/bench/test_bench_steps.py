"""Every step of the room hands all of its settings to an implementation, which has no defaults of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from components.bench import calibration, steps
from components.bench.acceptance import measure as acceptance
from components.bench.cost import measure as cost
from components.bench.end_to_end import compare
from components.bench.engines import llama_cpp, server

WORK: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (steps.measure_acceptance, acceptance.measure_acceptance),
    (steps.autotune, calibration.autotune),
    (steps.measure_step_cost, cost.measure_step_cost),
    (steps.compare_end_to_end, compare.compare_end_to_end),
    (steps.measure_llama_cpp, llama_cpp.measure_llama_cpp),
    (steps.measure_server, server.measure_server),
]


@pytest.mark.parametrize(("step", "work"), WORK, ids=lambda function: f"{function.__module__}")
def test_a_step_and_its_work_take_the_same(step: Callable[..., Any], work: Callable[..., Any]) -> None:
    parameters = inspect.signature(work).parameters
    assert [*parameters] == [*inspect.signature(step).parameters]
    assert all(parameter.default is inspect.Parameter.empty for parameter in parameters.values())
