"""The step that lets the target answer its own training prompts: a drafter must learn what this target says.

Work is cut into shards of fixed prompts, and every row draws from a generator of its own, so a shard is the same bit
for bit whenever and wherever it is written, after whatever kill; a shard that is there is not written again. Test
prompts are not answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.contract import Context, Conversations, Prompts, Target, Tell, UserError
from components.data.prompts import encode_prompt, read_prompts
from components.shards import sweep

if TYPE_CHECKING:
    from components.data.answers import AnswerRow, Conversation
    from components.targets.model import AbstractTarget

ANSWERED_SPLITS = ("train", "validation")


def write_answers(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: Annotated[int, Field(ge=8)] = 96,
    sampled_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.25,
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8,
    batch_size: Annotated[int, Field(ge=1)] = 64,
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 512,
    ctx: Context,
) -> Conversations:
    """Continue the train and validation prompts with the target, in batches over its KV cache.

    Args:
        max_new_tokens: The longest answer, tokens; an end-of-text token ends it sooner.
        sampled_share: The share of prompts whose answer is sampled; the others are greedy. Validation is always greedy.
        temperature: Of the sampled answers.
        batch_size: Prompts answered together; also the size of a shard, the unit of work that a kill may cost.
        max_prompt_tokens: Prompts of more tokens are left out and counted.
    """
    from components.data.answers import shard_name
    from components.targets.load import open_tokenizer, target_facts
    from components.targets.threads import threads_for

    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    limit = min(max_prompt_tokens, int(facts["shape"]["max_position_embeddings"]) - max_new_tokens)
    if limit < 1:
        raise UserError(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in this target's positions; lower it"
        )
    jobs, num_too_long = _jobs(prompts, tokenizer, limit, sampled_share, ctx.seed)
    if not jobs and not num_too_long:
        raise UserError("prompts: none is for train or validation; collect some with num_train and num_validation")
    if not jobs:
        raise UserError(f"max_prompt_tokens: no prompt has at most {limit} tokens; raise it or collect shorter prompts")
    if num_too_long:
        ctx.note(f"{num_too_long} prompts of more than {limit} tokens left out; {len(jobs)} are answered")
    shards = [
        AnswerShard(
            file=ctx.out / shard_name(number),
            jobs=tuple(jobs[start : start + batch_size]),
            target=target.path,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=ctx.seed,
            device=ctx.device,
            num_threads=threads_for(facts["num_params"], ctx.num_threads),
        )
        for number, start in enumerate(range(0, len(jobs), batch_size))
    ]
    todo = [shard for shard in shards if not shard.file.is_file()]
    begun = time.monotonic()
    for _ in ctx.map(answer_shard, todo, what="shards of answers", finished=len(shards) - len(todo)):
        pass
    sweep(ctx.out)
    names = [shard.file.name for shard in shards]
    manifest = {"target_key": target.key, "shards": names, "batch_size": batch_size}
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    info = _summary(ctx, names)
    ctx.note(f"{info['num_answer_tokens']} answer tokens in {time.monotonic() - begun:.0f} s")
    return Conversations.made(ctx, {"target_key": target.key, "num_prompts_too_long": num_too_long, **info})


@dataclass(frozen=True)
class Job:
    """A prompt to answer: its tokens, and how."""

    prompt_id: str
    split: str
    workload: str
    ids: tuple[int, ...]
    sampled: bool


@dataclass(frozen=True)
class AnswerShard:
    """Everything that one shard of answers depends on, and the file it becomes. target: the artifact's directory."""

    file: Path
    jobs: tuple[Job, ...]
    target: Path
    max_new_tokens: int
    temperature: float
    seed: int
    device: str
    num_threads: int


