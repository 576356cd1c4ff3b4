"""Step `speedup.measure_drift`: acceptance length of the champion on today's traffic against that at its release.

Both sets of acceptance maps are replayed at the depth that is served. They hold different prompts, so each is resampled
by itself; where the interval of the change excludes zero, the rows and a flag report drift.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.policy import read_policy
from components.rows import ALL, AcceptanceMap, Drift, QualityFlag, read_rows, write_rows
from components.speedup.bootstrap import PROMPTS, Estimate, draw_weights
from components.speedup.prediction.replay import acceptance_length


def measure_drift(
    then: Measurements, now: Measurements, policy: DepthPolicy | None, *, depth_k: int, num_draws: int, ctx: Context
) -> Measurements:
    """The step `speedup.measure_drift`; its settings are explained in components/speedup/steps.py."""
    old, new = (_read_maps(source, name) for source, name in ((then, "then"), (now, "now")))
    if old[0].draft_key != new[0].draft_key:
        raise UserError("then, now: two drafters; drift compares one drafter on two sets of prompts")
    depth = min(depth_k or _served_depth(policy, old[0].draft_key) or 64, *(m.k_max for m in (*old, *new)))
    rows = []
    for workload in [ALL, *sorted({m.workload for m in new} - {ALL})]:
        now_maps = [m for m in new if workload in (ALL, m.workload)]
        then_maps = [m for m in old if m.workload == workload]
        against = workload if then_maps else ALL
        rows.append(
            _drift_row(then_maps or old, now_maps, (workload, against), depth, num_draws, ctx.seed, ctx.key[:16])
        )
    pooled = rows[0]
    flags = [*(_drift_flag(row) for row in rows if row.drifted), *_few_prompts_flags(pooled)]
    write_rows(ctx.out, [*rows, *flags])
    ctx.note(f"drift: {summary_line(pooled)}")
    return Measurements.of_step(
        ctx,
        {
            "method": pooled.method,
            "draft_key": pooled.draft_key,
            "depth_k": depth,
            "al_then": pooled.al_then,
            "al_now": pooled.al_now,
            "change": pooled.change,
            "change_lo": pooled.lo,
            "change_hi": pooled.hi,
            "drifted": pooled.drifted,
            "drift": summary_line(pooled),
            "drifted_workloads": [row.workload for row in rows if row.drifted],
        },
    )


def summary_line(row: Drift) -> str:
    """One line: both acceptance lengths, the change with its interval, and the conclusion."""
    conclusion = "it has drifted" if row.drifted else "no drift shown"
    return (
        f"acceptance length {row.al_now:.2f} on {row.num_prompts_now} new prompts, {row.al_then:.2f} on "
        f"{row.num_prompts_then} of its release, {row.change:+.2f} [{row.lo:+.2f}, {row.hi:+.2f}]: {conclusion}"
    )


def _read_maps(source: Measurements, name: str) -> list[AcceptanceMap]:
    """Usable maps of chains; a tree keeps more of the same draft tokens, so its maps do not describe what is served."""
    rows = [r for r in read_rows(source.path, AcceptanceMap) if r.tree_budget is None and r.num_tokens >= 2]
    if not rows:
        raise UserError(f"{name} ({source.key[:12]}): no usable acceptance maps; wire bench.measure_acceptance")
    return rows


def _served_depth(policy: DepthPolicy | None, draft_key: str) -> int:
    """The depth that a policy chose for a drafter over all workloads; 0 without one."""
    choices = read_policy(policy.path).choices if policy is not None else []
    return next((c.depth_k for c in choices if (c.draft_key, c.workload) == (draft_key, ALL)), 0)


def _drift_row(
    then: Sequence[AcceptanceMap],
    now: Sequence[AcceptanceMap],
    workloads: tuple[str, str],
    depth: int,
    num_draws: int,
    seed: int,
    session_id: str,
) -> Drift:
    al_then = _estimate_acceptance(then, depth, num_draws, [seed, 6])
    al_now = _estimate_acceptance(now, depth, num_draws, [seed, 7])
    lo, hi = al_now.minus(al_then).interval()
    (then_lo, then_hi), (now_lo, now_hi) = al_then.interval(), al_now.interval()
    return Drift(
        session_id=session_id,
        target_key=now[0].target_key,
        draft_key=now[0].draft_key,
        method=now[0].method,
        workload=workloads[0],
        workload_then=workloads[1],
        depth_k=depth,
        num_prompts_then=len(then),
        num_prompts_now=len(now),
        al_then=al_then.value,
        then_lo=then_lo,
        then_hi=then_hi,
        al_now=al_now.value,
        now_lo=now_lo,
        now_hi=now_hi,
        change=al_now.value - al_then.value,
        lo=lo,
        hi=hi,
        drifted=al_then.is_decisive and al_now.is_decisive and (lo > 0.0 or hi < 0.0),
    )


def _estimate_acceptance(maps: Sequence[AcceptanceMap], depth: int, num_draws: int, seed: Sequence[int]) -> Estimate:
    """`al` at a depth; prompts are sorted by name."""
    weights = draw_weights(len(maps), num_draws, np.random.default_rng(seed))
    return acceptance_length(sorted(maps, key=lambda m: m.prompt_id), depth, weights)


def _few_prompts_flags(row: Drift) -> list[QualityFlag]:
    """A flag where a side has few prompts: the interval is wide, and a relevant change may go unseen."""
    fewest = min(row.num_prompts_then, row.num_prompts_now)
    if fewest >= PROMPTS.warn:
        return []
    detail = f"drift over fewer than {PROMPTS.warn} prompts on one side: its interval is wide"
    return [QualityFlag(row.session_id, row.draft_key, row.method, "few_prompts", "warning", float(fewest), detail)]


def _drift_flag(row: Drift) -> QualityFlag:
    against = "the same workload" if row.workload_then == row.workload else "everything"
    detail = (
        f"workload {row.workload}: acceptance length {row.al_now:.2f} on new traffic, {row.al_then:.2f} on {against} "
        f"at release (change {row.lo:+.2f} to {row.hi:+.2f})"
    )
    return QualityFlag(row.session_id, row.draft_key, row.method, "traffic_drift", "warning", row.change, detail)
