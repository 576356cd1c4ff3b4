"""Step `data.write_answers`: the target answers its training prompts, so that a drafter learns this target's outputs.

The prompts are cut into shards of similar length; within a shard, a free place in the batch goes to the next prompt.
Every row draws from its own random generator, so a shard is the same bit for bit wherever and whenever it is written,
also after a kill; finished shards are not written again. Test prompts are not answered; how long they are is written
down, so that too long ones are told before a drafter is trained.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from components.contract import Context, Conversations, Prompts, ReportProgress, Target, UserError, unfinished
from components.data.formats.control_marks import HoldsControlMark
from components.data.formats.prompts import Prompt, encode_prompt, read_prompts
from components.data.formats.responses import (
    ANSWERED_SPLITS,
    AnswerRow,
    Conversation,
    distinct_bigram_ratio,
    sample_of_shards,
    shard_name,
    summarise,
    write_manifest,
    write_shard,
)
from components.files import sweep
from components.positions import PromptLength, write_prompt_lengths
from components.targets.generate import ContinuationRequest, continue_rows, row_generator
from components.targets.interface import AbstractTarget
from components.targets.load import cached_target, open_tokenizer, target_facts, threads_for
from components.targets.spread import spread_shards


def write_answers(
    target: Target,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    sampled_share: float,
    temperature: float,
    batch_size: int,
    shard_size: int,
    max_prompt_tokens: int,
    ctx: Context,
) -> Conversations:
    """The step `data.write_answers`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    limit = min(max_prompt_tokens, int(facts["shape"]["max_position_embeddings"]) - max_new_tokens)
    if limit < 1:
        raise UserError(
            f"max_new_tokens: {max_new_tokens} leaves no room for a prompt in this target's positions; lower it"
        )
    jobs, left_out = jobs_of(prompts, tokenizer, limit, sampled_share, ctx)
    if not jobs and not left_out.too_long:
        raise UserError("prompts: none is for train or validation; collect some with num_train and num_validation")
    if not jobs:
        raise UserError(f"max_prompt_tokens: no prompt has at most {limit} tokens; raise it or collect shorter prompts")
    if left_out.too_long:
        ctx.note(f"{left_out.too_long} prompts of more than {limit} tokens left out; {len(jobs)} are answered")
    if left_out.marked:
        ctx.note(f"{left_out.marked} prompts that hold a control mark set aside, see set_aside.jsonl")
    shards = [
        AnswerShard(
            file=ctx.out / shard_name(number),
            jobs=tuple(jobs[start : start + shard_size]),
            batch_size=batch_size,
            target=target.path,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=ctx.seed,
            device=ctx.device,
            num_threads=threads_for(facts["num_params"], ctx.num_threads),
        )
        for number, start in enumerate(range(0, len(jobs), shard_size))
    ]
    spread_shards(ctx, target)
    started, num_tokens, done = time.monotonic(), 0, len(shards) - len(unfinished(shards))
    for num_new_tokens in ctx.map(answer_shard, shards, what="shards of answers"):
        num_tokens, done = num_tokens + num_new_tokens, done + 1
        rate = num_tokens / (time.monotonic() - started)
        ctx.progress(done, len(shards), f"shards of answers, {rate:,.0f} tokens/s")
    sweep(ctx.out)
    measure_test_prompts(prompts, tokenizer, ctx)
    names = [shard.file.name for shard in shards]
    sample_of_shards(ctx.out, names, tokenizer, "The target answered these prompts itself.")
    write_manifest(ctx, target.key, names, shard_size)
    info = summarise(ctx, names)
    ctx.note(f"{info['num_answer_tokens']} answer tokens in {time.monotonic() - started:.0f} s")
    return Conversations.of_step(ctx, {"target_key": target.key, **left_out.facts(), **info})


@dataclass(frozen=True)
class Job:
    """A prompt to answer: its tokens, labels, and whether the answer is sampled."""

    prompt_id: str
    split: str
    workload: str
    ids: tuple[int, ...]
    sampled: bool
    language: str = ""
    domain: str = ""
    place: int | None = None

    def answered(self, answer: Sequence[int], *, ended: bool, temperature: float, by: str = "target") -> Conversation:
        """The prompt with this answer. temperature: of sampled answers."""
        mask = [False] * len(self.ids) + [True] * len(answer)
        used = temperature if self.sampled else 0.0
        return conversation_of(self, [*self.ids, *answer], mask, temperature=used, ended=ended, answered_by=by)


