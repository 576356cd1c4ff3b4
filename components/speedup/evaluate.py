"""Every depth of one drafter on one workload: predicted speedup with intervals, and the depth to serve with.

AL is replayed exactly from acceptance maps at each measured depth and pooled over prompts; times come from cost cells.
The two are resampled together (prompts for AL, blocks for cost), because a depth is only better if it stays better when
both could have come out differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.rows import AcceptanceMap, DepthChoice, DepthEval
from components.speedup.bootstrap import Floats, draw_weights, interval, ratio_draws
from components.speedup.costs import CostTable, StepTimes
from components.speedup.model import marginal_cost, marginal_gain, pick_depth
from components.speedup.policy import AcceptanceSummary, PromptCounts
from components.speedup.replay import DepthCounts, count


class Rule(NamedTuple):
    """How a depth is chosen."""

    tolerance: float
    confidence: float
    num_draws: int
    include_host: bool

    @property
    def words(self) -> str:
        """The rule as it is printed with every choice."""
        return (
            f"smallest depth within {self.tolerance:.0%} of the best lower 95 % bound of predicted speedup; "
            f"0 unless P(speedup > 1) >= {self.confidence:g}"
        )


class Identity(NamedTuple):
    """What a row says it is about."""

    selection_id: str
    target_key: str
    draft_key: str
    method: str
    workload: str
    batch_size: int


class Counts(NamedTuple):
    """Replayed counts: one row for each prompt, one column for each depth."""

    depths: list[int]
    prompt_ids: list[str]
    per_prompt: list[list[DepthCounts]]
    rounds: Floats  # [prompts, depths]
    tokens: Floats  # [prompts, depths]


def replay_counts(maps: Sequence[AcceptanceMap], depths: Sequence[int]) -> Counts:
    """Replay every map at every depth. Maps come in prompt order, so that results do not depend on theirs."""
    maps = sorted(maps, key=lambda m: m.prompt_id)
    per_prompt = [[count(m.accepted, k, m.num_tokens) for k in depths] for m in maps]
    return Counts(
        depths=list(depths),
        prompt_ids=[m.prompt_id for m in maps],
        per_prompt=per_prompt,
        rounds=np.array([[c.rounds for c in row] for row in per_prompt], dtype=np.float64),
        tokens=np.array([[c.tokens for c in row] for row in per_prompt], dtype=np.float64),
    )


def prompt_counts(counts: Counts, who: Identity, workloads: Mapping[str, str]) -> list[PromptCounts]:
    """The counts that let a later step predict for the prompts it measured. workloads: prompt_id -> workload."""
    return [
        PromptCounts(
            who.draft_key, prompt_id, row[0].tokens, counts.depths, [c.rounds for c in row], workloads[prompt_id]
        )
        for prompt_id, row in zip(counts.prompt_ids, counts.per_prompt, strict=True)
    ]


def summarise_acceptance(maps: Sequence[AcceptanceMap], counts: Counts, who: Identity) -> list[AcceptanceSummary]:
    """Each convention of acceptance length at each depth; see AcceptanceSummary."""
    proxies = [np.array(m.proxy_accepted[: m.num_tokens - 1]) for m in maps]
    every = np.concatenate(proxies) if proxies else np.zeros(0)
    rows = []
    for column, depth in enumerate(counts.depths):
        cells = [row[column] for row in counts.per_prompt]
        rounds, full = sum(c.rounds for c in cells), sum(c.full_rounds for c in cells)
        accepted = sum(c.full_accepted for c in cells)
        rows.append(
            AcceptanceSummary(
                draft_key=who.draft_key,
                method=who.method,
                workload=who.workload,
                depth_k=depth,
                num_prompts=len(cells),
                num_rounds=rounds,
                num_cut_rounds=rounds - full,
                al_kept=sum(c.tokens for c in cells) / rounds,
                al_pooled_incl_bonus=1.0 + accepted / full if full else 1.0,
                al_macro_incl_bonus=float(np.mean([c.tokens / c.rounds for c in cells])),
                al_proxy=1.0 + float(np.minimum(every, depth).mean()) if every.size else 1.0,
                reached=[sum(c.reached[i] for c in cells) for i in range(depth)],
                kept=[sum(c.kept[i] for c in cells) for i in range(depth)],
            )
        )
    return rows


def round_cost(times: StepTimes, include_host: bool) -> tuple[Floats, Floats]:
    """(plain step [...], round [..., K + 1]) in ms: numerator and denominator of the speedup model."""
    host = times.host if include_host else np.zeros_like(times.host)
    plain = times.target + host[..., 0]
    cycle = times.verify + times.draft + host
    # Depth 0 is plain decoding itself.
    cycle[..., 0] = plain
    return plain, cycle


def evaluate_depths(
    counts: Counts, cost: CostTable, who: Identity, rule: Rule, seed: int
) -> tuple[list[DepthEval], DepthChoice]:
    """Predicted speedup at every measured depth, and the choice.

    The random draws depend on `seed` and the number of prompts alone, so two drafters measured on the same prompts are
    resampled together.
    """
    weights = draw_weights(len(counts.rounds), rule.num_draws, np.random.default_rng([seed, 2]))
    al_draws = ratio_draws(weights, counts.tokens, counts.rounds)  # [draws, K + 1]
    plain, cycle = round_cost(cost.draws, rule.include_host)
    speed_draws = al_draws * plain[:, None] / cycle
    al = counts.tokens.sum(axis=0) / counts.rounds.sum(axis=0)
    plain_one, cycle_one = round_cost(cost.times, rule.include_host)
    speed = al * plain_one / cycle_one
    best_draw = speed_draws.max(axis=1, keepdims=True)
    p_best = np.bincount(speed_draws.argmax(axis=1), minlength=len(al)) / len(speed_draws)
    regret = (1.0 - speed_draws / best_draw).mean(axis=0)
    evals = []
    for i, depth in enumerate(counts.depths):
        al_lo, al_hi = interval(al_draws[:, i])
        lo, hi = interval(speed_draws[:, i])
        evals.append(
            DepthEval(
                **who._asdict(),
                depth_k=depth,
                al=float(al[i]),
                al_lo=al_lo,
                al_hi=al_hi,
                t_target_ms=float(cost.times.target),
                t_verify_ms=float(cost.times.verify[i]),
                t_draft_ms=float(cost.times.draft[i]),
                cost_ratio=float((cost.times.verify[i] + cost.times.draft[i]) / cost.times.target),
                speedup_pred=float(speed[i]),
                pred_lo=lo,
                pred_hi=hi,
                marginal_gain=marginal_gain(float(al[i]), float(al[i - 1])) if i else None,
                marginal_cost=marginal_cost(float(cycle_one[i]), float(cycle_one[i - 1])) if i else None,
                p_best=float(p_best[i]),
                regret=float(regret[i]),
                al_meas=None,
                speedup_meas=None,
                meas_lo=None,
                meas_hi=None,
            )
        )
    return evals, _choose(evals, speed_draws, who, rule)


def _choose(evals: list[DepthEval], speed_draws: Floats, who: Identity, rule: Rule) -> DepthChoice:
    """Apply the rule: the smallest depth near the best lower bound, if it also beats plain decoding."""
    drafting = [e for e in evals if e.depth_k > 0]
    # Depth 0 is left out here and comes back as the verdict: a bound of 0.99 is "undecided", not "do not".
    candidate = pick_depth([e.depth_k for e in drafting], [e.pred_lo for e in drafting], rule.tolerance)
    index = [e.depth_k for e in evals].index(candidate)
    p_beats = float((speed_draws[:, index] > 1.0).mean())
    if p_beats >= rule.confidence:
        depth, verdict = candidate, "use"
        why = f"depth {candidate} is predicted to be faster than plain decoding with probability {p_beats:.3f}"
    else:
        depth = 0
        p_any = float((speed_draws[:, 1:] > 1.0).mean(axis=0).max())
        verdict = "do_not_speculate" if p_any < 1.0 - rule.confidence else "undecided"
        why = (
            f"the best candidate, depth {candidate} (predicted {evals[index].speedup_pred:.3f}x), beats plain decoding "
            f"with probability {p_beats:.3f}; {rule.confidence:g} is asked"
        )
    chosen = next(e for e in evals if e.depth_k == depth)
    return DepthChoice(
        **who._asdict(),
        depth_k=depth,
        rule=rule.words,
        tolerance=rule.tolerance,
        p_beats_no_spec=p_beats,
        speedup_pred=chosen.speedup_pred,
        pred_lo=chosen.pred_lo,
        pred_hi=chosen.pred_hi,
        speedup_meas=None,
        meas_lo=None,
        meas_hi=None,
        pred_error=None,
        verdict=verdict,
        reasons=[why],
    )
