"""A step hands all of its settings to its implementation, which states no default of its own."""

from __future__ import annotations

import ast
import importlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOMS = sorted(file.parent.name for file in Path(__file__).resolve().parents[2].glob("components/*/steps.py"))
STEPS: dict[str, Callable[..., Any]] = {
    f"{room}.{name}": step
    for room in ROOMS
    for name, step in vars(importlib.import_module(f"components.{room}")).items()
    if inspect.isfunction(step) and step.__module__ == f"components.{room}.steps"
}


def implementation_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a step imports when it runs."""
    (imported,) = [node for node in ast.walk(ast.parse(inspect.getsource(step))) if isinstance(node, ast.ImportFrom)]
    implementation: Callable[..., Any] = getattr(importlib.import_module(str(imported.module)), imported.names[0].name)
    return implementation


@pytest.mark.parametrize("address", sorted(STEPS))
def test_a_step_has_the_parameters_of_its_implementation(address: str) -> None:
    declared = inspect.signature(STEPS[address]).parameters
    implemented = inspect.signature(implementation_of(STEPS[address])).parameters
    assert list(declared) == list(implemented)
    assert all(parameter.default is inspect.Parameter.empty for parameter in implemented.values())


HANDING_ON = ("bench.", "data.", "publish.", "speedup.")


@pytest.mark.parametrize("address", sorted(name for name in STEPS if name.startswith(HANDING_ON)))
def test_a_step_hands_on_what_its_implementation_takes(address: str) -> None:
    step = STEPS[address]
    assert typing.get_type_hints(step) == typing.get_type_hints(implementation_of(step))


def test_every_room_has_its_steps() -> None:
    assert {address.partition(".")[0] for address in STEPS} == {*ROOMS} and len(STEPS) >= 35
