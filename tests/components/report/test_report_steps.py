"""The steps of reports hand each of their settings to the implementation, which states no default of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from components.report import steps
from components.report.pages import drafter, languages, methods

IMPLEMENTATIONS = [
    (steps.write_page, drafter.write_page),
    (steps.compare_languages, languages.compare_languages),
    (steps.compare_methods, methods.compare_methods),
]


@pytest.mark.parametrize(("step", "implementation"), IMPLEMENTATIONS)
def test_a_step_and_its_implementation_take_the_same(
    step: Callable[..., Any], implementation: Callable[..., Any]
) -> None:
    there = inspect.signature(implementation).parameters.values()
    assert [one.name for one in inspect.signature(step).parameters.values()] == [one.name for one in there]
    assert [one.name for one in there if one.default is not inspect.Parameter.empty] == []
