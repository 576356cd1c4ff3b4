"""Step `bench.autotune`: the threads and kernels on which a target decodes plainly fastest, chosen once for a run.

Steps that measure take it as their input `tuning`, so that what is predicted and what is decoded run alike, and every
drafter is timed on the same target, on the same kernels of its own. It takes longer over the choice than a step that
chooses for itself, so that a noisy second decides nothing.
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
    """Time plain decoding on 1 and on all threads, each with the kernels that are quickest there, and say which wins.

    It makes no rows: what was chosen and what was tried are its facts.

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
        chosen = choose_engine(
            target, drafts or [], context, dtype=dtype, device=ctx.device, max_threads=ctx.num_threads, seconds=seconds
        )
    ctx.note(f"{chosen.num_threads} thread(s), kernel {chosen.kernel}")
    return Measurements.made(
        ctx,
        {
            "target_key": target.key,
            "dtype": dtype,
            "device": ctx.device,
            "machine_id": machine.machine_id,
            "num_threads": chosen.num_threads,
            "kernel": chosen.kernel,
            "rival": chosen.rival,
            "draft_kernels": dict(chosen.draft_kernels),
            "engines_tried": chosen.tried,
            **clock.conditions(torch.device(ctx.device)),
        },
    )
