"""Steps that end in a release: a clock that reads its time from a file, so that a test says how fast the machine is."""

from __future__ import annotations

import json
from pathlib import Path

from components.contract import Context, DepthPolicy, Draft, Machine, Measurements, Release, UserError
from components.rows import QualityFlag, write_rows


def clock(draft: Draft, *, source: Path, reps: int = 1, ctx: Context, machine: Machine) -> Measurements:
    """The speedup that the file says; no number in it is a failure."""
    text = source.read_text().strip()
    if not text:
        raise UserError("the clock has stopped")
    write_rows(ctx.out, [QualityFlag("s", draft.key, "fern", "speed", "info", float(text), f"{reps} reps")])
    return Measurements.of_step(ctx, {"speedup": float(text), "machine_id": machine.machine_id})


def settle(timed: Measurements, *, ctx: Context) -> DepthPolicy:
    """Use it at depth 3 if it is faster."""
    speedup = float(timed.info["speedup"])
    (ctx.out / "policy.json").write_text(json.dumps({"speedup": speedup}))
    return DepthPolicy.of_step(ctx, {"speedup": speedup, "verdict": "use" if speedup > 1 else "undecided"})


def sell(draft: Draft, policy: DepthPolicy, end_to_end: Measurements, *, ctx: Context) -> Release:
    """A release whose own gate asks for 1.1."""
    speedup, passed = float(policy.info["speedup"]), float(policy.info["speedup"]) > 1.1
    check = {"name": "measured_speedup", "passed": passed, "value": speedup, "limit": "> 1.1"}
    facts = {"target": "toy", "target_key": "t", "draft_key": draft.key, "method": "fern", "depth_k": 3}
    facts |= {"verdict": "use", "speedup_meas": speedup, "gate_passed": passed, "gate_checks": [check]}
    (ctx.out / "release.json").write_text(json.dumps({"speedup": speedup, "from": end_to_end.key}))
    return Release.of_step(ctx, facts)
