"""Step `bench.measure_step_cost`: what the parts of a round cost on this machine, depth by depth.

T_target (one row), T_verify(k + 1 rows), T_draft(k proposals) and the rest of a round, each timed inside the real
decoding loop (phases.py) on the target's own text, at a given length of the KV cache. Cells are measured in blocks;
within a block all phases and depths take turns in random order on the same text, so that whatever the machine does
meanwhile meets all of them alike.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from components.contract import Context, Draft, Machine, Measurements, Prompts, Target
from components.rows import CostCell, QualityFlag, write_rows

if TYPE_CHECKING:
    from components.bench.cost_blocks import Bench

CONTROL_TOLERANCE = 0.05


def measure_step_cost(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    *,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    kv_lens: list[Annotated[int, Field(ge=16)]] = [128],  # noqa: B006 - read, never changed
    num_blocks: Annotated[int, Field(ge=5, le=200)] = 6,
    tokens_per_block: Annotated[int, Field(ge=16)] = 64,
    dtype: Literal["float32", "bfloat16"] = "float32",
    num_threads: Annotated[int, Field(ge=0)] = 0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """T_target, T_verify(k + 1) and T_draft(k) on this machine, in blocks.

    Args:
        target: the large model.
        draft: the drafter.
        prompts: its `test` split gives the text that is decoded.
        max_depth: deepest chain to time, in tokens; 0 is the depth the drafter was trained for.
        kv_lens: lengths of the KV cache to measure at, in tokens; each is the middle of what a block runs through.
        num_blocks: blocks whose numbers are kept; one more runs first and is thrown away.
        tokens_per_block: tokens decoded for one cell of one block.
        dtype: arithmetic of target and drafter.
        num_threads: threads that torch uses; 0 times 1 and all, and takes what decodes plainly fastest.
    """
    import torch

    from components.bench import clock
    from components.bench.cost_blocks import open_bench

    bench = open_bench(target, draft, prompts, kv_lens, tokens_per_block, dtype, num_threads, max_depth, ctx)
    with torch.inference_mode(), clock.threads(bench.engine.num_threads), clock.quiet_interpreter():
        cells = _all_blocks(bench, num_blocks, ctx)
    conditions = clock.conditions(bench.clock)
    flags = _flags(cells, conditions["load_average"], machine.num_cores, ctx.key[:16], draft.key, bench.method)
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
            "medians_ms": _medians(cells),
        },
    )


def _all_blocks(bench: Bench, num_blocks: int, ctx: Context) -> list[CostCell]:
    """Control, one block for warming up, the kept blocks, control again."""
    cells = bench.control(block=0)
    for block in range(num_blocks + 1):
        measured = bench.block(block)
        if block > 0:
            cells += measured
        ctx.progress(block + 1, num_blocks + 1, "blocks")
    return cells + bench.control(block=num_blocks)


def _medians(cells: list[CostCell]) -> dict[str, float]:
    """Median over blocks in ms, for people: "verify k=3" -> 5.2. KV lengths together."""
    import statistics

    groups: dict[str, list[float]] = {}
    for cell in cells:
        name = cell.phase if cell.depth_k == 0 else f"{cell.phase} k={cell.depth_k}"
        groups.setdefault(name, []).append(cell.median_ns / 1e6)
    return {name: round(statistics.median(times), 4) for name, times in sorted(groups.items())}


def _flags(
    cells: list[CostCell], load: float | None, num_cores: int, session_id: str, draft_key: str, method: str
) -> list[QualityFlag]:
    """Was the machine the same at the end as at the start, and was it ours?"""
    import statistics

    from components.bench.run_flags import LOAD_OF_OTHERS

    control = [c for c in cells if c.phase == "control"]
    before = statistics.median(c.median_ns for c in control if c.block == 0)
    after = statistics.median(c.median_ns for c in control if c.block != 0)
    drift = after / before - 1.0
    flags = []
    if abs(drift) > CONTROL_TOLERANCE:
        detail = (
            f"a plain step took {before / 1e6:.2f} ms before and {after / 1e6:.2f} ms after; measure on a quiet machine"
        )
        flags.append(QualityFlag(session_id, draft_key, method, "control_drift", "warning", drift, detail))
    if load is not None and load > num_cores + LOAD_OF_OTHERS:
        detail = f"load average on {num_cores} cores: other work ran beside this measurement"
        flags.append(QualityFlag(session_id, draft_key, method, "loaded_machine", "warning", load, detail))
    return flags
