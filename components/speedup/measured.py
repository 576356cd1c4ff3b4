"""Measured speedup of every end-to-end arm: kept tokens over time, paired by prompt with the best plain decoding.

What is counted, and every formula, stands in components/definitions.py: `speedup`, over prompts that both decoded, in
the same dtype, temperature and batch size. Repetitions of a prompt are summed first; the interval resamples prompts,
both arms together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from components import definitions
from components.definitions import has_decoding, on_shared_prompts
from components.rows import DepthChoice, DepthEval, Request
from components.speedup.bootstrap import draw_weights, pooled_ratio
from components.speedup.policy import ALL, MeasuredArm, Policy, PromptCounts


class ArmKey(NamedTuple):
    """What makes two requests repetitions of one arm."""

    method: str
    draft_key: str
    depth_k: int
    tree_budget: int  # 0 for a chain, so that keys can be sorted
    batch_size: int
    dtype: str
    kernel: str


def measured_arms(
    requests: Sequence[Request], num_draws: int, seed: int, replayed: Sequence[PromptCounts] = ()
) -> list[MeasuredArm]:
    """Every speculative arm at temperature 0, pooled and per workload, against the best plain kernel of its dtype.

    replayed: acceptance of the same drafters, prompt by prompt, for MeasuredArm.al_replayed.
    """
    counts = {(c.draft_key, c.prompt_id): c for c in replayed}
    rows = [r for r in requests if has_decoding(r) and r.temperature == 0.0]
    by_arm: dict[ArmKey, list[Request]] = {}
    for r in rows:
        key = ArmKey(r.method, r.draft_key, r.depth_k, r.tree_budget or 0, r.batch_size, r.dtype, r.kernel)
        by_arm.setdefault(key, []).append(r)
    arms = []
    for key, mine in sorted(by_arm.items()):
        if key.method == "none":
            continue
        plain = best_plain(rows, dtype=key.dtype, batch_size=key.batch_size)
        for workload in [ALL, *sorted({r.workload for r in mine} - {ALL})]:
            arm = _arm(key, workload, mine, plain, counts, num_draws, seed)
            if arm is not None:
                arms.append(arm)
    return arms


def best_plain(rows: Sequence[Request], dtype: str, batch_size: int) -> list[Request]:
    """Plain requests of the kernel that decoded most tokens a second."""
    return definitions.best_plain(r for r in rows if r.dtype == dtype and r.batch_size == batch_size)


def _arm(
    key: ArmKey,
    workload: str,
    mine: list[Request],
    plain: list[Request],
    counts: dict[tuple[str, str], PromptCounts],
    num_draws: int,
    seed: int,
) -> MeasuredArm | None:
    """One arm on one workload, or None when plain decoding has no prompt in common with it."""
    mine, plain = on_shared_prompts((r for r in mine if workload in (ALL, r.workload)), plain)
    shared = sorted({r.prompt_id for r in mine})
    if not shared:
        return None
    tokens, times = _per_prompt(mine, shared)
    plain_tokens, plain_times = _per_prompt(plain, shared)
    weights = draw_weights(len(shared), num_draws, np.random.default_rng([seed, 3]))
    speedup = pooled_ratio(weights, tokens, times).over(pooled_ratio(weights, plain_tokens, plain_times))
    lo, hi = speedup.interval()
    # Maps of chains say nothing about a tree.
    known = [None if key.tree_budget else counts.get((key.draft_key, prompt_id)) for prompt_id in shared]
    replayed = al_replayed(known, key.depth_k)
    found = definitions.round_counts(mine)
    compared = [r for r in mine if r.identical is not None]
    ties = sum(not r.identical and bool(r.tie) for r in compared)
    return MeasuredArm(
        draft_key=key.draft_key,
        method=key.method,
        workload=workload,
        depth_k=key.depth_k,
        batch_size=key.batch_size,
        dtype=key.dtype,
        kernel=key.kernel,
        num_prompts=len(shared),
        num_requests=len(mine),
        num_rounds=found.rounds,
        tokens_per_s=definitions.tokens_per_s(mine) or 0.0,
        plain_tokens_per_s=definitions.tokens_per_s(plain) or 0.0,
        al=definitions.al_of(mine),
        al_replayed=replayed,
        draft_acceptance_rate=definitions.draft_acceptance_rate(found.accepted, found.drafted),
        speedup=speedup.value,
        lo=lo,
        hi=hi,
        checked=len(compared),
        ties=ties,
        divergences=sum(not r.identical for r in compared) - ties,
        tree_budget=key.tree_budget or None,
    )


def arm_of(policy: Policy, row: DepthEval | DepthChoice) -> MeasuredArm | None:
    """The measured arm of a prediction; of several, the one in the dtype and kernel that costs were measured in."""
    budget = row.tree_budget if isinstance(row, DepthEval) else None
    wanted = (row.draft_key, row.method, row.workload, row.depth_k, row.batch_size, budget)
    arms = [
        a for a in policy.arms if (a.draft_key, a.method, a.workload, a.depth_k, a.batch_size, a.tree_budget) == wanted
    ]
    return max(arms, key=lambda a: (a.dtype == policy.dtype, a.kernel == policy.kernel, a.tokens_per_s), default=None)


def al_replayed(counts: Sequence[PromptCounts | None], depth: int) -> float | None:
    """AL that the maps say for a set of prompts; None unless each has a map that was replayed at this depth."""
    known = [c for c in counts if c is not None and depth in c.depths]
    if len(known) < len(counts):
        return None
    return definitions.al(sum(c.tokens for c in known), sum(c.rounds[c.depths.index(depth)] for c in known))


def _per_prompt(rows: list[Request], prompt_ids: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of each prompt, summed over repetitions."""
    index = {prompt_id: i for i, prompt_id in enumerate(prompt_ids)}
    tokens, times = np.zeros(len(index)), np.zeros(len(index))
    for r in rows:
        tokens[index[r.prompt_id]] += r.timed_tokens
        times[index[r.prompt_id]] += r.decode_ns / 1e9
    return tokens, times
