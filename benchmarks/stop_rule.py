"""What ending chains by confidence gains over the best fixed depth, on trained drafters, at batch sizes 1, 4 and 16.

stop_rule.yaml trains drafters for the built-in target, fits a rule for each and batch size to acceptance maps and the
costs of a round, and decodes the same prompts in turns: plainly, at the best fixed depth, by the rule, and by a single
threshold (`p_min`). Everything is run once; the record has what this run says.

    python -m benchmarks.stop_rule [--work DIR] [--prepare | --small] [--train-steps 450] [--stop-seconds 240]

--work keeps what was made there and goes on from it. --prepare makes all that is not timed, on a machine as busy as may
be, and writes no record; the timings then take seven minutes. --small tries it all on little, and prints what a record
would hold.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.record import ROOT, write_record
from components.policy import read_policy
from flows.planning.plan import RunOptions, plan_run

PIPELINE = Path(__file__).with_suffix(".yaml")
SMALL = ["train_steps=40", "num_prompts=96", "num_test_prompts=16", "cost_seconds=15", "stop_seconds=15"]
LEFT_OUT = ("draft_key", "calibration", "draft_from", "verify_from")
"""Names of one store, and the rules themselves."""


def run_pipeline(home: Path, name: str, params: Sequence[str], *, file: Path, to: str = "") -> None:
    """Run a pipeline of `file` as a user does, up to the step `to`, "" for all of it."""
    program = Path(sys.executable).with_name("draftsmith")
    command = [str(program), "run", name, "--direct", "--file", str(file)]
    command += [word for param in params for word in ("-p", param)]
    command += ["--to", to] if to else []
    environment = {**os.environ, "DRAFTSMITH_HOME": str(home)}
    if subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0:
        raise SystemExit(f"{name}: the pipeline failed, its own message is above")


def main() -> None:
    """Run the pipeline as a user does, and record its rules."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="a folder to keep (default: a temporary one)")
    parser.add_argument("--train-steps", type=int, default=450)
    parser.add_argument("--stop-seconds", type=float, default=240.0)
    parser.add_argument("--prepare", action="store_true", help="train and map acceptance only; needs --work")
    parser.add_argument("--small", action="store_true", help="a few steps and seconds; no record")
    options = parser.parse_args()
    if options.prepare and not options.work:
        parser.error("--prepare needs --work, where it leaves what it made")
    home = options.work or Path(tempfile.mkdtemp(prefix="stop-rule-"))
    params = [f"train_steps={options.train_steps}", f"stop_seconds={options.stop_seconds}"]
    params = SMALL if options.small else params
    run_pipeline(home, "stop-rule", params, file=PIPELINE, to="acceptance" if options.prepare else "")
    if options.prepare:
        return
    plan, store = plan_run("stop-rule", params, RunOptions(file=PIPELINE, home=home))
    keys = {step.name: step.key for step in plan.steps}
    measured, verdict = store.get(keys["stops"]), store.get(keys["verdict"])
    rules = [asdict(stop) for stop in read_policy(verdict.path).stops]
    facts = {
        name: measured.info[name]
        for name in ("ended", "num_threads", "kernel", "load_average")
        if name in measured.info
    }
    rows = [{name: value for name, value in rule.items() if name not in LEFT_OUT} for rule in rules]
    record = {"train_steps": options.train_steps, **facts, "rows": rows}
    if options.small:
        print(json.dumps(record, indent=1))
    else:
        write_record("stop-rule", record)


if __name__ == "__main__":
    main()
