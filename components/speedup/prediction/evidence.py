"""Evaluation of one drafter at every batch size, workload and context length that was measured.

Acceptance of one drafter, replayed from its maps: counts of every prompt, and all conventions of its length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.contract import UserError
from components.definitions import al, al_macro, al_proxy, al_uncut
from components.methods import decoding_loop_of
from components.policy import AcceptanceSummary, Policy, PromptCounts, RoundCost
from components.rows import ALL, AcceptanceMap, CostCell, DepthChoice
from components.speedup.prediction.costs import CostTable, Setting, contexts_of, cost_table, round_cost, select_depths
from components.speedup.prediction.flags import prediction_flags
from components.speedup.prediction.mixture import one_depth_for_all, stated_shares
from components.speedup.prediction.predict import Identity, Rule, Speeds, choice_row, depth_rows, predict
from components.speedup.prediction.replay import DepthCounts, count
from components.speedup.select import Contender
from components.speedup.statistics.bootstrap import PROMPTS, Floats


class Evidence(NamedTuple):
    """Measurements of one drafter in one setting, and the rule to evaluate them by."""

    maps: list[AcceptanceMap]
    cells: list[CostCell]
    tree_budget: int | None
    draft_vocab: int | None
    mixture: Mapping[str, float]  # workload -> share of decoded tokens; empty: shares of the measured prompts
    rule: Rule
    seed: int
    session: int = 0  # index of the cost measurement of its cells

    @property
    def draft_key(self) -> str:
        """Key of the drafter."""
        return self.maps[0].draft_key

    def batch_sizes(self) -> list[int]:
        """Batch sizes at which its drafts were timed."""
        draft_cells = (c for c in self.cells if c.phase == "draft" and c.draft_key == self.draft_key)
        return sorted({c.batch_size for c in draft_cells if c.tree_budget == self.tree_budget})

    def plain_step(self) -> float:
        """T_target in ms at its smallest batch size."""
        return float(self.costs(self.batch_sizes()[0]).times.target)

    def costs(self, batch_size: int, kv_len: int | None = None) -> CostTable:
        """Its costs at the depths of its maps."""
        setting = Setting(self.draft_key, batch_size, self.tree_budget, kv_len, self.session)
        deepest = min(m.k_max for m in self.maps)
        depths = (0, deepest) if decoding_loop_of(self.maps[0].method) else range(deepest + 1)
        table = select_depths(cost_table(self.cells, setting, self.rule.include_host), depths)
        if len(table.depths) < 2:
            raise UserError(
                f"no depth of {self.maps[0].method} has both cost cells and acceptance (maps reach depth {deepest})"
            )
        return table


def add_chain(policy: Policy, evidence: Evidence) -> Contender:
    """Enter a drafter's chains into the policy, and return its contender for the ranking."""
    contender = None
    for batch_size in evidence.batch_sizes():
        table = evidence.costs(batch_size)
        policy.dtype, policy.kernel = table.dtype, table.kernel
        speeds, choice = _add_batch_size(policy, evidence, table, batch_size)
        lengths = contexts_of(evidence.cells, evidence.draft_key, batch_size)
        policy.contexts += [_choice_in_context(policy, evidence, batch_size, kv_len, lengths) for kv_len in lengths]
        contender = contender or _contender(evidence, speeds, choice)
    assert contender is not None, "cells without a draft phase were refused before"
    return contender


def _identity(policy: Policy, evidence: Evidence, workload: str, batch_size: int) -> Identity:
    first = evidence.maps[0]
    return Identity(policy.selection_id, policy.target_key, first.draft_key, first.method, workload, batch_size)


def _contender(evidence: Evidence, speeds: Speeds, choice: DepthChoice) -> Contender:
    return Contender(
        draft_key=choice.draft_key,
        method=choice.method,
        depth_k=choice.depth_k,
        tree_budget=evidence.tree_budget if choice.depth_k else None,
        draft_vocab=evidence.draft_vocab,
        speedup=speeds.speedup[speeds.depths.index(choice.depth_k)],
        verdict=choice.verdict,
    )


def _add_batch_size(
    policy: Policy, evidence: Evidence, table: CostTable, batch_size: int
) -> tuple[Speeds, DepthChoice]:
    """Enter every workload, all pooled and their mixture at one batch size; return the pooled speeds and choice."""
    maps, rule = evidence.maps, evidence.rule
    is_first = not any(s.draft_key == evidence.draft_key for s in policy.acceptance)
    workloads = sorted({m.workload for m in maps} - {ALL})
    speeds: dict[str, Speeds] = {}
    choices: dict[str, DepthChoice] = {}
    tokens: dict[str, float] = {}
    for workload in [ALL, *workloads]:
        workload_maps = [m for m in maps if workload in (ALL, m.workload)]
        identity = _identity(policy, evidence, workload, batch_size)
        counts = replay_counts(workload_maps, table.depths)
        speeds[workload] = predict(counts.tokens, counts.rounds, table, workload, rule, evidence.seed)
        choices[workload] = choice_row(speeds[workload], identity, rule)
        tokens[workload] = float(counts.tokens[:, 0].sum())
        evals = depth_rows(speeds[workload], table, identity)
        summaries = summarise_acceptance(workload_maps, counts, identity.draft_key, identity.method, workload)
        policy.evals += evals
        if is_first:
            policy.acceptance += summaries
        if workload == ALL:
            policy.flags += prediction_flags(
                policy.selection_id, workload_maps, evals, speeds[ALL], summaries, choices[ALL], table
            )
            if is_first:
                policy.prompts += prompt_counts(
                    counts, identity.draft_key, {m.prompt_id: m.workload for m in workload_maps}
                )
    _add_mixture(policy, evidence, speeds, choices, tokens, batch_size)
    policy.rounds += _round_costs(evidence, table, batch_size)
    return speeds[ALL], choices[ALL]


