"""Step `speedup.choose_depth`: acceptance replayed at every depth, against what each depth costs on this machine.

S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)); predict.py adds host time and intervals.

One drafter is evaluated at every batch size, workload and context length that was measured; its acceptance is replayed
from its maps, with the counts of every prompt and all conventions of its length.

Method, draft vocabulary and tree budget are chosen by the same model as depth. A contender is a drafter in one setting
at its chosen depth. All share the prompts, and the processes and plain baseline where one measurement timed them, and
are drawn together: P(best) and regret are paired. The rule is that of depths: the smallest (fewest draft tokens to
verify, then the smallest draft vocabulary) that is as good as the best (`near_best`). Winner and verdict are those of
the predictions alone, before any end-to-end measurement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.methods import decoding_loop_of
from components.policy import (
    Policy,
    RankedDrafter,
    RoundCost,
    Winner,
    extended,
    faults_of,
    read_policy,
    served_choices,
    served_depths,
)
from components.refusals import PROMPTS
from components.rows import ALL, AcceptanceMap, CostCell, DepthChoice, PredictionKey, QualityFlag, read_rows
from components.speedup.acceptance_changes import rounded_of, weights_costs
from components.speedup.bootstrap import Estimate, losses, near_best, p_best
from components.speedup.policy_markdown import policy_summary, write_policy
from components.speedup.prediction.costs import CostTable, Setting, contexts_of, cost_table, round_cost, select_depths
from components.speedup.prediction.flags import QualityIssue, baseline_flags, prediction_flags, thread_flags
from components.speedup.prediction.predict import Evaluated, Rule, evaluate, one_depth_for_all
from components.speedup.prediction.replay import (
    Counts,
    acceptance_by_context,
    prompt_counts,
    replay_counts,
    summarise_acceptance,
)


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
    groups = valid_maps(acceptance, ctx)
    rule = Rule(tolerance, confidence, num_draws, include_host)
    targets = {m.target_key for maps in groups.values() for m in maps}
    if len(targets) != 1:
        raise UserError(f"acceptance comes from {len(targets)} targets; a depth is chosen for one")
    cells_by_source = [valid_cells(source, ctx) for source in cost]
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
        target_model=_first_fact(acceptance, "model"),
        prompt_format=_first_fact(acceptance, "prompt_format"),
    )
    vocabularies = {str(a.info.get("draft_key")): a.info.get("draft_vocab_size") for a in acceptance}
    contenders: list[Contender] = []
    threads: dict[str, int] = {}
    plain_steps: dict[tuple[str, str], tuple[int, float]] = {}
    for index, (draft_key, tree_budget) in enumerate(sorted(groups, key=lambda group: (group[0], group[1] or 0))):
        maps = groups[draft_key, tree_budget]
        session, cells = cells_of(maps[0], cells_by_source)
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


def _first_fact(measured: Sequence[Measurements], name: str) -> str:
    """A text that the first of some measurements records, which is the same for all; "" where none does."""
    return next((str(one.info[name]) for one in measured if one.info.get(name)), "")


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


def valid_maps(acceptance: list[Measurements], ctx: Context) -> dict[Group, list[AcceptanceMap]]:
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
    if row.confidence and len(row.confidence) < row.num_tokens - 1:
        return f"confidences of {len(row.confidence)} positions for {row.num_tokens} tokens"
    if not all(len(chain) == row.k_max and all(0.0 <= c <= 1.0 for c in chain) for chain in row.confidence):
        return f"a chain's confidences are not {row.k_max} probabilities"
    return ""


def valid_cells(source: Measurements, ctx: Context) -> list[CostCell]:
    """The cost cells of a measurement; impossible times are set aside."""
    cells = []
    for line, cell in enumerate(read_rows(source.path, CostCell), start=1):
        shortest = 0.0 if cell.phase in ("draft", "host") else 1.0  # ns: a pass of the target takes time
        if shortest <= cell.median_ns < math.inf:
            cells.append(cell)
        else:
            ctx.set_aside("cost_cell.jsonl", line, f"{cell.phase} took {cell.median_ns} ns", cell.draft_key)
    return cells


def cells_of(row: AcceptanceMap, cells_by_source: list[list[CostCell]]) -> tuple[int, list[CostCell]]:
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

    def evaluate(
        self, counts: Counts, table: CostTable, identity: PredictionKey, kv_len: int | None = None
    ) -> Evaluated:
        """Its predictions and choice from replayed counts. kv_len: the context length of the costs, None for all."""
        both = (counts.tokens, counts.rounds)
        return evaluate(both, table, identity, self.rule, self.seed, tree_budget=self.tree_budget, kv_len=kv_len)


def with_chain(policy: Policy, evidence: Evidence) -> tuple[Policy, Contender]:
    """The policy with a drafter's chains, and its contender for the ranking."""
    contender = None
    for batch_size in evidence.batch_sizes():
        table = evidence.costs(batch_size)
        policy, pooled = _with_batch_size(policy, evidence, table, batch_size)
        lengths = contexts_of(evidence.cells, evidence.draft_key, batch_size)
        contexts = [_choice_in_context(policy, evidence, batch_size, kv_len, lengths) for kv_len in lengths]
        policy = extended(replace(policy, dtype=table.dtype, kernel=table.kernel), contexts=contexts)
        contender = contender or Contender.of(pooled, evidence.tree_budget, evidence.draft_vocab)
    assert contender is not None, "cells without a draft phase were refused before"
    return policy, contender


