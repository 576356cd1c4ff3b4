"""A challenger against the champion, prompt by prompt: both ran on the same prompts in the same session.

The ratio is pooled (sums over prompts), and its interval resamples prompts with both drafters together, so that what a
prompt does to both cancels. Non-inferiority with a margin, as in clinical trials: "not worse" needs the lower 95 %
bound at 1 - margin or above; that the interval holds 1 is no evidence of anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from components.definitions import has_decoding
from components.rows import DepthChoice, PairedComparison, Request
from components.speedup.bootstrap import LEAST_PROMPTS, Floats, draw_weights, pooled_ratio
from components.speedup.measured import best_plain
from components.speedup.policy import ALL, Policy, PromptCounts


@dataclass(frozen=True)
class Pair:
    """Who is compared, at which depths, and with what tolerance. Depth 0 decodes plainly."""

    challenger: DepthChoice
    champion: DepthChoice
    margin: float
    num_draws: int
    seed: int


def compare(policy: Policy, requests: Sequence[Request], pair: Pair) -> list[PairedComparison]:
    """Decoding speed and acceptance length, pooled and per workload; [] when they share no prompt."""
    return [*_speeds(policy, requests, pair), *_acceptances(policy, pair, requests)]


def _speeds(policy: Policy, requests: Sequence[Request], pair: Pair) -> list[PairedComparison]:
    rows = [
        r for r in requests if has_decoding(r) and r.temperature == 0.0 and r.batch_size == pair.challenger.batch_size
    ]
    dtypes = {r.dtype for r in rows}
    dtype = policy.dtype if policy.dtype in dtypes else min(dtypes, default="")
    rows = [r for r in rows if r.dtype == dtype]
    ours = _per_prompt(_arm(rows, pair.challenger))
    theirs = _per_prompt(_arm(rows, pair.champion))
    session = next((r.session_id for r in requests), "")
    depths = (pair.challenger.depth_k, pair.champion.depth_k)
    return _ratios(policy, pair, session, "decode_speed", depths, ours, theirs)


def _acceptances(policy: Policy, pair: Pair, requests: Sequence[Request]) -> list[PairedComparison]:
    """Tokens a round on every prompt that both have maps of, at the depth that the challenger is to serve with.

    Where that is 0, at the champion's, or at the deepest: plain decoding says nothing. Where one of them was not mapped
    that deep, at the deepest depth below it that both were.
    """
    keys = (pair.challenger.draft_key, pair.champion.draft_key)
    common = _common_depths(policy.prompts, keys)
    wanted = pair.challenger.depth_k or pair.champion.depth_k or max(common, default=0)
    depth = max((k for k in common if k <= wanted), default=min(common, default=0))
    if not depth:
        return []
    session = next((r.session_id for r in requests), "")
    ours, theirs = (_counts(policy.prompts, key, depth) for key in keys)
    return _ratios(policy, pair, session, "acceptance_length", (depth, depth), ours, theirs)


def _common_depths(prompts: Sequence[PromptCounts], keys: tuple[str, str]) -> set[int]:
    """Depths above 0 that every prompt of both drafters was replayed at."""
    replayed = [set(c.depths) for c in prompts if c.draft_key in keys]
    return set.intersection(*replayed) - {0} if replayed else set()


def _arm(rows: Sequence[Request], choice: DepthChoice) -> list[Request]:
    if choice.depth_k == 0:
        return best_plain(rows, rows[0].dtype, choice.batch_size) if rows else []
    chains = [r for r in rows if r.tree_budget is None]
    return [r for r in chains if (r.draft_key, r.depth_k) == (choice.draft_key, choice.depth_k)]


PerPrompt = dict[str, tuple[str, float, float]]  # prompt_id -> workload, above, below: the ratio of sums is the value


def _per_prompt(rows: Sequence[Request]) -> PerPrompt:
    """Tokens and seconds, repetitions summed."""
    found: PerPrompt = {}
    for r in rows:
        _, tokens, seconds = found.get(r.prompt_id, ("", 0.0, 0.0))
        found[r.prompt_id] = (r.workload, tokens + r.timed_tokens, seconds + r.decode_ns / 1e9)
    return found


def _counts(prompts: Sequence[PromptCounts], draft_key: str, depth: int) -> PerPrompt:
    """Tokens and rounds at one depth."""
    return {
        c.prompt_id: (c.workload, float(c.tokens), float(c.rounds[c.depths.index(depth)]))
        for c in prompts
        if c.draft_key == draft_key and depth in c.depths
    }


def _ratios(
    policy: Policy,
    pair: Pair,
    session: str,
    quantity: str,
    depths: tuple[int, int],
    ours: PerPrompt,
    theirs: PerPrompt,
) -> list[PairedComparison]:
    """One row for all prompts that both have, and one for each workload."""
    shared = sorted(ours.keys() & theirs.keys())
    rows = []
    for workload in [ALL, *sorted({ours[prompt][0] for prompt in shared} - {ALL})] if shared else []:
        prompts = [prompt for prompt in shared if workload in (ALL, ours[prompt][0])]
        mine, champion = _columns(ours, prompts), _columns(theirs, prompts)
        weights = draw_weights(len(prompts), pair.num_draws, np.random.default_rng([pair.seed, 5]))
        ours_now, theirs_now = pooled_ratio(weights, *mine), pooled_ratio(weights, *champion)
        ratio = ours_now.over(theirs_now)
        lo, hi = ratio.interval()
        rows.append(
            PairedComparison(
                session_id=session,
                selection_id=policy.selection_id,
                target_key=policy.target_key,
                challenger_key=pair.challenger.draft_key,
                champion_key=pair.champion.draft_key,
                method=pair.challenger.method,
                champion_method=pair.champion.method,
                workload=workload,
                quantity=quantity,
                challenger_depth=depths[0],
                champion_depth=depths[1],
                num_prompts=len(prompts),
                challenger_value=ours_now.value,
                champion_value=theirs_now.value,
                ratio=ratio.value,
                lo=lo,
                hi=hi,
                margin=pair.margin,
                verdict=verdict_of(lo, hi, pair.margin, len(prompts)),
            )
        )
    return rows


def _columns(found: PerPrompt, prompts: Sequence[str]) -> tuple[Floats, Floats]:
    return np.array([found[p][1] for p in prompts]), np.array([found[p][2] for p in prompts])


def verdict_of(lo: float, hi: float, margin: float, num_prompts: int) -> str:
    """better | not_worse | worse | undecided; see PairedComparison."""
    if num_prompts < LEAST_PROMPTS:
        return "undecided"
    if lo > 1.0:
        return "better"
    if lo >= 1.0 - margin:
        return "not_worse"
    return "worse" if hi < 1.0 - margin else "undecided"
