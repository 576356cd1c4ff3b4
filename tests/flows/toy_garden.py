"""A pipeline of toy steps, and where they are found."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("components", "toybox")
GARDEN = """\
pipelines:
  garden:
    about: Toys.
    params:
      steps: {type: int, default: 6, min: 1, max: 1000, about: Steps.}
      pause: {type: float, default: 0.0, min: 0}
      sunny: {type: bool, default: true}
    steps:
      corpus: {uses: toys.plant, with: {num_rows: 5}}
      draft:
        uses: toys.grow
        in: {corpus: corpus}
        matrix: {method: [fern, moss]}
        with: {method: "${matrix.method}", num_steps: "${params.steps}", pause_s: "${params.pause}"}
      judged: {uses: toys.judge, in: {draft: draft, corpus: corpus}}
      timed: {uses: toys.measure, in: {draft: draft}}
      page: {uses: toys.judge_all, in: {judged: judged}}
"""

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
    "flows.execution.engine.run_plan(plan, store)\n"
)