@dataclass(frozen=True)
class AnswerShard:
    """The inputs of one shard of answers, and its output file. target: the artifact's directory."""

    file: Path
    jobs: tuple[Job, ...]
    batch_size: int
    target: Path
    max_new_tokens: int
    temperature: float
    seed: int
    device: str
    num_threads: int


@dataclass
class NotAnswered:
    """Counts of prompts without an answer. too_long: over the token limit. marked: they hold a control mark."""

    too_long: int = 0
    marked: int = 0

    def facts(self) -> dict[str, int]:
        """The counts under their names in the artifact's info."""
        return {"num_prompts_too_long": self.too_long, "num_prompts_set_aside": self.marked}


def jobs_of(
    prompts: Prompts, tokenizer: Any, limit: int, sampled_share: float, ctx: Context
) -> tuple[list[Job], NotAnswered]:
    """Every prompt to answer, by split and then by length, so that a batch pads little; and counts of the others."""
    jobs, left_out, seed = [], NotAnswered(), ctx.seed
    for split in ANSWERED_SPLITS:
        of_split = []
        for number, prompt in enumerate(read_prompts(prompts, split), start=1):
            try:
                ids = encode_prompt(tokenizer, prompt)
            except HoldsControlMark as error:
                left_out.marked += 1
                ctx.set_aside(f"prompts ({split})", number, str(error), prompt.prompt_id)
                continue
            if len(ids) > limit:
                left_out.too_long += 1
                continue
            digest = hashlib.sha256(f"sampled:{seed}:{prompt.prompt_id}".encode()).digest()
            sampled = split == "train" and int.from_bytes(digest[:8], "big") / 2**64 < sampled_share
            labels = (prompt.language, prompt.domain, prompt.place)
            of_split.append(Job(prompt.prompt_id, prompt.split, prompt.workload, tuple(ids), sampled, *labels))
        jobs.extend(sorted(of_split, key=lambda job: (len(job.ids), job.prompt_id)))
    return jobs, left_out


def measure_test_prompts(prompts: Prompts, tokenizer: Any, ctx: Context) -> None:
    """Write down how long the test prompts are for this target; those with a control mark are left out as elsewhere."""
    lengths = list[PromptLength]()
    for prompt in read_prompts(prompts, "test"):
        try:
            lengths.append(PromptLength(len(encode_prompt(tokenizer, prompt)), prompt.num_characters))
        except HoldsControlMark:
            continue  # the steps that measure set it aside and say why
    write_prompt_lengths(ctx.out, lengths)


def answer_shard(shard: AnswerShard, report_progress: ReportProgress) -> int:
    """Answer the prompts of one shard and write its file, on any machine with these paths; returns answer tokens."""
    torch.set_num_threads(shard.num_threads)
    model = cached_target(shard.target, shard.device)
    answered = answer(model, shard, report_progress)
    write_shard(shard.file, answered)
    return sum(conversation.row.num_answer_tokens for conversation in answered)


def answer(model: AbstractTarget, shard: AnswerShard, report_progress: ReportProgress) -> list[Conversation]:
    """Answer the prompts of one shard; returns the conversations in its order."""
    asks = [
        ContinuationRequest(
            job.ids,
            shard.max_new_tokens,
            shard.temperature if job.sampled else 0.0,
            row_generator(shard.seed, job.prompt_id),
        )
        for job in shard.jobs
    ]
    continuations = continue_rows(model, asks, batch_size=shard.batch_size, on_pass=report_progress)
    return [
        job.answered(continuation.ids, ended=continuation.hit_eos, temperature=shard.temperature)
        for job, continuation in zip(shard.jobs, continuations, strict=True)
    ]


def conversation_of(
    labels: Job | Prompt,
    ids: Sequence[int],
    mask: Sequence[bool],
    *,
    temperature: float | None,
    ended: bool,
    answered_by: str = "target",
    suffix: str = "",
) -> Conversation:
    """A conversation with the labels of its prompt. suffix: of its id, where a chat became several rows."""
    answer_ids = [token for token, masked in zip(ids, mask, strict=True) if masked]
    row = AnswerRow(
        row_id=labels.prompt_id + suffix,
        split=labels.split,
        workload=labels.workload,
        temperature=temperature,
        num_prompt_tokens=len(ids) - len(answer_ids),
        num_answer_tokens=len(answer_ids),
        ended=ended,
        distinct_bigrams=distinct_bigram_ratio(answer_ids),
        language=labels.language,
        domain=labels.domain,
        answered_by=answered_by,
        place=labels.place,
    )
    return Conversation(row, torch.tensor(ids), torch.tensor(mask))
