"""One complete measurement of finished drafters, as a pipeline makes it: tuning, costs, choice, end to end, verdict.

    python -m benchmarks.one_measurement HOME SETTINGS FOLDER

SETTINGS is JSON: {"cost": settings of measure_step_cost, "measure": settings of compare_end_to_end, "dtype": of the
others, "seed"}.
Everything is written below FOLDER; the last line on stdout is one JSON object with the decision and every arm.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.bench import calibration as autotune
from components.bench import compare_end_to_end, measure_acceptance, measure_step_cost
from components.contract import Context, Draft, Measurements, Prompts, Target
from components.machine import describe_machine, num_usable_cores
from components.policy import read_policy
from components.rows import ALL, CostCell, Request, read_rows
from components.speedup import choose_depth, confirm_depth
from storage.artifacts.store import Store


class Subject:
    """The target, drafters and prompts of a finished quickstart."""

    def __init__(self, home: Path) -> None:
        found: dict[str, list[Any]] = {}
        store = Store(home)
        for artifact in map(store.get, store.keys()):
            found.setdefault(type(artifact).__name__, []).append(artifact)
        self.drafts: list[Draft] = sorted(found["Draft"], key=lambda draft: str(draft.info["method"]))
        target_key = str(self.drafts[0].info["target_key"])
        self.target: Target = next(target for target in found["Target"] if target.key == target_key)
        self.prompts: Prompts = found["Prompts"][-1]


def measure(subject: Subject, settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The whole decision, with what each part took in seconds."""
    machine, took, begun = describe_machine("cpu"), {}, time.monotonic()

    def context(name: str) -> Context:
        for part in ("out", "scratch"):
            (folder / name / part).mkdir(parents=True, exist_ok=True)
        places = {"out": folder / name / "out", "scratch": folder / name / "scratch"}
        key = f"{settings['seed']:08d}{name}".ljust(64, "0")
        return Context(key=key, **places, seed=settings["seed"], num_threads=num_usable_cores(), send=say)

    def say(event: Any) -> None:
        if event["event"] == "note":
            print(f"{time.monotonic() - begun:7.1f} s  {event['message']}", flush=True)

    def done(name: str) -> None:
        took[name] = round(time.monotonic() - begun - sum(took.values()), 1)

    dtype, target, prompts, drafts = settings["dtype"], subject.target, subject.prompts, subject.drafts
    acceptance: list[Measurements] = [
        measure_acceptance(target, draft, prompts, dtype=dtype, ctx=context(f"acceptance-{draft.key[:8]}"))
        for draft in drafts
    ]
    done("acceptance")
    tuning = autotune(target, prompts, drafts, dtype=dtype, ctx=context("tuning"), machine=machine)
    done("tuning")
    cost = measure_step_cost(target, drafts, prompts, tuning, **settings["cost"], ctx=context("cost"), machine=machine)
    done("cost")
    policy = choose_depth(acceptance, [cost], ctx=context("depth"))
    done("depth")
    end_to_end = compare_end_to_end(
        target,
        drafts,
        prompts,
        policy,
        tuning,
        **settings["measure"],
        ctx=context("end_to_end"),
        machine=machine,
    )
    done("end_to_end")
    verdict = confirm_depth(policy, end_to_end, ctx=context("verdict"))
    done("verdict")
    return {**decision_of(verdict, policy, cost, end_to_end), "seconds": took}


def decision_of(verdict: Any, policy: Any, cost: Measurements, end_to_end: Measurements) -> dict[str, Any]:
    """The decision, every arm with what was predicted and measured, and what is needed to pool several runs."""
    confirmed, chosen = read_policy(verdict.path), read_policy(policy.path)
    requests = [row for row in read_rows(end_to_end.path, Request) if row.batch_size == 1]
    arms = [
        {
            **scatter_of(requests, arm.draft_key, arm.method, arm.depth_k),
            "method": arm.method,
            "depth_k": arm.depth_k,
            "measured": arm.speedup,
            "lo": arm.lo,
            "hi": arm.hi,
            "predicted": arm.speedup_pred,
            "num_prompts": arm.num_prompts,
        }
        for arm in confirmed.arms
        if arm.workload == ALL
    ]
    predicted = [
        {
            "method": row.method,
            "depth_k": row.depth_k,
            "predicted": row.speedup_pred,
            "lo": row.pred_lo,
            "hi": row.pred_hi,
        }
        for row in chosen.evals
        if row.workload == ALL and row.depth_k
    ]
    return {
        "verdict": confirmed.verdict,
        "winner": asdict(confirmed.winner) if confirmed.winner else None,
        "reasons": confirmed.reasons,
        "gate": asdict(confirmed.gate) if confirmed.gate else None,
        "arms": arms,
        "predicted": predicted,
        "load_average": os.getloadavg()[0],
        "num_cost_cells": len(read_rows(cost.path, CostCell)),
        "num_requests": len(requests),
        "tuning": {name: end_to_end.info[name] for name in ("kernel", "num_threads")},
        "ended": [cost.info["ended"], end_to_end.info["ended"]],
    }


def scatter_of(requests: list[Request], draft_key: str, method: str, depth: int) -> dict[str, Any]:
    """by_process: log of a plain round over the arm's in each process; sd_prompts: what prompts do to the mean.

    Processes decode different prompts, so that a round is held against a round, whatever it keeps; what prompts do is
    the standard error of the log acceptance length over them, each prompt counted once.
    """
    by_process, lengths = [], {}
    for process in sorted({row.process for row in requests}):
        mine = [row for row in requests if row.process == process]
        arm = [row for row in mine if (row.draft_key, row.method, row.depth_k) == (draft_key, method, depth)]
        prompts = {row.prompt_id for row in arm}
        plain = [row for row in mine if row.method == "none" and row.prompt_id in prompts]
        if arm:
            a_round = sum(row.decode_ns for row in arm) / sum(row.num_rounds for row in arm)
            a_plain_step = sum(row.decode_ns for row in plain) / sum(row.timed_tokens for row in plain)
            by_process.append(math.log(a_plain_step / a_round))
        lengths |= {row.prompt_id: (row.timed_tokens, row.num_rounds) for row in arm if row.num_rounds}
    tokens, rounds = sum(t for t, _ in lengths.values()), sum(r for _, r in lengths.values())
    pulls = [t / tokens - r / rounds for t, r in lengths.values()] if rounds else []
    return {"by_process": by_process, "sd_prompts": math.sqrt(sum(pull**2 for pull in pulls))}


def main() -> None:
    """Measure, and print what came of it as the last line."""
    home, settings, folder = Path(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps(measure(Subject(home), settings, folder)), flush=True)


if __name__ == "__main__":
    main()
