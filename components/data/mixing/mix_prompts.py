"""Step `data.mix_prompts`: new conversations mixed with old training prompts, so that a drafter does not forget.

The share of old prompts is of the whole: 0.5 means as many old prompts as new. Hashes decide which old prompts are
used, so a larger share contains the smaller one. Test and validation are mixed in the same way.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from components.contract import Context, Prompts, UserError
from components.data.collect.traffic import EVALUATION, read_seen, write_seen
from components.data.formats.prompts import (
    SPLITS,
    Prompt,
    content_of,
    hash_number,
    question_of,
    read_prompts,
    write_prompts,
)


def mix_prompts(
    new: Prompts,
    old: Prompts | None,
    *,
    old_share: float,
    num_validation: int,
    num_test: int,
    num_warm_up: int,
    ctx: Context,
) -> Prompts:
    """The step `data.mix_prompts`; its settings are explained in components/data/steps.py."""
    limits = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation}
    origin: dict[str, Counter[str]] = {}
    used: set[str] = set()
    evaluation_questions: set[str] = set()
    mixed: dict[str, list[Prompt]] = {}
    counts: Counter[str] = Counter()
    for split in (*EVALUATION, "train"):  # evaluation first: its prompts are not trained on
        pools: list[list[Prompt]] = []
        for prompts in (new, old):
            candidates = _in_hash_order(read_prompts(prompts, split), ctx.seed) if prompts is not None else []
            others = used.union(*({content_of(prompt) for prompt in pool} for pool in pools))
            pools.append(_distinct(candidates, others, evaluation_questions if split == "train" else set(), counts))
        num_new, num_old = _sizes(len(pools[0]), len(pools[1]), limits.get(split), old_share)
        mixed[split] = pools[0][:num_new] + pools[1][:num_old]
        origin[split] = Counter(new=num_new, old=num_old)
        used.update(content_of(prompt) for prompt in mixed[split])
        if split != "train":
            evaluation_questions.update(question_of(prompt) for prompt in mixed[split])
    for split in SPLITS:
        if not mixed[split]:
            raise UserError(f"new, old: neither has a prompt for split {split}; collect more (num_{split})")
    # by hash again, so that any part of a split holds both origins; an order declared by one does not hold for both
    ordered = (prompt for split in SPLITS for prompt in _in_hash_order(mixed[split], ctx.seed))
    write_prompts(ctx.out, (replace(prompt, place=None) for prompt in ordered))
    write_seen(ctx.out, read_seen(new) | read_seen(old))
    sizes = (f"{split.replace('_', ' ')} {origin[split]['new']} + {origin[split]['old']}" for split in SPLITS)
    ctx.note(f"new + old: {', '.join(sizes)}")
    return Prompts.of_step(
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
    """(number of new, of old prompts) in a split. Without a limit (training) all new prompts are used."""
    if limit is None:
        return num_new, min(num_old, round(num_new * share / (1.0 - share)))
    old = min(num_old, round(limit * share))
    new = min(num_new, limit - old)
    return new, min(num_old, limit - new)


def _distinct(
    prompts: list[Prompt], used: set[str], evaluation_questions: set[str], counts: Counter[str]
) -> list[Prompt]:
    """The prompts without repeated contents, contents that another split uses, and evaluation questions."""
    distinct = []
    contents: set[str] = set()
    for prompt in prompts:
        content = content_of(prompt)
        if content in used or content in contents:
            counts["duplicates"] += 1
        elif question_of(prompt) in evaluation_questions:
            counts["kept_out"] += 1
        else:
            contents.add(content)
            distinct.append(prompt)
    return distinct


def _in_hash_order(prompts: list[Prompt], seed: int) -> list[Prompt]:
    return sorted(prompts, key=lambda prompt: (hash_number(f"mix:{seed}:{prompt.prompt_id}"), prompt.prompt_id))
