"""Decides on depth 2, the table of the design's worked example."""

from __future__ import annotations

import json
import time

from components.contract import Context, DepthPolicy
from components.rows import DepthChoice, DepthEval, write_rows


def decide(*, ctx: Context) -> DepthPolicy:
    """Predicted speedups 1.40, 1.54, 1.52: depth 2."""
    rows: list[DepthChoice | DepthEval] = []
    for k, al, verify, draft, speed in ((1, 1.80, 90, 8, 1.40), (2, 2.39, 104, 14, 1.54), (3, 2.79, 117, 22, 1.52)):
        cost = (verify + draft) / 76
        rows.append(
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
    rows.append(
        DepthChoice(
            "sel", "t", "d", "eagle3", "all", 1, 2, "argmax", 0.01, 1.0, 1.54, 1.5, 1.6, 1.5, 1.4, 1.6, 0.027, "use", []
        )
    )
    write_rows(ctx.out, rows)
    for done in range(3):
        ctx.progress(done, 2, "deciding")
        time.sleep(0.05)
    checks = [{"name": "min_speedup", "passed": True, "value": 1.5, "limit": "at least 1.2x"}]
    (ctx.out / "policy.json").write_text(json.dumps({"gate": {"passed": True, "checks": checks}}))
    return DepthPolicy.of_step(ctx)
