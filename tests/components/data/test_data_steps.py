"""The signatures of the steps: every setting is explained, and each step hands all of them to its implementation."""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from components import data
from components.data import steps

STEPS: dict[str, Callable[..., Any]] = {
    name: step for name, step in vars(data).items() if inspect.isfunction(step) and step.__module__ == steps.__name__
}


def implementation_of(step: Callable[..., Any]) -> Callable[..., Any]:
    """The function that a step imports when it runs."""
    (imported,) = [node for node in ast.walk(ast.parse(inspect.getsource(step))) if isinstance(node, ast.ImportFrom)]
    implementation: Callable[..., Any] = getattr(importlib.import_module(str(imported.module)), imported.names[0].name)
    return implementation


@pytest.mark.parametrize("name", sorted(STEPS))
def test_a_step_has_the_parameters_of_its_implementation(name: str) -> None:
    declared = inspect.signature(STEPS[name]).parameters
    implemented = inspect.signature(implementation_of(STEPS[name])).parameters
    assert list(declared) == list(implemented)
    assert all(parameter.default is inspect.Parameter.empty for parameter in implemented.values())


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_setting_is_explained(name: str) -> None:
    doc = inspect.getdoc(STEPS[name]) or ""
    for parameter in inspect.signature(STEPS[name]).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and parameter.name != "ctx":
            assert f"\n    {parameter.name}: " in doc


def test_reading_the_signatures_loads_nothing_heavy() -> None:
    heavy = "torch transformers datasets numpy pyarrow httpx duckdb prefect mlflow"
    code = f"import sys, components.data; print(*sorted(set('{heavy}'.split()) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
