"""Every drafting method on one target: acceptance, cost and speedup by depth, with intervals, and how long a run takes.

Runs pipeline `compare-methods` as a user does, for the built-in target or for one of another width, which
`build-builtin-target` makes first or made elsewhere, and records what its policy says.

    python -m benchmarks.compare_methods [--home DIR] [--width 512 [--target FOLDER]] [--prepare] [-p NAME=VALUE ...]

--home keeps what was made there and goes on from it; the record has the seconds that each step took when it was made.
--prepare makes all that is not timed, on a machine as busy as may be, and writes no record.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import ROOT, write_record
from benchmarks.stop_rule import run_pipeline
from components.contract import DepthPolicy, Draft
from components.policy import read_policy
from components.report.pages.methods import Drafter, find_drafters, rounds_of, row_price
from flows.planning.plan import Plan, RunOptions, plan_run
from storage.artifacts.store import Store

PIPELINES = ROOT / "pipelines.yaml"
SHAPES = {512: {"hidden_size": 512, "intermediate_size": 1536, "num_layers": 8, "num_heads": 8}}
"""Targets of another width than the built-in one."""
SHAPE = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
SPEEDS = ("speedup_pred", "pred_lo", "pred_hi", "speedup_meas", "meas_lo", "meas_hi")
COSTS = ("t_target_ms", "t_verify_ms", "t_draft_ms", "cost_ratio")
AT_DEPTH = ("depth_k", "al", "al_lo", "al_hi", *COSTS, *SPEEDS, "al_meas")


def target_of_width(home: Path, width: int, steps: int) -> Path:
    """The folder of a target of that width, trained in `steps` steps, the last quarter with a falling learning rate."""
    params = [f"{name}={value}" for name, value in SHAPES[width].items()]
    params += [f"train_steps={steps}", f"decay_steps={steps // 4}"]
    run_pipeline(home, "build-builtin-target", params, file=PIPELINES)
    plan, store = plan_run("build-builtin-target", params, RunOptions(file=PIPELINES, home=home))
    return store.path_of(plan.step("target").key)


def method_facts(drafter: Drafter, policy: DepthPolicy) -> dict[str, Any]:
    """What the record says of one method."""
    price = row_price(drafter.evals, rounds_of(drafter, read_policy(policy.path).rounds))
    speeds = drafter.speedups()
    return {
        "method": drafter.name,
        "parameters": drafter.parameters,
        "training_minutes": drafter.minutes,
        "chosen": {name: value for name, value in asdict(drafter.choice).items() if name != "draft_key"},
        "shown_depth": drafter.at_shown_depth().depth_k,
        "shown": {name: getattr(speeds, name) for name in SPEEDS},
        "row_of_verification": None
        if price is None
        else {
            "depth_k": price.depth.depth_k,
            "measured": price.measured,
            "break_even": [price.break_even, price.break_even_lo, price.break_even_hi],
            "outcome": price.outcome(),
        },
        "depths": [{name: getattr(row, name) for name in AT_DEPTH} for row in drafter.evals],
    }


def main() -> None:
    """Run the pipeline as a user does, and record its policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--home", type=Path, help="a folder to keep (default: a temporary one)")
    parser.add_argument("--width", type=int, choices=sorted(SHAPES), help="train a target of this width first")
    parser.add_argument("--target-steps", type=int, default=600, help="its optimiser steps")
    parser.add_argument("--target", type=Path, help="the target of that width, made elsewhere, say on a GPU")
    parser.add_argument("--prepare", action="store_true", help="up to acceptance only; needs --home")
    parser.add_argument("-p", action="append", default=[], metavar="NAME=VALUE", help="a parameter of the pipeline")
    options = parser.parse_args()
    if options.prepare and not options.home:
        parser.error("--prepare needs --home, where it leaves what it made")
    home = options.home or Path(tempfile.mkdtemp(prefix="compare-methods-"))
    params, name = list(options.p), "compare-methods"
    if options.width:
        params.append(f"model={options.target or target_of_width(home, options.width, options.target_steps)}")
        name += f"-{options.width}"
    plan, store = plan_run("compare-methods", params, RunOptions(file=PIPELINES, home=home))
    run_pipeline(home, "compare-methods", params, file=PIPELINES, to="acceptance" if options.prepare else "")
    if not options.prepare:
        write_record(name, {"target": target_facts(params), **results(plan, store)})


def target_facts(params: Sequence[str]) -> dict[str, Any]:
    """What the record says of a target that `build-builtin-target` made: its shape and how it was trained."""
    given = [Path(value) for name, _, value in (param.partition("=") for param in params) if name == "model"]
    if not given:
        return {"model": "builtin"}
    config = json.loads((given[-1] / "config.json").read_text(encoding="utf-8"))
    lines = (given[-1] / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {**{name: config[name] for name in SHAPE}, "training": json.loads(lines[-1])}


def results(plan: Plan, store: Store) -> dict[str, Any]:
    """What the record says of a finished run: every method, and the seconds that each step took when it was made."""
    artifacts = {step.name: artifact for step in plan.steps if (artifact := store.get(step.key))}
    policy = artifacts["verdict"]
    assert isinstance(policy, DepthPolicy)
    drafts = [artifact for artifact in artifacts.values() if isinstance(artifact, Draft)]
    seconds = {step.name: store.record_of(step.key)["record"]["seconds"] for step in plan.steps}
    return {
        "params": {name: value for name, value in plan.params.items() if name != "model"},
        "seconds": seconds,
        "measured_beside": {
            name: artifacts[name].info.get("load_average") for name in ("step_cost", "end_to_end", "stops")
        },
        "minutes": sum(seconds.values()) / 60,
        "verdict": dict(policy.info),
        "methods": [method_facts(drafter, policy) for drafter in find_drafters(drafts, policy)],
        "stops": [asdict(stop) for stop in read_policy(policy.path).stops],
    }


if __name__ == "__main__":
    main()
