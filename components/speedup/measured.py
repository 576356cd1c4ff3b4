"""Measured speedup of every end-to-end arm: kept tokens over time, paired by prompt with the best plain decoding.

Formulas and conventions are those of components/definitions.py: `speedup` is over prompts that both decoded in one
process, dtype, temperature and batch size. Prompts and processes both vary: see speed_ratio.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from components import definitions
from components.definitions import has_decoding, timed_pairs
from components.rows import ALL, DepthChoice, DepthEval, Request
from components.speedup.bootstrap import Estimate
from components.speedup.policy import MeasuredArm, Policy, PromptCounts
from components.speedup.speed_ratio import SpeedRatio, speed_ratio
from components.speedup.ties import ties_of


class ArmKey(NamedTuple):
    """Two requests with this key in common are repetitions of one arm."""

    method: str
    draft_key: str
    depth_k: int
    tree_budget: int  # 0 for a chain, so that keys can be sorted
    batch_size: int
    dtype: str
    kernel: str


class ArmEstimate(NamedTuple):
    """An arm with its speedup as an estimate, and the prompts behind it."""

    arm: MeasuredArm
    speedup: Estimate
    prompts: list[str]


def measured_arms(
    requests: Sequence[Request], num_draws: int, seed: int, replayed: Sequence[PromptCounts] = ()
) -> list[ArmEstimate]:
    """Every speculative arm at temperature 0, pooled and by workload, over the best plain kernel of its dtype.

    replayed: replayed counts of the same drafters by prompt, for MeasuredArm.al_replayed.
    """
    counts = {(c.draft_key, c.prompt_id): c for c in replayed}
    rows = [r for r in requests if has_decoding(r) and r.temperature == 0.0]
    by_arm: dict[ArmKey, list[Request]] = {}
    for r in rows:
        key = ArmKey(r.method, r.draft_key, r.depth_k, r.tree_budget or 0, r.batch_size, r.dtype, r.kernel)
        by_arm.setdefault(key, []).append(r)
    processes = sorted({r.process for r in rows})
    arms = []
    for key, arm_requests in sorted(by_arm.items()):
        if key.method == "none":
            continue
        plain = best_plain(rows, dtype=key.dtype, batch_size=key.batch_size)
        for workload in [ALL, *sorted({r.workload for r in arm_requests} - {ALL})]:
            of_workload = [r for r in arm_requests if workload in (ALL, r.workload)]
            ratio = speed_ratio(timed_pairs(of_workload), timed_pairs(plain), processes, num_draws, seed)
            if ratio is not None:
                arms.append(
                    ArmEstimate(
                        _measure_arm(key, workload, (of_workload, plain), ratio, counts), ratio.ratio, ratio.prompts
                    )
                )
    return arms


def best_plain(rows: Sequence[Request], dtype: str, batch_size: int) -> list[Request]:
    """The plain requests of the kernel with most tokens a second."""
    return definitions.best_plain(r for r in rows if r.dtype == dtype and r.batch_size == batch_size)


def _measure_arm(
    key: ArmKey,
    workload: str,
    requests: tuple[list[Request], list[Request]],
    ratio: SpeedRatio,
    counts: dict[tuple[str, str], PromptCounts],
) -> MeasuredArm:
    """One arm on one workload. requests: those of the arm, and those of plain decoding."""
    shared, speedup = ratio.prompts, ratio.ratio
    drafted, plain = ([r for r in rows if r.prompt_id in set(shared)] for rows in requests)
    lo, hi = speedup.interval()
    # Maps of chains do not describe a tree.
    prompt_counts = [None if key.tree_budget else counts.get((key.draft_key, prompt_id)) for prompt_id in shared]
    replayed = al_replayed(prompt_counts, key.depth_k)
    rounds = definitions.round_counts(drafted)
    compared = [r for r in drafted if r.identical is not None]
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
        num_requests=len(drafted),
        num_rounds=rounds.rounds,
        tokens_per_s=definitions.tokens_per_s(drafted) or 0.0,
        plain_tokens_per_s=definitions.tokens_per_s(plain) or 0.0,
        al=definitions.al_of(drafted),
        al_replayed=replayed,
        draft_acceptance_rate=definitions.draft_acceptance_rate(rounds.accepted, rounds.drafted),
        speedup=speedup.value,
        lo=lo,
        hi=hi,
        checked=len(compared),
        ties=ties,
        divergences=sum(not r.identical for r in compared) - ties,
        tree_budget=key.tree_budget or None,
        num_processes=ratio.num_processes,
        is_decisive=speedup.is_decisive,
        **ties_of(compared)._asdict(),
    )


def arm_of(policy: Policy, row: DepthEval | DepthChoice) -> MeasuredArm | None:
    """The measured arm of a predicted row; of several, that in the dtype and kernel of the step costs."""
    budget = row.tree_budget if isinstance(row, DepthEval) else None
    arm_key = (row.draft_key, row.method, row.workload, row.depth_k, row.batch_size, budget)
    arms = [
        a for a in policy.arms if (a.draft_key, a.method, a.workload, a.depth_k, a.batch_size, a.tree_budget) == arm_key
    ]
    return max(arms, key=lambda a: _nearness(policy, a), default=None)


def best_of(
    policy: Policy, measured: Sequence[ArmEstimate], chain: tuple[str, int], batch_size: int
) -> ArmEstimate | None:
    """The same for a chain (draft_key, depth) over all workloads, as an estimate."""
    arm_key = (*chain, ALL, batch_size, None)
    runs = [
        m
        for m in measured
        if (m.arm.draft_key, m.arm.depth_k, m.arm.workload, m.arm.batch_size, m.arm.tree_budget) == arm_key
    ]
    return max(runs, key=lambda m: _nearness(policy, m.arm), default=None)


def _nearness(policy: Policy, arm: MeasuredArm) -> tuple[bool, bool, float]:
    return arm.dtype == policy.dtype, arm.kernel == policy.kernel, arm.tokens_per_s


def al_replayed(counts: Sequence[PromptCounts | None], depth: int) -> float | None:
    """AL of a set of prompts by their maps; None unless each has counts at this depth."""
    replayed = [c for c in counts if c is not None and depth in c.depths]
    if len(replayed) < len(counts):
        return None
    return definitions.al(sum(c.tokens for c in replayed), sum(c.rounds[c.depths.index(depth)] for c in replayed))
