"""The step that mixes new conversations with a share of what the champion learned from, so that it does not forget.

The share is of the whole: at old_share 0.5 as many old prompts as new. Which old ones is decided by hashes alone, so a
larger share holds the smaller one. Test and validation are mixed likewise: a challenger is judged on both.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from components.contract import Context, Prompts, UserError
from components.data.choosing import content_of, hash_number, question_of
from components.data.prompts import SPLITS, Prompt, read_prompts
from components.data.seen import EVALUATION, read_seen, write_seen


def mix_prompts(
    new: Prompts,
    old: Prompts | None = None,
    *,
    old_share: Annotated[float, Field(ge=0.0, le=0.95)] = 0.5,
    num_validation: Annotated[int, Field(ge=1)] = 48,
    num_test: Annotated[int, Field(ge=1)] = 24,
    num_warm_up: Annotated[int, Field(ge=1)] = 4,
    ctx: Context,
) -> Prompts:
    """Write `prompts.jsonl` with all new training prompts and old ones beside them, and `seen.txt` of both.

    Args:
        new: the conversations of tonight.
        old: the prompts that the champion was trained and judged on.
        old_share: share of old prompts in every split, as far as there are enough of them; 0 takes old ones only where
            the new ones do not suffice for validation, test and warm-up.
        num_validation: prompts at most that choose a checkpoint.
        num_test: prompts at most for the benchmarks.
        num_warm_up: prompts at most that warm a benchmark up.
    """
    limits = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation}
    origin: dict[str, Counter[str]] = {}
    taken: set[str] = set()
    judged_on: set[str] = set()
    mixed: dict[str, list[Prompt]] = {}
    counts: Counter[str] = Counter()
    for split in (*EVALUATION, "train"):  # evaluation first: what it holds is not trained on
        pools: list[list[Prompt]] = []
        for prompts in (new, old):
            found = _in_order(read_prompts(prompts, split), ctx.seed) if prompts is not None else []
            others = taken.union(*({content_of(prompt) for prompt in pool} for pool in pools))
            pools.append(_distinct(found, others, judged_on if split == "train" else set(), counts))
        num_new, num_old = _sizes(len(pools[0]), len(pools[1]), limits.get(split), old_share)
        mixed[split] = pools[0][:num_new] + pools[1][:num_old]
        origin[split] = Counter(new=num_new, old=num_old)
        taken.update(content_of(prompt) for prompt in mixed[split])
        if split != "train":
            judged_on.update(question_of(prompt) for prompt in mixed[split])
    for split in SPLITS:
        if not mixed[split]:
            raise UserError(f"new, old: neither has a prompt for split {split}; collect more (num_{split})")
    with (ctx.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for split in SPLITS:
            for prompt in _in_order(mixed[split], ctx.seed):  # by hash again: a part of a split holds both origins
                line = replace(prompt, place=None).as_json()  # an order that one of them declared is not that of both
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    write_seen(ctx.out, read_seen(new) | read_seen(old))
    said = ", ".join(f"{split.replace('_', ' ')} {origin[split]['new']} + {origin[split]['old']}" for split in SPLITS)
    ctx.note(f"new + old: {said}")
    return Prompts.made(
        ctx,
        {
            **{f"num_{split}": len(mixed[split]) for split in SPLITS},
            "origin": {split: dict(origin[split]) for split in SPLITS},
            "old_share": origin["train"]["old"] / len(mixed["train"]),
            "duplicates": counts["duplicates"],
            "kept_out": counts["kept_out"],
            "workloads": dict(Counter(prompt.workload for split in SPLITS for prompt in mixed[split])),
        },
    )


def _sizes(num_new: int, num_old: int, limit: int | None, share: float) -> tuple[int, int]:
    """How many new and old prompts a split gets. Without a limit (training) every new one is taken."""
    if limit is None:
        return num_new, min(num_old, round(num_new * share / (1.0 - share)))
    old = min(num_old, round(limit * share))
    new = min(num_new, limit - old)
    return new, min(num_old, limit - new)


def _distinct(prompts: list[Prompt], taken: set[str], judged_on: set[str], counts: Counter[str]) -> list[Prompt]:
    """Each content once, nothing that another split has taken, no question that is judged on."""
    kept = []
    here: set[str] = set()
    for prompt in prompts:
        content = content_of(prompt)
        if content in taken or content in here:
            counts["duplicates"] += 1
        elif question_of(prompt) in judged_on:
            counts["kept_out"] += 1
        else:
            here.add(content)
            kept.append(prompt)
    return kept


def _in_order(prompts: list[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (hash_number(f"mix:{seed}:{prompt.prompt_id}"), prompt.prompt_id))
