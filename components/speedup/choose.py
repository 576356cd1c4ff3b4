"""Choose how deep to draft: acceptance replayed at every depth, against what each depth costs on this machine.

S(k) = AL(k) * T_target / (T_verify(k) + T_draft(k)); see model.py for host time, evaluate.py for the intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.contract import Context, DepthPolicy, Measurements, UserError
from components.rows import AcceptanceMap, CostCell, QualityFlag, read_rows

if TYPE_CHECKING:
    from components.speedup.costs import CostTable
    from components.speedup.evaluate import Rule
    from components.speedup.policy import Policy


def choose_depth(
    acceptance: list[Measurements],
    cost: list[Measurements],
    *,
    tolerance: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.01,
    confidence: Annotated[float, Field(ge=0.5, lt=1.0)] = 0.95,
    num_draws: Annotated[int, Field(ge=200, le=50_000)] = 2000,
    include_host: bool = True,
    ctx: Context,
) -> DepthPolicy:
    """Predict the speedup of every measured depth, per drafter and workload, and pick one.

    Args:
        acceptance: acceptance maps, one measurement for each drafter.
        cost: step times of the same drafters on the machine that will serve them.
        tolerance: share by which a shallower depth's lower bound may lie below the best one and still be taken.
        confidence: probability of beating plain decoding that speculation must reach; below it depth 0 is chosen.
        num_draws: resamples of prompts and timing blocks behind each interval.
        include_host: count measured sampling and bookkeeping time on both sides of the ratio.
    """
    from components.speedup.evaluate import Rule
    from components.speedup.policy import Policy, headline, write_policy

    maps_by_draft = _valid_maps(acceptance, ctx)
    rule = Rule(tolerance, confidence, num_draws, include_host)
    targets = {m.target_key for maps in maps_by_draft.values() for m in maps}
    if len(targets) != 1:
        raise UserError(f"acceptance comes from {len(targets)} targets; a depth is chosen for one")
    cells_by_source = [read_rows(source.path, CostCell) for source in cost]
    policy = Policy(
        selection_id=ctx.key,
        target_key=targets.pop(),
        dtype="",
        kernel="",
        rule=rule.words,
        tolerance=tolerance,
        choices=[],
        evals=[],
        acceptance=[],
        prompts=[],
        rounds=[],
        # What the measuring steps doubted stays in sight.
        flags=[f for source in [*acceptance, *cost] for f in read_rows(source.path, QualityFlag)],
    )
    for done, draft_key in enumerate(sorted(maps_by_draft)):
        _add_draft(policy, maps_by_draft[draft_key], cells_by_source, rule, ctx.seed)
        ctx.progress(done + 1, len(maps_by_draft), "drafters")
    _conclude(policy)
    write_policy(ctx.out, policy)
    facts = headline(policy)
    ctx.note(f"depth {facts['depth_k']} for {facts['method']}: {'; '.join(policy.reasons)}")
    return DepthPolicy.made(ctx, facts)


def _valid_maps(acceptance: list[Measurements], ctx: Context) -> dict[str, list[AcceptanceMap]]:
    """Maps by drafter, with maps that cannot be replayed set aside."""
    by_draft: dict[str, list[AcceptanceMap]] = {}
    for source in acceptance:
        for line, row in enumerate(read_rows(source.path, AcceptanceMap), start=1):
            why = _why_invalid(row)
            if why:
                ctx.set_aside("acceptance_map.jsonl", line, why, row.prompt_id)
            else:
                by_draft.setdefault(row.draft_key, []).append(row)
    if not by_draft:
        raise UserError("acceptance: no usable acceptance maps; run bench.measure_acceptance on at least one prompt")
    for draft_key, maps in by_draft.items():
        repeats = len(maps) - len({m.prompt_id for m in maps})
        if repeats:
            raise UserError(
                f"acceptance of drafter {draft_key[:12]}: {repeats} prompts occur twice; give each measurement once"
            )
    return by_draft


def _why_invalid(row: AcceptanceMap) -> str:
    """Why a map cannot be replayed, or ""."""
    if row.num_tokens < 2:
        return "an answer of fewer than two tokens has no rounds"
    if len(row.accepted) < row.num_tokens - 1:
        return f"{len(row.accepted)} positions for {row.num_tokens} tokens"
    if not all(0 <= a <= row.k_max for a in row.accepted):
        return f"accepted counts outside 0..{row.k_max}"
    return ""


def _add_draft(
    policy: Policy, maps: list[AcceptanceMap], cells_by_source: list[list[CostCell]], rule: Rule, seed: int
) -> None:
    """Evaluate one drafter at every batch size that its cost was measured at, and add what comes out to the policy."""
    from components.speedup.costs import cost_table

    draft_key, method = maps[0].draft_key, maps[0].method
    cells = next((cells for cells in cells_by_source if any(_is_draft_cell(c, draft_key) for c in cells)), None)
    if cells is None:
        raise UserError(
            f"cost: no draft times for {method} ({draft_key[:12]}); give its bench.measure_step_cost in `cost`"
        )
    dtypes = {c.dtype for c in cells}
    wanted = maps[0].dtype if maps[0].dtype in dtypes else sorted(dtypes)[0]
    if len(dtypes) > 1:
        cells = [c for c in cells if c.dtype == wanted]
    for batch_size in sorted({c.batch_size for c in cells if _is_draft_cell(c, draft_key)}):
        table = cost_table(cells, draft_key, batch_size, rule.num_draws, seed)
        policy.dtype, policy.kernel = table.dtype, table.kernel
        _add_batch_size(policy, maps, table, rule, batch_size, seed)


def _is_draft_cell(cell: CostCell, draft_key: str) -> bool:
    return cell.phase == "draft" and cell.draft_key == draft_key


def _add_batch_size(
    policy: Policy, maps: list[AcceptanceMap], table: CostTable, rule: Rule, batch_size: int, seed: int
) -> None:
    """Every workload, and all of them pooled, of one drafter at one batch size."""
    from components.speedup.evaluate import (
        Identity,
        evaluate_depths,
        prompt_counts,
        replay_counts,
        round_cost,
        summarise_acceptance,
    )
    from components.speedup.flags import prediction_flags
    from components.speedup.policy import ALL, RoundCost

    k_max = min(m.k_max for m in maps)
    keep = [i for i, depth in enumerate(table.depths) if depth <= k_max]
    if len(keep) < 2:
        raise UserError(f"no depth of {maps[0].method} has both cost cells and acceptance (maps reach depth {k_max})")
    table = _only_depths(table, keep)
    first_of_draft = not any(s.draft_key == maps[0].draft_key for s in policy.acceptance)
    for workload in [ALL, *sorted({m.workload for m in maps} - {ALL})]:
        mine = [m for m in maps if workload in (ALL, m.workload)]
        who = Identity(policy.selection_id, policy.target_key, maps[0].draft_key, maps[0].method, workload, batch_size)
        counts = replay_counts(mine, table.depths)
        evals, choice = evaluate_depths(counts, table, who, rule, seed)
        summaries = summarise_acceptance(mine, counts, who)
        policy.evals += evals
        policy.choices.append(choice)
        if first_of_draft:
            policy.acceptance += summaries
        if workload == ALL and first_of_draft:
            policy.prompts += prompt_counts(counts, who, {m.prompt_id: m.workload for m in mine})
        if workload == ALL:
            policy.flags += prediction_flags(policy.selection_id, mine, evals, summaries, choice)
    plain, cycle = round_cost(table.times, rule.include_host)
    for i, depth in enumerate(table.depths):
        host = float(table.times.host[i]) if table.host_measured else None
        ratio = float(cycle[i] / plain) if table.host_measured and rule.include_host else None
        key = (maps[0].draft_key, maps[0].method, batch_size, depth)
        policy.rounds.append(RoundCost(*key, t_host_ms=host, cost_ratio_with_host=ratio, num_blocks=table.num_blocks))


def _only_depths(table: CostTable, keep: list[int]) -> CostTable:
    """The table without depths that acceptance does not reach."""
    from components.speedup.costs import StepTimes

    def cut(times: StepTimes) -> StepTimes:
        return StepTimes(times.target, times.verify[..., keep], times.draft[..., keep], times.host[..., keep])

    return table._replace(depths=[table.depths[i] for i in keep], times=cut(table.times), draws=cut(table.draws))


def _conclude(policy: Policy) -> None:
    """The verdict and the winner before anything was measured end to end: the best predicted lower bound."""
    from components.speedup.policy import ALL, faults_of

    pooled = [c for c in policy.choices if c.workload == ALL]
    smallest_batch = min(c.batch_size for c in pooled)
    pooled = [c for c in pooled if c.batch_size == smallest_batch]
    # A drafter whose numbers are at fault wins only if every one is.
    sound = [c for c in pooled if not faults_of(policy, c.draft_key)]
    best = max(sound or pooled, key=lambda c: (c.verdict == "use", c.pred_lo, c.draft_key))
    faults = faults_of(policy, best.draft_key)
    policy.verdict = "invalid" if faults else best.verdict
    policy.reasons = [f"{f.method} {f.code}: {f.detail}" for f in faults] or list(best.reasons)
    if best.verdict == "use":
        policy.winner = {"draft_key": best.draft_key, "method": best.method, "depth_k": best.depth_k}
