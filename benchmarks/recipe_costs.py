"""What `draftsmith plan --on` says of every recipe: the table of costs of docs/recipes.md, which this writes anew.

    python -m benchmarks.recipe_costs

Nothing of it is measured: without a home's own history it is the planner's arithmetic at its default efficiencies.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.record import ROOT
from benchmarks.tables import markdown
from flows.commands.plan_on import estimate_run
from flows.planning.estimate import NOT_COUNTED
from flows.planning.machines import find_machine
from flows.planning.workload import in_bytes
from flows.spec.schema import load_spec
from storage.artifacts.store import Store

FILE = ROOT / "recipes" / "pipelines.yaml"
PAGE = ROOT / "docs" / "recipes.md"
BEGIN, END = "<!-- costs: begin -->", "<!-- costs: end -->"
MACHINES = {"gpu-drafters": ("h100", 3), "served-drafters": ("h100x8", 24), "native-mtp": ("b300x8", 48)}
"""Recipe -> the machine that it is planned for, and the assumed price of its hour."""
HEAD = ("target", "machine", "hours", "answers", "training", "disk", "network", "cost")
CASES = [
    (name, str(model)) for name, made in load_spec(FILE).pipelines.items() for model in made.params["model"].choices
]


def cells(recipe: str, model: str) -> tuple[str, ...]:
    """The row of a recipe and a target that it offers."""
    name, price = MACHINES[recipe]
    with tempfile.TemporaryDirectory() as home:
        run = estimate_run(
            recipe, [f"model={model}"], find_machine(name, FILE), FILE, Store(Path(home)), ("components",)
        )
    assert not run.faults, f"{recipe} of {model} does not fit {name}: {run.faults}"
    hours = {
        kind: sum(step.seconds for step in run.steps if step.kind == kind) / 3600 for kind in ("serving", "training")
    }
    least = "at least " if any(step.seconds_by == NOT_COUNTED for step in run.steps) else ""
    training = f"{hours['training']:.1f}" if hours["training"] else "not counted"
    total = run.seconds / 3600
    sizes = (in_bytes(run.disk), in_bytes(run.network))
    return (
        f"`{model}`",
        f"`{name}`",
        f"{least}{total:.1f}",
        f"{hours['serving']:.1f}",
        training,
        *sizes,
        f"{least}{price * total:,.0f}",
    )


def main() -> None:
    """Write the table into the page."""
    before, after = (PAGE.read_text(encoding="utf-8").split(mark) for mark in (BEGIN, END))
    table = markdown(HEAD, [cells(*case) for case in CASES])
    PAGE.write_text(f"{before[0]}{BEGIN}\n\n{table}\n\n{END}{after[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
