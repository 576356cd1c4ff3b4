"""Step `bench.measure_step_cost`: times the phases of a round on this machine, over batch sizes and KV lengths.

T_target (one row a sequence), T_verify(k + 1 rows), T_draft(k proposals) and the rest of a round, each timed inside the
real decoding loop (phases.py) on the target's own text; prefill apart. All drafters are measured together, against one
plain decoding. Their arms take turns of some tens of milliseconds (slices.py), in several fresh processes in sequence,
until the costs of all arms are known to the asked precision or the time is spent; the step notes which.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import CostCell, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.bench.arms import Arm

NUM_TEXTS = 8


def measure_step_cost(
    target: Target,
    drafts: list[Draft],
    prompts: Prompts,
    tuning: Measurements | None = None,
    *,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    batch_sizes: list[Annotated[int, Field(ge=1, le=1024)]] = [1],  # noqa: B006 - read, never changed
    kv_lengths: list[Annotated[int, Field(ge=16)]] = [128],  # noqa: B006 - read, never changed
    trees: list[Annotated[int, Field(ge=1, le=256)]] = [],  # noqa: B006 - read, never changed
    graphs: bool = False,
    precision: Annotated[float, Field(gt=0.0, le=1.0)] = 0.03,
    seconds: Annotated[float, Field(gt=0.0, le=86_400.0)] = 120.0,
    num_processes: Annotated[int, Field(ge=1, le=32)] = 3,
    tokens_per_block: Annotated[int, Field(ge=16)] = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """T_target, T_verify(k + 1) and T_draft(k) on this machine, in blocks, in several fresh processes.

    Args:
        target: the large model.
        drafts: the drafters, all measured against the same plain decoding.
        prompts: its `test` split gives the text that is decoded.
        tuning: threads and kernels that bench.autotune chose for this target, dtype and machine; without it this step
            chooses for itself.
        max_depth: deepest chain to time, in tokens; 0 is the depth each drafter was trained for.
        batch_sizes: sequences decoded side by side, of different lengths.
        kv_lengths: lengths of the KV cache to measure at, in tokens; each is the middle of what a block runs through.
        trees: budgets (draft tokens verified in a pass) to time as trees too; an empty list times chains only.
        graphs: record the small passes of target and drafter as CUDA graphs; on a CPU the same static passes run
            without being recorded, which is slower.
        precision: half-width of the 95 % interval of a round's cost over a plain step, as a share, at which an arm is
            known well enough (0.03 = 3 %).
        seconds: time budget for measuring; opening the processes comes on top. Precision not reached by then is noted.
        num_processes: fresh processes at least, which take 60 % of the time; more follow while time is left and
            precision is not reached.
        tokens_per_block: tokens decoded for each sequence of one block.
        dtype: arithmetic of target and drafters.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    from components.bench.cost_blocks import Grid, Setting
    from components.bench.cost_study import CostStudy
    from components.bench.cost_texts import longest_context
    from components.bench.end_to_end import check_loop_supports
    from components.bench.subjects import fitting_prompts
    from components.bench.tuning import resolve_tuning
    from components.targets.load import target_facts

    for draft in drafts:
        check_loop_supports(draft, batch_sizes, trees)
    positions = int(target_facts(target)["shape"]["max_position_embeddings"])
    settings = [Setting(size, length) for size in sorted(set(batch_sizes)) for length in sorted(set(kv_lengths))]
    if longest_context(kv_lengths, batch_sizes, tokens_per_block) + 65 > positions:
        raise UserError(
            f"kv_lengths: {max(kv_lengths)} tokens and what a block adds do not fit the target's {positions} "
            "positions: ask for shorter ones"
        )
    encoded = fitting_prompts(target, positions, prompts, "test", 0, ctx)[: max(NUM_TEXTS, *batch_sizes)]
    tuned = resolve_tuning(tuning, target, drafts, encoded[0].ids, dtype, num_threads, ctx, machine)
    arms = plan_arms(drafts, max_depth, trees, rival=tuned.rival and not graphs)
    grid = Grid(tuple(arms), tuple(settings), tokens_per_block)
    ctx.note(
        f"{len(arms)} arms x {len(settings)} settings in {num_processes} processes or more, for {seconds:.0f} s, or "
        f"until every cost is known to {precision:.1%}"
    )
    study = CostStudy(target, drafts, grid, encoded, tuned, dtype, graphs, ctx)
    study.run(seconds, num_processes, precision)
    write_rows(ctx.out, [*study.cells, *study.flags(machine.num_cores)])
    facts = {"draft_keys": [draft.key for draft in drafts], "machine_id": machine.machine_id}
    return Measurements.of_step(
        ctx, {**facts, "precision_asked": precision, **study.facts(), **_headline_facts(study.cells)}
    )


def _headline_facts(cells: Sequence[CostCell]) -> dict[str, Any]:
    """The facts that people look for first: the methods, and their times."""
    return {"methods": sorted({cell.method for cell in cells} - {"none"}), "medians_ms": medians(cells)}


def plan_arms(drafts: Sequence[Draft], max_depth: int, trees: Sequence[int], *, rival: bool) -> list[Arm]:
    """Plain decoding, on both kernels with a rival, and every drafter at every depth and as trees."""
    from components.bench.arms import PLAIN, RIVAL, Arm
    from components.bench.trees import tree_arms
    from components.drafts.files import read_record

    arms = [PLAIN, *([RIVAL] if rival else [])]
    for draft in drafts:
        record = read_record(draft.path)
        method, trained = str(record["method"]), int(record["num_steps"])
        deepest = min(max_depth or trained, int(record["max_depth"]))
        arms += [Arm(method, draft.key, depth) for depth in range(1, deepest + 1)]
        arms += tree_arms(method, draft.key, trained, trees)
    return arms


def medians(cells: Sequence[CostCell]) -> dict[str, float]:
    """Phase -> steady time over all blocks in ms, such as "eagle3 verify k=3" -> 5.2; batch and length if several."""
    from components.speedup.steady import steady

    batches, lengths = ({getattr(cell, name) for cell in cells} for name in ("batch_size", "kv_len"))
    groups: dict[str, list[float]] = {}
    for cell in cells:
        name = cell.phase if cell.depth_k == 0 else f"{cell.method} {cell.phase} k={cell.depth_k}"
        name += "" if cell.tree_budget is None else f" tree={cell.tree_budget}"
        name += f" batch={cell.batch_size}" if len(batches) > 1 else ""
        name += f" kv={cell.kv_len}" if len(lengths) > 1 else ""
        groups.setdefault(name, []).append(cell.median_ns / 1e6)
    return {name: round(steady(times), 4) for name, times in sorted(groups.items())}
