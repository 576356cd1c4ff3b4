"""Step `bench.measure_acceptance`: acceptance maps of one drafter over the held-out prompts.

The target answers every test prompt greedily, once; the drafter then guesses from every position of every answer
(acceptance_map.py). Replaying a map gives the exact acceptance length of every depth, on the same prompts.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from components.contract import Context, Draft, Measurements, Prompts, Target
from components.rows import AcceptanceMap, write_rows


def measure_acceptance(
    target: Target,
    draft: Draft,
    prompts: Prompts,
    *,
    max_new_tokens: Annotated[int, Field(ge=2)] = 96,
    max_depth: Annotated[int, Field(ge=0, le=64)] = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    batch_size: Annotated[int, Field(ge=1)] = 16,
    ctx: Context,
) -> Measurements:
    """What a round started at every output position would keep, for every depth at once.

    Args:
        target: the large model whose tokens are guessed.
        draft: the drafter that guesses.
        prompts: its `test` split is answered.
        max_new_tokens: the longest answer, in tokens; the first one comes from the prefill.
        max_depth: deepest chain to draft, in tokens; 0 is the depth the drafter was trained for.
        dtype: arithmetic of target and drafter while measuring.
        batch_size: prompts that the target answers side by side.
    """
    import torch

    from components.bench.acceptance_map import acceptance_map, extra_tokens, repeated_bigrams
    from components.bench.subjects import encoded_prompts, greedy_answers, kept_length, open_drafter
    from components.targets.load import open_target

    torch.set_num_threads(ctx.num_threads)
    opened = open_target(target, device=ctx.device, dtype=dtype, kernel="plain")  # the same map in every process
    drafter = open_drafter(draft, opened)
    k_max = min(max_depth or drafter.num_steps, drafter.max_depth)
    length = max_new_tokens + extra_tokens(k_max)
    asked = encoded_prompts(target, opened, prompts, "test", length, ctx)
    answers = greedy_answers(
        opened, [p.ids for p in asked], length, batch_size, lambda done, total: ctx.progress(done, total, "answers")
    )
    rows = []
    for number, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        kept = kept_length(answer[:max_new_tokens], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt.ids, answer, kept, k_max)
        rows.append(
            AcceptanceMap(
                target_key=target.key,
                draft_key=draft.key,
                method=drafter.method,
                prompt_id=prompt.prompt_id,
                workload=prompt.workload,
                k_max=k_max,
                trained_depth=drafter.num_steps,
                num_tokens=kept,
                accepted=found.accepted,
                proxy_accepted=found.proxy_accepted,
                repeated_bigrams=repeated_bigrams(answer[:kept]),
                dtype=dtype,
            )
        )
        ctx.progress(number + 1, len(asked), "acceptance maps")
    write_rows(ctx.out, rows)
    positions = sum(len(row.accepted) for row in rows)
    return Measurements.made(
        ctx,
        {
            "method": drafter.method,
            "draft_key": draft.key,
            "k_max": k_max,
            "num_prompts": len(rows),
            "num_positions": positions,
            "mean_accepted_everywhere": sum(sum(row.accepted) for row in rows) / max(1, positions),
            "repeated_bigrams": sum(row.repeated_bigrams for row in rows) / max(1, len(rows)),
        },
    )
