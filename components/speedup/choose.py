"""Step `speedup.choose_depth`: acceptance replayed at every depth, against what each depth costs on this machine.

S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)); model.py adds host time, predict.py the intervals.

One drafter is evaluated at every batch size, workload and context length that was measured; its acceptance is replayed
from its maps, with the counts of every prompt and all conventions of its length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.definitions import al, al_macro, al_proxy, al_uncut
from components.methods import decoding_loop_of
from components.policy import (
    AcceptanceSummary,
    Mixture,
    Policy,
    PromptCounts,
    RoundCost,
    extended,
    read_policy,
    served_choices,
    served_depths,
)
from components.rows import ALL, AcceptanceMap, CostCell, DepthChoice, QualityFlag, read_rows
from components.speedup.bootstrap import PROMPTS, Floats
from components.speedup.policy_markdown import policy_summary, write_policy
from components.speedup.prediction.costs import CostTable, Setting, contexts_of, cost_table, round_cost, select_depths
from components.speedup.prediction.flags import baseline_flags, prediction_flags, thread_flags
from components.speedup.prediction.mixture import one_depth_for_all, stated_shares
from components.speedup.prediction.predict import Identity, Rule, Speeds, choice_row, depth_rows, predict
from components.speedup.prediction.replay import DepthCounts, count
from components.speedup.quantisation_cost import rounded_of, weights_costs
from components.speedup.select import Contender, conclude


def choose_depth(
    acceptance: list[Measurements],
    cost: list[Measurements],
    champion: DepthPolicy | None,
    *,
    tolerance: float,
    confidence: float,
    mixture: dict[str, float] | None,
    num_draws: int,
    include_host: bool,
    ctx: Context,
) -> DepthPolicy:
    """The step `speedup.choose_depth`; its settings are explained in components/speedup/steps.py."""
    groups = _valid_maps(acceptance, ctx)
    rule = Rule(tolerance, confidence, num_draws, include_host)
    targets = {m.target_key for maps in groups.values() for m in maps}
    if len(targets) != 1:
        raise UserError(f"acceptance comes from {len(targets)} targets; a depth is chosen for one")
    cells_by_source = [_valid_cells(source, ctx) for source in cost]
    policy = Policy(
        selection_id=ctx.key,
        target_key=targets.pop(),
        dtype="",
        kernel="",
        rule=rule.description,
        tolerance=tolerance,
        confidence=confidence,
        choices=[],
        evals=[],
        acceptance=[],
        prompts=[],
        rounds=[],
        # Flags of the measuring steps are passed on.
        flags=[f for source in [*acceptance, *cost] for f in read_rows(source.path, QualityFlag)],
        served=served_depths(read_policy(champion.path)) if champion is not None else {},
    )
    vocabularies = {str(a.info.get("draft_key")): a.info.get("draft_vocab_size") for a in acceptance}
    contenders: list[Contender] = []
    threads: dict[str, int] = {}
    plain_steps: dict[tuple[str, str], tuple[int, float]] = {}
    for index, (draft_key, tree_budget) in enumerate(sorted(groups, key=lambda group: (group[0], group[1] or 0))):
        maps = groups[draft_key, tree_budget]
        session, cells = _cells_of(maps[0], cells_by_source)
        threads.setdefault(draft_key, cells[0].num_threads)  # of its chains, which come first and are served
        vocabulary = vocabularies.get(draft_key)
        evidence = Evidence(maps, cells, tree_budget, vocabulary, mixture or {}, rule, ctx.seed, session)
        plain_steps.setdefault((draft_key, maps[0].method), (session, evidence.plain_step()))
        policy, contender = (with_chain if tree_budget is None else with_tree)(policy, evidence)
        contenders.append(contender)
        ctx.progress(index + 1, len(groups), "drafters")
    methods = {(maps[0].draft_key, maps[0].method) for maps in groups.values()}
    policy = extended(
        replace(policy, threads=threads),
        flags=[
            *thread_flags(ctx.key, {drafter: threads[drafter[0]] for drafter in methods}),
            *baseline_flags(ctx.key, plain_steps),
        ],
    )
    policy = _with_weights_costs(conclude(policy, contenders, rule), groups, num_draws, ctx)
    write_policy(ctx.out, policy)
    facts = policy_summary(policy)
    ctx.note(f"depth {facts['depth_k']} for {facts['method']}: {'; '.join(policy.reasons)}")
    return DepthPolicy.of_step(ctx, facts)


Group = tuple[str, int | None]  # draft_key, tree_budget


def _with_weights_costs(
    policy: Policy, groups: dict[Group, list[AcceptanceMap]], num_draws: int, ctx: Context
) -> Policy:
    """The policy with the cost of rounding weights, and the storage of each rounded drafter as its role."""
    chains = {key: maps for (key, budget), maps in groups.items() if budget is None}
    depths = {c.draft_key: c.depth_k for key in chains for c in served_choices(policy, key)}
    costs = weights_costs(chains, depths, num_draws, ctx.seed)
    for cost in costs:
        ctx.note(cost.summary_line)
    roles = {key: rounded.weights for key, maps in chains.items() if (rounded := rounded_of(maps))}
    return replace(policy, weights=costs, roles=policy.roles | roles)


def _valid_maps(acceptance: list[Measurements], ctx: Context) -> dict[Group, list[AcceptanceMap]]:
    """Maps by drafter and tree budget; maps that cannot be replayed are set aside."""
    groups: dict[Group, list[AcceptanceMap]] = {}
    for source in acceptance:
        for line, row in enumerate(read_rows(source.path, AcceptanceMap), start=1):
            fault = _map_fault(row)
            if fault:
                ctx.set_aside("acceptance_map.jsonl", line, fault, row.prompt_id)
            else:
                groups.setdefault((row.draft_key, row.tree_budget), []).append(row)
    if not any(budget is None for _, budget in groups):
        raise UserError("acceptance: no usable acceptance maps; run bench.measure_acceptance on at least one prompt")
    for (draft_key, _), maps in groups.items():
        repeats = len(maps) - len({m.prompt_id for m in maps})
        if repeats:
            raise UserError(
                f"acceptance of drafter {draft_key[:12]}: {repeats} prompts occur twice; give each measurement once"
            )
    return groups


def _map_fault(row: AcceptanceMap) -> str:
    """Why a map cannot be replayed, or ""."""
    if row.num_tokens < 2:
        return "an answer of fewer than two tokens has no rounds"
    if len(row.accepted) < row.num_tokens - 1:
        return f"{len(row.accepted)} positions for {row.num_tokens} tokens"
    if not all(0 <= a <= row.k_max for a in row.accepted):
        return f"accepted counts outside 0..{row.k_max}"
    return ""


def _valid_cells(source: Measurements, ctx: Context) -> list[CostCell]:
    """The cost cells of a measurement; impossible times are set aside."""
    cells = []
    for line, cell in enumerate(read_rows(source.path, CostCell), start=1):
        shortest = 0.0 if cell.phase in ("draft", "host") else 1.0  # ns: a pass of the target takes time
        if shortest <= cell.median_ns < math.inf:
            cells.append(cell)
        else:
            ctx.set_aside("cost_cell.jsonl", line, f"{cell.phase} took {cell.median_ns} ns", cell.draft_key)
    return cells


def _cells_of(row: AcceptanceMap, cells_by_source: list[list[CostCell]]) -> tuple[int, list[CostCell]]:
    """(index of the measurement, its cost cells) for a map's drafter, in the map's dtype where there are several."""

    def is_cost_of_drafter(cell: CostCell) -> bool:
        return (cell.phase, cell.draft_key, cell.tree_budget) == ("draft", row.draft_key, row.tree_budget)

    session = next((i for i, cells in enumerate(cells_by_source) if any(map(is_cost_of_drafter, cells))), None)
    if session is None:
        tree = "" if row.tree_budget is None else f" as a tree of {row.tree_budget}"
        raise UserError(
            f"cost: no draft times for {row.method} ({row.draft_key[:12]}){tree}; "
            "give its bench.measure_step_cost in `cost`"
        )
    cells = cells_by_source[session]
    dtypes = {c.dtype for c in cells}
    dtype = row.dtype if row.dtype in dtypes else min(dtypes)
    return session, [c for c in cells if c.dtype == dtype]


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


def with_chain(policy: Policy, evidence: Evidence) -> tuple[Policy, Contender]:
    """The policy with a drafter's chains, and its contender for the ranking."""
    contender = None
    for batch_size in evidence.batch_sizes():
        table = evidence.costs(batch_size)
        policy, speeds, choice = _with_batch_size(policy, evidence, table, batch_size)
        lengths = contexts_of(evidence.cells, evidence.draft_key, batch_size)
        contexts = [_choice_in_context(policy, evidence, batch_size, kv_len, lengths) for kv_len in lengths]
        policy = extended(replace(policy, dtype=table.dtype, kernel=table.kernel), contexts=contexts)
        contender = contender or _contender(evidence, speeds, choice)
    assert contender is not None, "cells without a draft phase were refused before"
    return policy, contender


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


