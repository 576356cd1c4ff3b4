"""Step `speedup.choose_depth`: acceptance replayed at every depth, against what each depth costs on this machine.

S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)); model.py adds host time, predict.py the intervals.
"""

from __future__ import annotations

import math

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.policy import Policy, read_policy, served_choices, served_depths
from components.rows import AcceptanceMap, CostCell, QualityFlag, read_rows
from components.speedup.policy_markdown import policy_summary, write_policy
from components.speedup.prediction.evidence import Evidence, add_chain, add_tree
from components.speedup.prediction.flags import baseline_flags, thread_flags
from components.speedup.prediction.predict import Rule
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
    plain_steps: dict[tuple[str, str], tuple[int, float]] = {}
    for index, (draft_key, tree_budget) in enumerate(sorted(groups, key=lambda group: (group[0], group[1] or 0))):
        maps = groups[draft_key, tree_budget]
        session, cells = _cells_of(maps[0], cells_by_source)
        policy.threads.setdefault(draft_key, cells[0].num_threads)  # of its chains, which come first and are served
        vocabulary = vocabularies.get(draft_key)
        evidence = Evidence(maps, cells, tree_budget, vocabulary, mixture or {}, rule, ctx.seed, session)
        plain_steps.setdefault((draft_key, maps[0].method), (session, evidence.plain_step()))
        contenders += [add_chain(policy, evidence) if tree_budget is None else add_tree(policy, evidence)]
        ctx.progress(index + 1, len(groups), "drafters")
    methods = {(maps[0].draft_key, maps[0].method) for maps in groups.values()}
    policy.flags += thread_flags(ctx.key, {drafter: policy.threads[drafter[0]] for drafter in methods})
    policy.flags += baseline_flags(ctx.key, plain_steps)
    conclude(policy, contenders, rule)
    _add_weights_costs(policy, groups, num_draws, ctx)
    write_policy(ctx.out, policy)
    facts = policy_summary(policy)
    ctx.note(f"depth {facts['depth_k']} for {facts['method']}: {'; '.join(policy.reasons)}")
    return DepthPolicy.of_step(ctx, facts)


Group = tuple[str, int | None]  # draft_key, tree_budget


def _add_weights_costs(policy: Policy, groups: dict[Group, list[AcceptanceMap]], num_draws: int, ctx: Context) -> None:
    """Enter the cost of rounding weights, and the storage of each rounded drafter as its role."""

    chains = {key: maps for (key, budget), maps in groups.items() if budget is None}
    depths = {c.draft_key: c.depth_k for key in chains for c in served_choices(policy, key)}
    policy.weights = weights_costs(chains, depths, num_draws, ctx.seed)
    policy.roles |= {key: rounded.weights for key, maps in chains.items() if (rounded := rounded_of(maps))}
    for cost in policy.weights:
        ctx.note(cost.summary_line)


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
