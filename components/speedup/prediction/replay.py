"""Replay of decoding at any depth from an acceptance map.

Convention. Output token 0 comes from prefill and belongs to no round. accepted[i] belongs to the round that starts when
output token i is the newest token; rounds emit tokens 1 .. num_tokens - 1. A round at i keeps
a = min(accepted[i], depth) drafts and one token of the target's own (the bonus), so the next round starts at i + a + 1.
The last round may reach past the end of the answer and is cut there; it is called the tail round.

Replaying is exact for greedy chains, because a drafter's state is a function of committed tokens alone. Truncating one
deep run, or averaging over every position, is not: rounds start just after a failure, where drafting is hard.

With arbitrary maps a deeper draft may need more rounds (it can land on a worse position), so AL(k) is monotone only for
maps where accepted[i + 1] >= accepted[i] - 1; a fall beyond its interval raises a flag.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from components.definitions import al, al_macro, al_proxy, al_uncut, is_cut
from components.policy import AcceptanceSummary, PromptCounts
from components.rows import AcceptanceByContext, AcceptanceMap, PredictionKey, grouped
from components.speedup.bootstrap import Estimate, Floats, draw_weights, pooled_ratio

CONTEXT_BINS: Final = (1024, 4096, 16384, 32768)
"""Context lengths, tokens, at which one bin of acceptance ends and the next begins."""


class RoundOutcome(NamedTuple):
    """One round; emitted = accepted + 1 except in a cut tail round."""

    out_pos: int
    drafted: int
    accepted: int
    emitted: int

    @property
    def is_cut(self) -> bool:
        """Whether the end of the answer cut the tokens of this round."""
        return is_cut(self.accepted, self.emitted)


def replay(accepted: Sequence[int], depth: int, num_tokens: int | None = None) -> list[RoundOutcome]:
    """The rounds of one answer at one depth; exact for greedy chains.

    accepted: drafts kept by a round started at each output position; at least num_tokens - 1 of them.
    num_tokens: tokens of the answer, the prefill token included; None: len(accepted) + 1.
    depth: 0 replays plain decoding, one token a round.
    """
    last = len(accepted) if num_tokens is None else num_tokens - 1
    assert depth >= 0, f"a depth is not negative: {depth}"
    assert len(accepted) >= last, f"{last} rounds could start in this answer, the map has {len(accepted)} positions"
    rounds, i = [], 0
    while i < last:
        num_kept = min(accepted[i], depth)
        rounds.append(RoundOutcome(i, depth, num_kept, min(num_kept + 1, last - i)))
        i += num_kept + 1
    return rounds


class DepthCounts(NamedTuple):
    """Counts of one answer at one depth. Lists are over draft positions 1..depth, without a cut tail round."""

    rounds: int
    tokens: int  # emitted by rounds: num_tokens - 1
    full_rounds: int  # rounds that the end of the answer did not cut
    full_accepted: int  # drafts kept in full rounds
    num_reached: list[int]  # full rounds that kept every draft before position i
    num_kept: list[int]  # full rounds that kept the draft at position i too


def count(accepted: Sequence[int], depth: int, num_tokens: int | None = None) -> DepthCounts:
    """Replay one answer and count."""
    rounds = replay(accepted, depth, num_tokens)
    full = [r for r in rounds if not r.is_cut]
    kept_by_position = [sum(r.accepted >= i for r in full) for i in range(1, depth + 1)]
    return DepthCounts(
        rounds=len(rounds),
        tokens=sum(r.emitted for r in rounds),
        full_rounds=len(full),
        full_accepted=sum(r.accepted for r in full),
        num_reached=[len(full), *kept_by_position[:-1]] if depth else [],
        num_kept=kept_by_position,
    )


def acceptance_length(maps: Sequence[AcceptanceMap], depth: int, weights: Floats) -> Estimate:
    """`al` at a depth over some prompts, a map each. weights: of draw_weights, in the order of the maps."""
    counts = [count(m.accepted, depth, m.num_tokens) for m in maps]
    tokens = np.array([float(c.tokens) for c in counts])
    return pooled_ratio(weights, tokens, np.array([float(c.rounds) for c in counts]))


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


def acceptance_by_context(
    maps: Sequence[AcceptanceMap], depths: Sequence[int], identity: PredictionKey, num_draws: int, seed: int
) -> list[AcceptanceByContext]:
    """`al` of every depth above 0 over the rounds whose context falls into one of CONTEXT_BINS; bins with rounds only.

    Answers are replayed whole, since a round begins where the one before it ended. Maps without the length of their
    prompt are left out.
    """
    maps = sorted((m for m in maps if m.prompt_tokens is not None), key=lambda m: m.prompt_id)
    rows = []
    for depth in (depth for depth in depths if depth):
        placed = [
            (bisect_left(CONTEXT_BINS, (m.prompt_tokens or 0) + r.out_pos), number, r.emitted)
            for number, m in enumerate(maps)
            for r in replay(m.accepted, depth, m.num_tokens)
        ]
        for place, rounds in sorted(grouped(placed, lambda one: one[0]).items()):
            counts = np.zeros((2, len(maps)))
            for _, number, emitted in rounds:
                counts[:, number] += emitted, 1.0
            tokens, each = counts[:, counts[1] > 0]
            weights = draw_weights(len(tokens), num_draws, np.random.default_rng(seed))
            estimate = pooled_ratio(weights, tokens, each)
            lo, hi = estimate.interval()
            rows.append(
                AcceptanceByContext(
                    selection_id=identity.selection_id,
                    target_key=identity.target_key,
                    draft_key=identity.draft_key,
                    method=identity.method,
                    depth_k=depth,
                    context_from=CONTEXT_BINS[place - 1] if place else 0,
                    context_to=CONTEXT_BINS[place] if place < len(CONTEXT_BINS) else None,
                    num_prompts=len(tokens),
                    num_rounds=len(rounds),
                    num_tokens=int(tokens.sum()),
                    al=estimate.value,
                    al_lo=lo,
                    al_hi=hi,
                )
            )
    return rows
