"""What tests of flows share: a pipeline of toy steps, where they are found, programs to be killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil
from pipeline_builder import pipeline, step

from flows.execution.engine import Engine
from flows.planning.plan import RunOptions, plan_run
from flows.services.supervisor import is_dead

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("components", "toybox")
Cli = Callable[..., tuple[int, str, str]]
"""The command line in this process: (exit code, stdout, stderr)."""
GARDEN = pipeline(
    "garden",
    {
        "steps": {"type": "int", "default": 6, "min": 1, "max": 1000, "about": "Steps."},
        "pause": {"type": "float", "default": 0.0, "min": 0},
        "sunny": {"type": "bool", "default": True},
    },
    keys={"about": "Toys."},
    corpus=step("toys.plant", num_rows=5),
    draft=step(
        "toys.grow",
        "corpus",
        keys={"matrix": {"method": ["fern", "moss"]}},
        method="${matrix.method}",
        num_steps="${params.steps}",
        pause_s="${params.pause}",
    ),
    judged=step("toys.judge", "draft", "corpus"),
    timed=step("toys.measure", "draft"),
    page=step("toys.judge_all", "judged"),
)

# Programs to be killed: the command line, or a run of the engine alone. Nothing heavy is preloaded.
LIGHT = (
    "import sys\nimport flows.execution.engine\nfrom pathlib import Path\n"
    "flows.execution.engine.Engine.__init__.__kwdefaults__['preload'] = ()\n"
)
COMMAND_LINE = f"{LIGHT}from flows import cli\nsys.exit(cli.main(packages={PACKAGES!r}))\n"
ENGINE_ALONE = (
    f"{LIGHT}from flows.planning.plan import RunOptions, plan_run\n"
    f"options = RunOptions(file=Path(sys.argv[2]), device='cpu', packages={PACKAGES!r})\n"
    "plan, store = plan_run(sys.argv[1], {}, options)\n"
    "flows.execution.engine.Engine(store, plan).run()\n"
)


def gone(pid: int, within: float = 10.0) -> bool:
    """Whether a process ends in time (a zombie has ended)."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if is_dead(psutil.Process(pid)):
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.02)
    return False


def grow(file: Path, **params: object) -> None:
    """Run the garden of a file with the engine alone, without any process that has loaded something heavy."""
    plan, store = plan_run("garden", params, RunOptions(file=file, device="cpu", packages=PACKAGES))
    Engine(store, plan, num_threads=1, preload=()).run()