def _identity(policy: Policy, evidence: Evidence, workload: str, batch_size: int) -> PredictionKey:
    first = evidence.maps[0]
    return PredictionKey(policy.selection_id, policy.target_key, first.draft_key, first.method, workload, batch_size)


def _with_batch_size(policy: Policy, evidence: Evidence, table: CostTable, batch_size: int) -> tuple[Policy, Evaluated]:
    """The policy with every workload, all pooled and their mixture at one batch size; the result over all pooled."""
    maps = evidence.maps
    is_first = not any(s.draft_key == evidence.draft_key for s in policy.acceptance)
    results: dict[str, Evaluated] = {}
    tokens: dict[str, float] = {}
    for workload in [ALL, *sorted({m.workload for m in maps} - {ALL})]:
        workload_maps = [m for m in maps if workload in (ALL, m.workload)]
        identity = _identity(policy, evidence, workload, batch_size)
        counts = replay_counts(workload_maps, table.depths)
        result = results[workload] = evidence.evaluate(counts, table, identity)
        tokens[workload] = float(counts.tokens[:, 0].sum())
        summaries = summarise_acceptance(workload_maps, counts, identity.draft_key, identity.method, workload)
        policy = extended(policy, evals=result.evals, acceptance=summaries if is_first else [])
        if workload == ALL:
            flags = prediction_flags(policy.selection_id, workload_maps, result, summaries, table)
            prompts = prompt_counts(counts, identity.draft_key, {m.prompt_id: m.workload for m in workload_maps})
            policy = extended(policy, flags=flags, prompts=prompts if is_first else [])
            if is_first:
                rule = evidence.rule
                by_context = acceptance_by_context(maps, table.depths, identity, rule.num_draws, evidence.seed)
                policy = extended(policy, acceptance_by_context=by_context)
    identity = _identity(policy, evidence, ALL, batch_size)
    mixtures, choices = one_depth_for_all(results, evidence.mixture, tokens, identity, evidence.rule)
    rounds = _round_costs(evidence, table, batch_size)
    return extended(policy, mixtures=mixtures, choices=choices.values(), rounds=rounds), results[ALL]


def _choice_in_context(
    policy: Policy, evidence: Evidence, batch_size: int, kv_len: int, lengths: list[int]
) -> DepthChoice:
    """The choice at one context length: the cost measured there, and the acceptance of answers near that length."""
    table = evidence.costs(batch_size, kv_len)
    nearby = answers_near(evidence.maps, kv_len, lengths)
    has_enough = len(nearby) >= PROMPTS.context
    counts = replay_counts(nearby if has_enough else evidence.maps, table.depths)
    identity = _identity(policy, evidence, ALL, batch_size)
    choice = evidence.evaluate(counts, table, identity, kv_len).choice
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
        identity = _identity(policy, evidence, ALL, batch_size)
        result = evidence.evaluate(counts, table, identity)
        policy = extended(policy, trees=result.evals[1:])
        contender = contender or Contender.of(result, evidence.tree_budget, evidence.draft_vocab)
    assert contender is not None, "cells without a draft phase were refused before"
    return policy, contender