def _with_batch_size(
    policy: Policy, evidence: Evidence, table: CostTable, batch_size: int
) -> tuple[Policy, Speeds, DepthChoice]:
    """The policy with every workload, all pooled and their mixture at one batch size; the pooled speeds and choice."""
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
        policy = extended(policy, evals=evals, acceptance=summaries if is_first else [])
        if workload == ALL:
            flags = prediction_flags(
                policy.selection_id, workload_maps, evals, speeds[ALL], summaries, choices[ALL], table
            )
            prompts = prompt_counts(counts, identity.draft_key, {m.prompt_id: m.workload for m in workload_maps})
            policy = extended(policy, flags=flags, prompts=prompts if is_first else [])
    mixtures, choices = _one_depth_for_all(policy, evidence, speeds, choices, tokens, batch_size)
    rounds = _round_costs(evidence, table, batch_size)
    policy = extended(policy, mixtures=mixtures, choices=choices.values(), rounds=rounds)
    return policy, speeds[ALL], choices[ALL]


def _one_depth_for_all(
    policy: Policy,
    evidence: Evidence,
    speeds: dict[str, Speeds],
    choices: dict[str, DepthChoice],
    tokens: Mapping[str, float],
    batch_size: int,
) -> tuple[list[Mixture], dict[str, DepthChoice]]:
    """The choices with the loss of one depth for all workloads; a stated mixture adds a choice of its own."""
    workloads = [name for name in speeds if name != ALL]
    shares = stated_shares(evidence.mixture, workloads) if evidence.mixture else {}
    if len(workloads) < 2 and not shares:
        return [], choices
    measured = {name: tokens[name] / sum(tokens[w] for w in workloads) for name in workloads}
    identity = _identity(policy, evidence, ALL, batch_size)
    by_workload = {name: speeds[name] for name in workloads}
    mixture, choices = one_depth_for_all(
        by_workload, shares or measured, None if shares else choices[ALL], choices, identity, evidence.rule
    )
    return [mixture], choices


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


def with_tree(policy: Policy, evidence: Evidence) -> tuple[Policy, Contender]:
    """The policy with a drafter's tree of one budget at every batch size, over all prompts at its own depth.

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
        policy = extended(policy, trees=depth_rows(speeds, table, identity, evidence.tree_budget)[1:])
        contender = contender or _contender(evidence, speeds, choice_row(speeds, identity, evidence.rule))
    assert contender is not None, "cells without a draft phase were refused before"
    return policy, contender


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
