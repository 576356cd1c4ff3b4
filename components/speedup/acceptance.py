"""Acceptance of one drafter, replayed from its maps: counts of every prompt, and all conventions of its length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.definitions import al, al_macro, al_proxy, al_uncut
from components.rows import AcceptanceMap
from components.speedup.bootstrap import Floats
from components.speedup.policy import AcceptanceSummary, PromptCounts
from components.speedup.replay import DepthCounts, count


class Counts(NamedTuple):
    """Replayed counts: one row for each prompt, one column for each depth."""

    depths: list[int]
    prompt_ids: list[str]
    per_prompt: list[list[DepthCounts]]
    rounds: Floats  # [prompts, depths]
    tokens: Floats  # [prompts, depths]


def replay_counts(maps: Sequence[AcceptanceMap], depths: Sequence[int]) -> Counts:
    """Replay every map at every depth. Maps are sorted by prompt, so that their order does not change the result."""
    maps = sorted(maps, key=lambda m: m.prompt_id)
    per_prompt = [[count(m.accepted, k, m.num_tokens) for k in depths] for m in maps]
    return Counts(
        depths=list(depths),
        prompt_ids=[m.prompt_id for m in maps],
        per_prompt=per_prompt,
        rounds=np.array([[c.rounds for c in row] for row in per_prompt], dtype=np.float64),
        tokens=np.array([[c.tokens for c in row] for row in per_prompt], dtype=np.float64),
    )


def prompt_counts(counts: Counts, draft_key: str, workloads: Mapping[str, str]) -> list[PromptCounts]:
    """Counts of each prompt, for predictions over any choice of prompts. workloads: prompt_id -> workload."""
    return [
        PromptCounts(draft_key, prompt_id, row[0].tokens, counts.depths, [c.rounds for c in row], workloads[prompt_id])
        for prompt_id, row in zip(counts.prompt_ids, counts.per_prompt, strict=True)
    ]


def summarise_acceptance(
    maps: Sequence[AcceptanceMap], counts: Counts, draft_key: str, method: str, workload: str
) -> list[AcceptanceSummary]:
    """One row for each depth, with every convention of acceptance length."""
    proxies = [length for m in maps for length in m.proxy_accepted[: m.num_tokens - 1]]
    rows = []
    for column, depth in enumerate(counts.depths):
        cells = [row[column] for row in counts.per_prompt]
        rounds, full = sum(c.rounds for c in cells), sum(c.full_rounds for c in cells)
        accepted, tokens = sum(c.full_accepted for c in cells), sum(c.tokens for c in cells)
        rows.append(
            AcceptanceSummary(
                draft_key=draft_key,
                method=method,
                workload=workload,
                depth_k=depth,
                num_prompts=len(cells),
                num_rounds=rounds,
                num_cut_rounds=rounds - full,
                al=al(tokens, rounds),
                al_uncut=al_uncut(accepted, full),
                al_macro=al_macro([al(c.tokens, c.rounds) for c in cells if c.rounds]),
                al_proxy=al_proxy(proxies, depth),
                reached=[sum(c.num_reached[i] for c in cells) for i in range(depth)],
                kept=[sum(c.num_kept[i] for c in cells) for i in range(depth)],
            )
        )
    return rows
