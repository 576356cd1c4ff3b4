"""The step that lets the target answer through a server (vLLM, SGLang, llama.cpp, any with OpenAI's completions).

The same prompts, shares and seeds as in process (answering.py), and the same shards. The server is asked with exact
token ids where it takes them, and its own ids are kept where it shows them; else its text is tokenised again, and how
many that were is told. Every prompt ends as answered, failed (set aside with the reason) or skipped (too long, or with
a control mark): these add up to what was asked. An answer is in the journal as soon as it has come, so that no prompt
is answered twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import Field

from components.contract import Context, Conversations, Prompts, Target, UserError
from components.data.answer_summary import summarise, write_manifest
from components.data.server_address import BaseUrl, Engine, ServerAddress
from components.shards import sweep

if TYPE_CHECKING:
    import httpx

    from components.data.answering import Job, NotAnswered
    from components.data.server_answers_client import Asking
    from components.data.server_answers_journal import Journal

FEWEST_IN_A_ROW: Final = 8
"""Failures one after the other, from two for each request in flight, after which a server counts as gone."""


def write_answers_by_server(
    target: Target,
    prompts: Prompts,
    *,
    base_url: BaseUrl,
    engine: Engine = "auto",
    model: str = "",
    api_key_variable: str = "",
    label: str = "",
    concurrency: Annotated[int, Field(ge=1, le=1024)] = 16,
    retries: Annotated[int, Field(ge=0, le=20)] = 5,
    backoff_s: Annotated[float, Field(gt=0.0)] = 0.5,
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0,
    wait_s: Annotated[float, Field(gt=0.0)] = 30.0,
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 0.8,
    greedy_share: Annotated[float, Field(ge=0.0, le=1.0)] = 0.75,
    max_new_tokens: Annotated[int, Field(ge=8)] = 96,
    max_prompt_tokens: Annotated[int, Field(ge=1)] = 512,
    shard_size: Annotated[int, Field(ge=1)] = 256,
    max_failed: Annotated[float, Field(ge=0.0, le=1.0)] = 0.01,
    ctx: Context,
) -> Conversations:
    """Let a server continue the train and validation prompts.

    Args:
        target: The model that the server serves; its tokenizer encodes the prompts.
        base_url: The server's address with or without /v1; no credentials, query or fragment.
        engine: Which it is; auto asks it. openai is any other with /v1/completions.
        model: The name it serves; empty takes the first of /v1/models.
        api_key_variable: The environment variable that holds its key; the key is written nowhere.
        label: What is behind the address, in words; it is part of the step's key, which a server is not.
        concurrency: Requests in flight.
        retries: Further attempts for a prompt, after failures that may pass.
        backoff_s: The first wait between attempts, seconds; it doubles, with jitter, and Retry-After is kept to.
        timeout_s: The longest that one answer may take, seconds.
        wait_s: How long the server may take to answer for the first time, seconds.
        temperature: Of the sampled answers.
        greedy_share: The share of train prompts answered greedily; validation always is.
        max_new_tokens: The longest answer, tokens.
        max_prompt_tokens: Prompts of more tokens are skipped and counted.
        shard_size: Rows of a shard.
        max_failed: Share of the asked prompts that may fail; above it the step stops, and keeps its answers for the
            next attempt.
    """
    from components.data.answering import jobs_of
    from components.targets.load import open_tokenizer, target_facts

    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    limit = min(max_prompt_tokens, int(facts["shape"]["max_position_embeddings"]) - max_new_tokens)
    jobs, skipped = jobs_of(prompts, tokenizer, limit, 1.0 - greedy_share, ctx)
    if not jobs:
        raise UserError(f"prompts: none for train or validation has at most {limit} tokens; raise max_prompt_tokens")
    server = ServerAddress(base_url=base_url, engine=engine, model=model, api_key_variable=api_key_variable)
    wishes = {
        "tokenizer": tokenizer,
        "vocab_size": int(facts["shape"]["vocab_size"]),
        "ends": _ends(tokenizer, facts["shape"]["eos_token_ids"]),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": ctx.seed,
        "retries": retries,
        "backoff_s": backoff_s,
        "timeout_s": timeout_s,
    }
    asked = {"target": target.key, "prompts": _digest(jobs), "max_new_tokens": max_new_tokens}
    work = _Work(server, jobs, wishes, asked, concurrency, max_failed, ctx)
    asyncio.run(work.run(wait_s))
    return _finished(work, target, tokenizer, _write_shards(work, shard_size, temperature), shard_size, skipped, label)


@dataclass
class _Work:
    """All that is asked of one server, and what became of it."""

    server: ServerAddress
    jobs: Sequence[Job]
    wishes: dict[str, Any]
    asked: dict[str, Any]
    concurrency: int
    max_failed: float
    ctx: Context
    answers: dict[str, Any] = field(default_factory=dict)  # prompt id -> Answered
    failed: dict[str, str] = field(default_factory=dict)  # prompt id -> why
    said: str = ""  # how the server calls itself
    _in_a_row: int = 0
    _new_tokens: int = 0
    _begun: float = 0.0

    async def run(self, wait_s: float) -> None:
        """Ask for every answer that the journal does not have yet."""
        import httpx

        from components.data.server_address import reach
        from components.data.server_answers_client import Asking
        from components.data.server_answers_journal import Journal

        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        timeout = httpx.Timeout(float(self.wishes["timeout_s"]))
        async with httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=False) as client:
            reached = await reach(client, self.server, wait_s)
            self.said = f"{reached.engine} {reached.version}".strip()
            asking = Asking(server=self.server, reached=reached, **self.wishes)
            with Journal(self.ctx.scratch / "answered.jsonl", {**self.asked, "model": reached.model}) as journal:
                self.answers = journal.answers
                todo = [job for job in self.jobs if job.prompt_id not in journal.answers]
                self.ctx.note(f"{self.server.base_url}: {self.said}, model {reached.model}: {len(todo)} prompts to ask")
                self._begun = time.monotonic()
                await self._ask_all(client, asking, journal, todo)
        if len(self.failed) > self.max_failed * len(self.jobs) or not self.answers:
            raise UserError(
                f"{self.server.where}: {len(self.failed)} of {len(self.jobs)} prompts failed (the first: "
                f"{next(iter(self.failed.values()))}); {self._kept()}, or raise max_failed"
            )

    async def _ask_all(self, client: httpx.AsyncClient, asking: Asking, journal: Journal, todo: Sequence[Job]) -> None:
        """A closed loop: each of `concurrency` workers takes the next prompt as soon as it has its answer."""
        waiting = iter(todo)

        async def work() -> None:
            for job in waiting:
                await self._ask(client, asking, journal, job)

        tasks = [asyncio.create_task(work()) for _ in range(min(self.concurrency, len(todo)))]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: httpx.AsyncClient, asking: Asking, journal: Journal, job: Job) -> None:
        from components.data.server_answers_client import MayPass, Refused

        try:
            answered = await asking.ask(client, job)
        except (MayPass, Refused) as error:
            self.failed[job.prompt_id] = str(error)
            self._in_a_row += 1
            if self._in_a_row >= max(FEWEST_IN_A_ROW, 2 * self.concurrency):
                raise UserError(
                    f"{self.server.where}: {self._in_a_row} prompts failed one after the other (the last: {error}); "
                    + self._kept()
                ) from error
        else:
            self._in_a_row = 0
            self._new_tokens += len(answered.ids)
            journal.add(job.prompt_id, answered)
        rate = self._new_tokens / max(1e-9, time.monotonic() - self._begun)
        done = len(self.answers) + len(self.failed)
        self.ctx.progress(done, len(self.jobs), f"prompts, {rate:,.0f} tokens/s")

    def _kept(self) -> str:
        return f"{len(self.answers)} answers are kept: mend it and run again, and only the others are asked"


def _finished(
    work: _Work, target: Target, tokenizer: Any, names: list[str], shard_size: int, skipped: NotAnswered, label: str
) -> Conversations:
    """The artifact of these shards, with the accounts of every prompt."""
    from components.data.answer_sample import sample_of_shards

    ctx = work.ctx
    sample_of_shards(ctx.out, names, tokenizer, f"The server at {work.server.base_url} answered these prompts.")
    write_manifest(ctx, target.key, names, shard_size)
    answered = len(work.answers)
    assert answered + len(work.failed) == len(work.jobs)
    for prompt_id, why in sorted(work.failed.items()):
        ctx.set_aside(work.server.base_url, 0, why, prompt_id)
    retokenised = sum(not answer.own_ids for answer in work.answers.values())
    if retokenised:
        ctx.note(f"{work.said}: shows no token ids, so the text of {retokenised} answers was tokenised again")
    accounts = {
        "num_asked": len(work.jobs) + skipped.too_long + skipped.marked,
        "num_answered": answered,
        "num_failed": len(work.failed),
        "num_skipped": skipped.too_long + skipped.marked,
        "num_tokenised_again": retokenised,
    }
    ctx.note(", ".join(f"{name.removeprefix('num_')} {number}" for name, number in list(accounts.items())[:4]))
    told = {"target_key": target.key, **skipped.facts(), "server": work.said, "label": label}
    return Conversations.made(ctx, {**told, **accounts, **summarise(ctx, names)})


def _write_shards(work: _Work, shard_size: int, temperature: float) -> list[str]:
    """Shards of the answered prompts in the order of the jobs; gives their names."""
    from components.data.answering import conversation_of
    from components.data.answers import shard_name, write_shard

    rows = [job for job in work.jobs if job.prompt_id in work.answers]
    names = []
    for number, start in enumerate(range(0, len(rows), shard_size)):
        names.append(shard_name(number))
        answered = [(job, work.answers[job.prompt_id]) for job in rows[start : start + shard_size]]
        made = [
            conversation_of(job, answer.ids, ended=answer.ended, temperature=temperature, answered_by="server")
            for job, answer in answered
        ]
        write_shard(work.ctx.out / names[-1], made)
    for left in set(work.ctx.out.glob("shard-*")) - {work.ctx.out / name for name in names}:
        left.unlink()  # of an attempt that had more failures, or fewer
    sweep(work.ctx.out)
    return names


def _ends(tokenizer: Any, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a text, first the one that the tokenizer ends a turn with."""
    own = tokenizer.eos_token_id
    return tuple(sorted(map(int, eos_token_ids), key=lambda token: (token != own, token)))


def _digest(jobs: Sequence[Job]) -> str:
    """What is asked, in short."""
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(f"{job.prompt_id} {job.sampled} {job.ids}\n".encode())
    return digest.hexdigest()[:16]
