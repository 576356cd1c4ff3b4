"""check and plan: what is right, what would run and why."""

from __future__ import annotations

from pathlib import Path

from toy_garden import PACKAGES, Cli, grow

from flows.execution.engine import Engine
from flows.planning.plan import RunOptions, plan_run


def test_check_says_what_it_has_read(file: Path, draftsmith: Cli) -> None:
    assert draftsmith("check", "-f", file) == (0, "pipelines.yaml is right: garden (8 steps)\n", "")


def test_plan_prints_every_step_with_its_reason(file: Path, draftsmith: Cli) -> None:
    grow(file)
    code, out, err = draftsmith("plan", "garden", "-f", file, "-p", "steps=7")
    assert (code, err) == (0, "")
    assert "setting num_steps 6 -> 7" in out
    assert out.splitlines()[-1] == "8 steps: 1 reused, 7 to run on cpu"
    code, out, _ = draftsmith("plan", "garden", "-f", file, "--mermaid")
    assert (code, out.splitlines()[0]) == (0, "flowchart LR")


def test_run_plan_is_the_engine_in_one_call(file: Path, home: Path) -> None:
    plan, store = plan_run("garden", {}, RunOptions(file=file, device="cpu", packages=PACKAGES, to_step="corpus"))
    assert list(Engine(store, plan).run()) == ["corpus"]