class Contender(NamedTuple):
    """One drafter in one setting, to be ranked. speedup: at its chosen depth, 1 at depth 0."""

    draft_key: str
    method: str
    depth_k: int
    tree_budget: int | None
    draft_vocab: int | None
    speedup: Estimate
    verdict: str

    @classmethod
    def of(cls, result: Evaluated, tree_budget: int | None, draft_vocab: int | None) -> Contender:
        """The contender of a drafter's result over all workloads."""
        speeds, choice = result.speeds, result.choice
        depth = choice.depth_k
        speedup = speeds.speedup[speeds.depths.index(depth)]
        budget = tree_budget if depth else None
        return cls(choice.draft_key, choice.method, depth, budget, draft_vocab, speedup, choice.verdict)


def rank(contenders: Sequence[Contender], tolerance: float, confidence: float) -> list[RankedDrafter]:
    """Rank by least expected loss; exactly one is chosen, of those worth using if there are any."""
    draws = np.stack([e.speedup.draws for e in contenders], axis=1)
    wins, regret = p_best(draws), losses(draws).mean(axis=0)
    bounds = [e.speedup.interval() for e in contenders]
    eligible = [i for i, e in enumerate(contenders) if e.verdict == "use"] or list(range(len(contenders)))
    near_best_indices = [eligible[i] for i in near_best(draws[:, eligible], tolerance, confidence)]
    best = min(near_best_indices, key=lambda i: (*_size(contenders[i]), regret[i], contenders[i].draft_key))
    order = sorted(range(len(contenders)), key=lambda i: (regret[i], contenders[i].draft_key))
    return [
        RankedDrafter(
            draft_key=contenders[i].draft_key,
            method=contenders[i].method,
            depth_k=contenders[i].depth_k,
            tree_budget=contenders[i].tree_budget,
            draft_vocab=contenders[i].draft_vocab,
            speedup_pred=contenders[i].speedup.value,
            pred_lo=bounds[i][0],
            pred_hi=bounds[i][1],
            p_best=float(wins[i]),
            regret=float(regret[i]),
            chosen=i == best,
        )
        for i in order
    ]


def _size(contender: Contender) -> tuple[int, float]:
    """(draft tokens to verify, draft vocabulary); an unknown vocabulary counts as the largest."""
    num_drafted = contender.depth_k if contender.tree_budget is None else contender.tree_budget
    return num_drafted, float("inf") if contender.draft_vocab is None else contender.draft_vocab


def conclude(policy: Policy, contenders: Sequence[Contender], rule: Rule) -> Policy:
    """The policy with its ranking, winner, verdict and reasons.

    contenders: every drafter in every setting, over all workloads, at its smallest batch size. The winner is a chain,
    since chains are published and served; a tree that is predicted to beat it raises a flag. Where only trees were
    measured, the best of them wins.
    """
    ranking = rank(contenders, rule.tolerance, rule.confidence)
    # A drafter with maps of trees alone has no chosen depth, whether or not a tree is worth drafting.
    chosen_for = {c.draft_key for c in policy.choices if c.workload == ALL}
    eligible = [e for e in contenders if e.draft_key in chosen_for]
    chains = [e for e in eligible if e.tree_budget is None] or eligible
    # Drafters with faults are excluded, unless all have faults.
    without_faults = [e for e in chains if not faults_of(policy, e.draft_key)] or chains
    winner = next(c for c in rank(without_faults, rule.tolerance, rule.confidence) if c.chosen)
    winner_choices = [c for c in policy.choices if (c.draft_key, c.workload) == (winner.draft_key, ALL)]
    best = min(winner_choices, key=lambda c: c.batch_size)
    faults = faults_of(policy, best.draft_key)
    policy = replace(
        policy,
        ranking=ranking,
        verdict="invalid" if faults else best.verdict,
        reasons=[f"{f.method} {f.code}: {f.detail}" for f in faults] or list(best.reasons),
        # Above 0 it is worth using; or worth a try, where too little was measured for a verdict.
        winner=Winner(best.draft_key, best.method, best.depth_k) if best.depth_k > 0 else None,
        judged=best.draft_key,
    )
    top = next(c for c in ranking if c.chosen)
    if top.tree_budget is not None and winner.tree_budget is None:
        detail = (
            f"a tree of {top.tree_budget} guesses, depth {top.depth_k}, is predicted to be {top.speedup_pred:.2f}x "
            f"[{top.pred_lo:.2f}, {top.pred_hi:.2f}]; the best chain is depth {best.depth_k}, {best.speedup_pred:.2f}x"
        )
        issue = QualityIssue("tree_predicted_faster", "info", top.speedup_pred, detail)
        policy = extended(policy, flags=[issue.to_flag(policy.selection_id, top.draft_key, top.method)])
    return policy
