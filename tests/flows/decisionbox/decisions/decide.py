"""Decides on depth 2, the table of the design's worked example."""

from __future__ import annotations

import time
from dataclasses import replace

from components.contract import Context, DepthPolicy
from components.policy import Gate, GateCheck, Policy, Winner
from components.rows import DepthChoice, DepthEval
from components.speedup.policy_markdown import policy_summary, write_policy


def decide(*, noise: str = "", speedup: float = 1.5, ctx: Context) -> DepthPolicy:
    """Predicted speedups 1.40, 1.54, 1.52: depth 2, which measured `speedup`. noise: what disturbed the measurement,
    whose gate then refuses."""
    evals = []
    for k, al, verify, draft, speed in ((1, 1.80, 90, 8, 1.40), (2, 2.39, 104, 14, 1.54), (3, 2.79, 117, 22, 1.52)):
        cost = (verify + draft) / 76
        evals.append(
            DepthEval(
                "sel",
                "t",
                "d",
                "eagle3",
                "all",
                1,
                k,
                al,
                al,
                al,
                76.0,
                float(verify),
                float(draft),
                cost,
                speed,
                speed,
                speed,
                None,
                None,
                0.5,
                0.0,
                None,
                None,
                None,
                None,
            )
        )
    low, high, error = speedup - 0.1, speedup + 0.1, 1.54 / speedup - 1
    choice = DepthChoice(
        "sel",
        "t",
        "d",
        "eagle3",
        "all",
        1,
        2,
        "argmax",
        0.01,
        1.0,
        1.54,
        1.5,
        1.6,
        speedup,
        low,
        high,
        error,
        "use",
        [],
    )
    for done in range(3):
        ctx.progress(done, 2, "deciding")
        time.sleep(0.05)
    gate = Gate(True, [GateCheck("min_speedup", True, speedup, "at least 1.2x")])
    policy = Policy("sel", "t", "float32", "k", "argmax", 0.01, [choice], evals, [], [], [], [], gate=gate)
    policy = replace(policy, verdict="use", winner=Winner("d", "eagle3", 2))
    write_policy(ctx.out, policy)
    return DepthPolicy.of_step(ctx, {**policy_summary(policy), "noise": noise})
