"""Step `bench.autotune`: the threads and kernels on which a target decodes plainly fastest, chosen once for a run.

Steps that measure take it as their input `tuning`, so that what is predicted and what is decoded run alike, and every
drafter is timed on the same target. It takes longer over the choice than a step that chooses for itself, so that a
noisy second decides nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.contract import Context, Machine, Measurements, Prompts, Target


def autotune(
    target: Target,
    prompts: Prompts,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seconds: Annotated[float, Field(ge=0.0, le=600.0)] = 3.0,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time plain decoding on 1 and on all threads, each with the kernels that are quickest there, and say which wins.

    It makes no rows: what was chosen and what was tried are its facts.

    Args:
        target: the large model.
        prompts: after the first prompt of its `test` split that fits, plain decoding is timed.
        dtype: arithmetic of the target.
        seconds: that the thread counts take turns for, at least; 0 takes no more time than a step that chooses for
            itself.
    """
    from components.bench import clock
    from components.bench.calibration import TOKENS, fastest_engine
    from components.bench.subjects import fitting_prompts
    from components.targets.load import target_facts

    positions = int(target_facts(target)["shape"]["max_position_embeddings"])
    context = fitting_prompts(target, positions, prompts, "test", TOKENS, ctx)[0].ids
    with clock.quiet_interpreter():
        engine = fastest_engine(
            target, context, dtype=dtype, device=ctx.device, max_threads=ctx.num_threads, seconds=seconds
        )
    ctx.note(f"{engine.num_threads} thread(s), kernel {engine.target.kernel}")
    return Measurements.made(
        ctx,
        {
            "target_key": target.key,
            "dtype": dtype,
            "device": ctx.device,
            "machine_id": machine.machine_id,
            "num_threads": engine.num_threads,
            "kernel": engine.target.kernel,
            "rival": engine.rival is not None,
            "engines_tried": engine.tried,
            **clock.conditions(engine.target.device),
        },
    )
