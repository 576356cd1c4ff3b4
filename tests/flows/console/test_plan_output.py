"""The drawing of a plan shows every step and what feeds it."""

from __future__ import annotations

from collections.abc import Callable

from flows.console.plan_output import as_mermaid
from flows.planning.plan import Plan


def test_the_drawing_has_every_step_and_edge(plan_of: Callable[..., Plan]) -> None:
    plan = plan_of()
    drawing = as_mermaid(plan)
    assert drawing.startswith("flowchart LR")
    assert drawing.count(" --> ") == sum(len(step.input_names()) for step in plan.steps)
    assert all(f'"{step.name}<br/>' in drawing for step in plan.steps)
