"""Step `bench.autotune`: chooses, once for a run, the threads and kernels on which plain decoding is fastest.

Measuring steps take it as their input `tuning`, so that prediction and decoding use the same threads and kernels, and
every drafter is timed on the same target. It times longer than a step that chooses for itself, so that a noisy second
does not decide.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.contract import Context, Draft, Machine, Measurements, Prompts, Target


def autotune(
    target: Target,
    prompts: Prompts,
    drafts: list[Draft] | None = None,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seconds: Annotated[float, Field(ge=0.0, le=600.0)] = 3.0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time plain decoding on 1 and on all threads, each with its quickest kernels, and choose the faster.

    It writes no rows: the choice and the trials are in its `info`.

    Args:
        target: the large model.
        prompts: after the first prompt of its `test` split that fits, plain decoding is timed.
        drafts: drafters whose kernels are chosen too; without them each process that measures one picks its own.
        dtype: arithmetic of target and drafters.
        seconds: that the thread counts take turns for, at least; 0 takes no more time than a step that chooses for
            itself.
    """
    import torch

    from components.bench import clock
    from components.bench.calibration import TOKENS, choose_engine
    from components.bench.subjects import fitting_prompts
    from components.targets.load import target_facts

    positions = int(target_facts(target)["shape"]["max_position_embeddings"])
    context = fitting_prompts(target, positions, prompts, "test", TOKENS, ctx)[0].ids
    with clock.quiet_interpreter():
        tuned = choose_engine(
            target, drafts or [], context, dtype=dtype, device=ctx.device, max_threads=ctx.num_threads, seconds=seconds
        )
    ctx.note(f"{tuned.num_threads} thread(s), kernel {tuned.kernel}")
    return Measurements.of_step(
        ctx,
        {
            "target_key": target.key,
            "dtype": dtype,
            "device": ctx.device,
            "machine_id": machine.machine_id,
            "num_threads": tuned.num_threads,
            "kernel": tuned.kernel,
            "rival": tuned.rival,
            "draft_kernels": dict(tuned.draft_kernels),
            "engines_tried": tuned.tried,
            **clock.conditions(torch.device(ctx.device)),
        },
    )
