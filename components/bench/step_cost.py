"""Step `bench.measure_step_cost`: what the parts of a round cost on this machine, over batch sizes and KV lengths.

T_target (one row a sequence), T_verify(k + 1 rows), T_draft(k proposals) and the rest of a round, each timed inside the
real decoding loop (phases.py) on the target's own text; prefill apart. Cells are measured in blocks; within a block all
phases, depths, batch sizes and lengths take turns in random order on the same texts, so that whatever the machine does
meanwhile meets all of them alike. A control runs at both ends: if it drifts beyond a bound the blocks are measured
again, and after so many attempts the step fails, because cells of a machine that changed cannot be compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.rows import CostCell, QualityFlag, write_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from components.bench.cost_blocks import Bench

WORTH_A_WARNING = 0.05  # drift of the control that is within the bound but worth knowing


def measure_step_cost(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    tuning: Measurements | None = None,
    *,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    batch_sizes: list[Annotated[int, Field(ge=1, le=1024)]] = [1],  # noqa: B006 - read, never changed
    kv_lengths: list[Annotated[int, Field(ge=16)]] = [128],  # noqa: B006 - read, never changed
    trees: list[Annotated[int, Field(ge=1, le=256)]] = [],  # noqa: B006 - read, never changed
    graphs: bool = False,
    num_blocks: Annotated[int, Field(ge=5, le=200)] = 6,
    tokens_per_block: Annotated[int, Field(ge=16)] = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    max_drift: Annotated[float, Field(gt=0.0, le=100.0)] = 0.1,
    drift_retries: Annotated[int, Field(ge=0, le=20)] = 2,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """T_target, T_verify(k + 1) and T_draft(k) on this machine, in blocks.

    Args:
        target: the large model.
        draft: the drafter.
        prompts: its `test` split gives the text that is decoded.
        tuning: threads and kernels that bench.autotune chose for this target, dtype and machine; without it this step
            chooses for itself.
        max_depth: deepest chain to time, in tokens; 0 is the depth the drafter was trained for.
        batch_sizes: sequences decoded side by side, of different lengths.
        kv_lengths: lengths of the KV cache to measure at, in tokens; each is the middle of what a block runs through.
        trees: budgets (guesses verified in a pass) to time as trees too; an empty list times chains only.
        graphs: record the small passes of target and drafter as CUDA graphs; on a CPU the same static passes run
            without being recorded, which is slower.
        num_blocks: blocks whose numbers are kept; one more runs first and is thrown away.
        tokens_per_block: tokens decoded for each sequence of one cell of one block.
        dtype: arithmetic of target and drafter.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
        max_drift: largest share by which the control may differ between start and end (0.1 = 10 %).
        drift_retries: times that all blocks are measured again when it did, before the step fails.
    """
    import torch

    from components.bench import clock
    from components.bench.cost_blocks import open_bench
    from components.bench.tuning import read_tuning

    tuned = read_tuning(tuning, target, dtype, num_threads, ctx, machine)
    bench = open_bench(
        target,
        draft,
        prompts,
        kv_lengths,
        batch_sizes,
        tokens_per_block,
        dtype,
        num_threads,
        tuned,
        max_depth,
        trees,
        graphs,
        ctx,
    )
    if bench.left_out:
        ctx.note(f"left out, since their caches do not fit the memory: {', '.join(bench.left_out)}")
    with torch.inference_mode(), clock.threads(bench.engine.num_threads), clock.quiet_interpreter():
        cells, drifts = _steady_blocks(bench, num_blocks, max_drift, drift_retries, ctx)
    conditions = clock.conditions(bench.engine.target.device)
    flags = _flags(drifts[-1], conditions["load_average"], machine.num_cores, ctx.key[:16], draft.key, bench.method)
    write_rows(ctx.out, [*cells, *flags])
    return Measurements.made(
        ctx,
        {
            "method": bench.method,
            "draft_key": draft.key,
            "dtype": dtype,
            "kernel": bench.engine.target.kernel,
            "num_threads": bench.engine.num_threads,
            "engines_tried": bench.engine.tried,
            "num_blocks": num_blocks,
            "machine_id": machine.machine_id,
            **conditions,
            "control_drift": drifts,
            "left_out": bench.left_out,
            "medians_ms": _medians(cells),
        },
    )


def _steady_blocks(
    bench: Bench, num_blocks: int, max_drift: float, retries: int, ctx: Context
) -> tuple[list[CostCell], list[float]]:
    """The cells of the first attempt whose control held, and the drift of every attempt.

    An attempt: control, the blocks, control again; the first has one more block before, to warm up. Raises UserError
    when none held.
    """
    bench.block(0)
    total, drifts = num_blocks * (retries + 1), []
    before = bench.control(block=0)
    for attempt in range(retries + 1):
        cells: list[CostCell] = []
        for block in range(1, num_blocks + 1):
            cells += bench.block(block)
            ctx.progress(attempt * num_blocks + block, total if attempt else num_blocks, "blocks")
        after = bench.control(block=num_blocks)
        drifts.append(control_drift(before, after))
        if abs(drifts[-1]) <= max_drift:
            return [*before, *cells, *after], drifts
        ctx.note(f"control drifted by {drifts[-1]:+.1%} (bound {max_drift:.0%}): attempt {attempt + 1} is thrown away")
        before = after
    raise UserError(
        f"step_cost: a plain step changed by {', '.join(f'{drift:+.1%}' for drift in drifts)} while measuring, in "
        f"{len(drifts)} attempts (bound {max_drift:.0%}): measure on a quiet machine, or allow more with max_drift"
    )


def control_drift(before: Sequence[CostCell], after: Sequence[CostCell]) -> float:
    """Time of a plain step at the end over that at the start, minus 1; the quickest run of each speaks for it.

    Other work makes single runs longer, never shorter; a clock that fell, or work that stays, makes all of them longer.
    """
    return min(cell.median_ns for cell in after) / min(cell.median_ns for cell in before) - 1.0


def _medians(cells: list[CostCell]) -> dict[str, float]:
    """Median over blocks in ms, for people: "verify k=3" -> 5.2; batch and length named where there are several."""
    import statistics

    batches, lengths = ({getattr(cell, name) for cell in cells} for name in ("batch_size", "kv_len"))
    groups: dict[str, list[float]] = {}
    for cell in cells:
        name = cell.phase if cell.depth_k == 0 else f"{cell.phase} k={cell.depth_k}"
        name += "" if cell.tree_budget is None else f" tree={cell.tree_budget}"
        name += f" batch={cell.batch_size}" if len(batches) > 1 else ""
        name += f" kv={cell.kv_len}" if len(lengths) > 1 else ""
        groups.setdefault(name, []).append(cell.median_ns / 1e6)
    return {name: round(statistics.median(times), 4) for name, times in sorted(groups.items())}


def _flags(
    drift: float, load: float | None, num_cores: int, session_id: str, draft_key: str, method: str
) -> list[QualityFlag]:
    """Was the machine the same at the end as at the start, and was it ours?"""
    from components.bench.run_flags import LOAD_OF_OTHERS

    flags = []
    if abs(drift) > WORTH_A_WARNING:
        detail = "a plain step changed by this share between start and end; measure on a quiet machine"
        flags.append(QualityFlag(session_id, draft_key, method, "control_drift", "warning", drift, detail))
    if load is not None and load > num_cores + LOAD_OF_OTHERS:
        detail = f"load average on {num_cores} cores: other work ran beside this measurement"
        flags.append(QualityFlag(session_id, draft_key, method, "loaded_machine", "warning", load, detail))
    return flags