def _jobs(prompts: Prompts, tokenizer: Any, limit: int, sampled_share: float, seed: int) -> tuple[list[Job], int]:
    """Every prompt to answer, by split and then by length, so that a batch pads little; and how many are too long."""
    import hashlib

    jobs, num_too_long = [], 0
    for split in ANSWERED_SPLITS:
        of_split = []
        for prompt in read_prompts(prompts, split):
            ids = encode_prompt(tokenizer, prompt)
            if len(ids) > limit:
                num_too_long += 1
                continue
            digest = hashlib.sha256(f"sampled:{seed}:{prompt.prompt_id}".encode()).digest()
            sampled = split == "train" and int.from_bytes(digest[:8], "big") / 2**64 < sampled_share
            of_split.append(Job(prompt.prompt_id, prompt.split, prompt.workload, tuple(ids), sampled))
        jobs.extend(sorted(of_split, key=lambda job: (len(job.ids), job.prompt_id)))
    return jobs, num_too_long


def answer_shard(shard: AnswerShard, tell: Tell) -> int:
    """Answer the prompts of one shard and write its file; gives how many. Runs in any process that sees the paths."""
    import torch

    from components.data.answers import write_shard
    from components.targets.opened import opened_target

    torch.set_num_threads(shard.num_threads)
    answered = _answer(
        opened_target(shard.target, shard.device),
        shard.jobs,
        max_new_tokens=shard.max_new_tokens,
        temperature=shard.temperature,
        seed=shard.seed,
        on_token=lambda done: tell(done / shard.max_new_tokens),
    )
    write_shard(shard.file, answered)
    return len(answered)


def _answer(
    model: AbstractTarget, jobs: Sequence[Job], *, max_new_tokens: int, temperature: float, seed: int, on_token: Any
) -> list[Conversation]:
    import torch

    from components.data.answers import AnswerRow, Conversation, distinct_bigram_ratio
    from components.targets.generate import continue_batch, row_generator

    continuations = continue_batch(
        model,
        [job.ids for job in jobs],
        max_new_tokens=max_new_tokens,
        temperatures=[temperature if job.sampled else 0.0 for job in jobs],
        generators=[row_generator(seed, job.prompt_id) for job in jobs],
        on_token=on_token,
    )
    answered = []
    for job, continuation in zip(jobs, continuations, strict=True):
        ids = torch.tensor([*job.ids, *continuation.ids])
        row = AnswerRow(
            row_id=job.prompt_id,
            split=job.split,
            workload=job.workload,
            temperature=temperature if job.sampled else 0.0,
            num_prompt_tokens=len(job.ids),
            num_answer_tokens=len(continuation.ids),
            ended=continuation.ended,
            distinct_bigrams=distinct_bigram_ratio(continuation.ids),
        )
        answered.append(Conversation(row, ids, torch.arange(len(ids)) >= len(job.ids)))
    return answered


def _summary(ctx: Context, shards: Sequence[str]) -> dict[str, Any]:
    """Counts and looping rates over all rows; identical answers and low bigram ratios say that the data are thin."""
    import hashlib

    from components.data.answers import read_shard

    rows: list[AnswerRow] = []
    answers: set[bytes] = set()
    for name in shards:
        for row, ids, mask in read_shard(ctx.out / name):
            rows.append(row)
            answers.add(hashlib.sha256(ids[mask].numpy().tobytes()).digest())
    greedy = [row for row in rows if row.temperature == 0.0]
    sampled = [row for row in rows if row.temperature > 0.0]
    return {
        "num_rows": {split: sum(row.split == split for row in rows) for split in ANSWERED_SPLITS},
        "num_tokens": sum(row.num_prompt_tokens + row.num_answer_tokens for row in rows),
        "num_answer_tokens": sum(row.num_answer_tokens for row in rows),
        "num_sampled": len(sampled),
        "num_ended": sum(row.ended for row in rows),
        "num_duplicate_answers": len(rows) - len(answers),
        "distinct_bigrams_greedy": _mean(greedy),
        "distinct_bigrams_sampled": _mean(sampled),
        "num_looping": sum(row.distinct_bigrams < 0.3 for row in rows),
    }


def _mean(rows: Sequence[AnswerRow]) -> float | None:
    return round(sum(row.distinct_bigrams for row in rows) / len(rows), 4) if rows else None