def _add_mixture(
    policy: Policy,
    evidence: Evidence,
    speeds: dict[str, Speeds],
    choices: dict[str, DepthChoice],
    tokens: Mapping[str, float],
    batch_size: int,
) -> None:
    """Enter the choices with the loss of one depth for all workloads; a stated mixture adds a choice of its own."""
    workloads = [name for name in speeds if name != ALL]
    shares = stated_shares(evidence.mixture, workloads) if evidence.mixture else {}
    if len(workloads) > 1 or shares:
        measured = {name: tokens[name] / sum(tokens[w] for w in workloads) for name in workloads}
        identity = _identity(policy, evidence, ALL, batch_size)
        by_workload = {name: speeds[name] for name in workloads}
        mixture, choice = one_depth_for_all(
            by_workload, shares or measured, None if shares else choices[ALL], choices, identity, evidence.rule
        )
        policy.mixtures.append(mixture)
        choices[choice.workload] = replace(choice, loss=mixture.loss)
        for name in workloads:
            choices[name] = replace(choices[name], loss=mixture.loss_by_workload[name])
    policy.choices += choices.values()


def _choice_in_context(
    policy: Policy, evidence: Evidence, batch_size: int, kv_len: int, lengths: list[int]
) -> DepthChoice:
    """The choice at one context length: the cost measured there, and the acceptance of answers near that length."""
    table = evidence.costs(batch_size, kv_len)
    nearby = answers_near(evidence.maps, kv_len, lengths)
    has_enough = len(nearby) >= PROMPTS.context
    counts = replay_counts(nearby if has_enough else evidence.maps, table.depths)
    speeds = predict(counts.tokens, counts.rounds, table, ALL, evidence.rule, evidence.seed)
    choice = choice_row(speeds, _identity(policy, evidence, ALL, batch_size), evidence.rule, kv_len)
    if has_enough:
        reason = f"acceptance is that of the {len(nearby)} answers nearest to {kv_len} tokens of context"
    else:
        reason = f"acceptance is that of all prompts: {len(nearby)} answers lie near {kv_len} tokens, "
        reason += f"{PROMPTS.context} are asked"
    return replace(choice, reasons=[*choice.reasons, reason])


def answers_near(maps: Sequence[AcceptanceMap], kv_len: int, lengths: Sequence[int]) -> list[AcceptanceMap]:
    """The answers whose mean context is nearer to `kv_len` than to any other of `lengths`, by ratio.

    Answers stay whole, because a round begins where the one before it ended: a part of an answer would be replayed from
    a wrong position. Maps without the length of their prompt are left out.
    """

    def nearest(tokens: float) -> int:
        return min(lengths, key=lambda length: (abs(math.log(tokens / length)), length))

    contexts = ((m, m.prompt_tokens + m.num_tokens / 2) for m in maps if m.prompt_tokens is not None)
    return [m for m, tokens in contexts if nearest(tokens) == kv_len]


def _round_costs(evidence: Evidence, table: CostTable, batch_size: int) -> list[RoundCost]:
    plain, cycle = round_cost(table.times, evidence.rule.include_host)
    rows = []
    for i, depth in enumerate(table.depths):
        host = float(table.times.host[i]) if table.host_measured else None
        ratio = float(cycle[i] / plain) if table.host_measured and evidence.rule.include_host else None
        rows.append(
            RoundCost(
                evidence.draft_key,
                evidence.maps[0].method,
                batch_size,
                depth,
                t_host_ms=host,
                cost_ratio_with_host=ratio,
                num_blocks=table.num_blocks,
                num_processes=table.num_processes,
                session=evidence.session,
                process=[float(x) for x in table.process[i, : table.num_shared]],
                own=float(np.sqrt((table.process[i, table.num_shared :] ** 2).sum())),
            )
        )
    return rows


def add_tree(policy: Policy, evidence: Evidence) -> Contender:
    """Enter a drafter's tree of one budget into the policy at every batch size, over all prompts at its own depth.

    The map of a tree holds the length of the kept path at each position, so it is replayed at that depth only.
    """
    depth = min(m.k_max for m in evidence.maps)
    contender = None
    for batch_size in evidence.batch_sizes():
        table = evidence.costs(batch_size)
        if depth not in table.depths:
            raise UserError(
                f"cost: a tree of {evidence.tree_budget} has maps of depth {depth}, its draft times are of "
                f"{', '.join(map(str, table.depths[1:]))}; measure both at one depth"
            )
        table = select_depths(table, (0, depth))
        counts = replay_counts(evidence.maps, table.depths)
        speeds = predict(counts.tokens, counts.rounds, table, ALL, evidence.rule, evidence.seed)
        identity = _identity(policy, evidence, ALL, batch_size)
        policy.trees += depth_rows(speeds, table, identity, evidence.tree_budget)[1:]
        contender = contender or _contender(evidence, speeds, choice_row(speeds, identity, evidence.rule))
    assert contender is not None, "cells without a draft phase were refused before"
    return contender


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
