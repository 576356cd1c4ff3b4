"""The steps of the speedup model hand each of their settings to the implementation, which states no default."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from components.speedup import choose, confirm, drift, engine_comparison, languages, steps

IMPLEMENTATIONS = [
    (steps.choose_depth, choose.choose_depth),
    (steps.confirm_depth, confirm.confirm_depth),
    (steps.measure_drift, drift.measure_drift),
    (steps.compare_engines, engine_comparison.compare_engines),
    (steps.measure_languages, languages.measure_languages),
]


@pytest.mark.parametrize(("step", "implementation"), IMPLEMENTATIONS)
def test_a_step_and_its_implementation_take_the_same(
    step: Callable[..., Any], implementation: Callable[..., Any]
) -> None:
    parameters = inspect.signature(implementation).parameters.values()
    assert [p.name for p in inspect.signature(step).parameters.values()] == [p.name for p in parameters]
    assert [p.name for p in parameters if p.default is not inspect.Parameter.empty] == []
