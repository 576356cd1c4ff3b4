"""A release that passes its gate, ready to be registered: small files, the facts that the registry asks for."""

from __future__ import annotations

import json

from components.contract import Context, Release


def release(*, target: str = "builtin", speedup: float = 1.7, ctx: Context) -> Release:
    """A drafter that makes the target `speedup` times as fast."""
    (ctx.out / "release.json").write_text(json.dumps({"al": 2.5}))
    (ctx.out / "eagle3.txt").write_text(f"weights for {speedup}")
    checks = [{"name": "speedup", "passed": True, "value": speedup, "limit": "> 1"}]
    info = {"target": target, "target_key": "t", "draft_key": f"d{speedup}", "method": "eagle3", "depth_k": 4}
    info |= {"verdict": "use", "al": 2.5, "speedup_meas": speedup, "meas_lo": speedup - 0.1, "meas_hi": speedup + 0.1}
    return Release.of_step(ctx, {**info, "gate_passed": True, "gate_checks": checks})
