"""The steps of publishing hand each of their settings to the implementation, which states no default of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from components.publish import steps
from components.publish.release import dry_run, export, upload

IMPLEMENTATIONS = [
    (steps.try_release, dry_run.try_release),
    (steps.export_release, export.export_release),
    (steps.upload_release, upload.upload_release),
]


@pytest.mark.parametrize(("step", "implementation"), IMPLEMENTATIONS)
def test_a_step_and_its_implementation_take_the_same(
    step: Callable[..., Any], implementation: Callable[..., Any]
) -> None:
    there = inspect.signature(implementation).parameters.values()
    assert [one.name for one in inspect.signature(step).parameters.values()] == [one.name for one in there]
    assert [one.name for one in there if one.default is not inspect.Parameter.empty] == []
