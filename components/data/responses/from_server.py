"""Step `data.write_answers_by_server`: a server (vLLM, SGLang, llama.cpp, any OpenAI completions) answers the prompts.

Prompts, shares, seeds and shards are those of answers made in process (generate.py). Prompts are sent as exact token
ids where the server takes them, and its ids are used where it returns them; otherwise its text is tokenised again, and
these answers are counted. Every prompt ends as answered, failed (set aside with the reason) or skipped (too long, or
with a control mark). An answer is written to the journal as soon as it has come, so that no prompt is answered twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from components.contract import Context, Conversations, Prompts, Target, UserError
from components.data.formats.responses import sample_of_shards, shard_name, summarise, write_manifest, write_shard
from components.data.responses.generate import Job, NotAnswered, jobs_of, measure_test_prompts
from components.data.responses.server_client import CompletionClient, Journal, RequestOptions, ServerAnswer
from components.engines.client import wait_until_ready
from components.engines.requests import Patience, RefusedPrompt, RetryableError, http_client, in_flight
from components.engines.server_address import BaseUrl, ServerAddress, ServerEngine
from components.files import sweep
from components.targets.load import open_tokenizer, target_facts

MIN_CONSECUTIVE_FAILURES: Final = 8
"""After so many failures in a row, and two for each request in flight, the server counts as gone."""


def write_answers_by_server(
    target: Target,
    prompts: Prompts,
    *,
    base_url: BaseUrl,
    engine: ServerEngine,
    model: str,
    api_key_variable: str,
    label: str,
    concurrency: int,
    retries: int,
    backoff_s: float,
    timeout_s: float,
    wait_s: float,
    temperature: float,
    greedy_share: float,
    max_new_tokens: int,
    max_prompt_tokens: int,
    shard_size: int,
    max_failed: float,
    ctx: Context,
) -> Conversations:
    """The step `data.write_answers_by_server`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    limit = min(max_prompt_tokens, int(facts["shape"]["max_position_embeddings"]) - max_new_tokens)
    jobs, skipped = jobs_of(prompts, tokenizer, limit, 1.0 - greedy_share, ctx)
    if not jobs:
        raise UserError(f"prompts: none for train or validation has at most {limit} tokens; raise max_prompt_tokens")
    server = ServerAddress(base_url=base_url, engine=engine, model=model, api_key_variable=api_key_variable)
    options = RequestOptions(
        tokenizer=tokenizer,
        vocab_size=int(facts["shape"]["vocab_size"]),
        ends=_end_tokens(tokenizer, facts["shape"]["eos_token_ids"]),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=ctx.seed,
        patience=Patience(retries, backoff_s, timeout_s),
        suppressed=frozenset(facts["suppressed_tokens"]),
    )
    journal_header: dict[str, str | int] = {
        "target": target.key,
        "prompts": _digest_of_jobs(jobs),
        "max_new_tokens": max_new_tokens,
    }
    work = _ServerRun(server, jobs, options, journal_header, concurrency, max_failed, ctx)
    measure_test_prompts(prompts, tokenizer, ctx)
    asyncio.run(work.run(wait_s))
    return _write_artifact(work, target, shard_size, skipped, label)


@dataclass
class _ServerRun:
    """The requests of this step to one server, and their results."""

    server: ServerAddress
    jobs: Sequence[Job]
    options: RequestOptions
    journal_header: dict[str, str | int]
    concurrency: int
    max_failed: float
    ctx: Context
    answers: dict[str, ServerAnswer] = field(default_factory=dict)  # prompt id -> answer
    failed: dict[str, str] = field(default_factory=dict)  # prompt id -> reason
    server_name: str = ""  # engine and version
    _consecutive_failures: int = 0
    _new_tokens: int = 0
    _started_at: float = 0.0

    async def run(self, wait_s: float) -> None:
        """Request every answer that the journal does not hold yet; raises UserError where too many prompts fail."""
        async with http_client(self.concurrency, self.options.patience.timeout_s) as client:
            info = await wait_until_ready(client, self.server, wait_s)
            self.server_name = f"{info.engine} {info.version}".strip()
            completions = CompletionClient(self.server, info, self.options)
            with Journal(self.ctx.scratch / "answered.jsonl", {**self.journal_header, "model": info.model}) as journal:
                self.answers = journal.answers
                todo = [job for job in self.jobs if job.prompt_id not in journal.answers]
                self.ctx.note(
                    f"{self.server.base_url}: {self.server_name}, model {info.model}: {len(todo)} prompts to ask"
                )
                self._started_at = time.monotonic()

                async def ask(job: Job) -> None:
                    await self._request_one(client, completions, journal, job)

                await in_flight(todo, self.concurrency, ask)
        if len(self.failed) > self.max_failed * len(self.jobs) or not self.answers:
            raise UserError(
                f"{self.server.location}: {len(self.failed)} of {len(self.jobs)} prompts failed (the first: "
                f"{next(iter(self.failed.values()))}); {self._resume_hint()}, or raise max_failed"
            )

    async def _request_one(
        self, client: httpx.AsyncClient, completions: CompletionClient, journal: Journal, job: Job
    ) -> None:
        try:
            answer = await completions.complete(client, job)
        except (RetryableError, RefusedPrompt) as error:
            self.failed[job.prompt_id] = str(error)
            self._consecutive_failures += 1
            if self._consecutive_failures >= max(MIN_CONSECUTIVE_FAILURES, 2 * self.concurrency):
                raise UserError(
                    f"{self.server.location}: {self._consecutive_failures} prompts failed one after the other "
                    f"(the last: {error}); {self._resume_hint()}"
                ) from error
        else:
            self._consecutive_failures = 0
            self._new_tokens += len(answer.ids)
            journal.add(job.prompt_id, answer)
        rate = self._new_tokens / max(1e-9, time.monotonic() - self._started_at)
        done = len(self.answers) + len(self.failed)
        self.ctx.progress(done, len(self.jobs), f"prompts, {rate:,.0f} tokens/s")

    def _resume_hint(self) -> str:
        return f"{len(self.answers)} answers are kept: mend it and run again, and only the others are asked"


def _write_artifact(
    work: _ServerRun, target: Target, shard_size: int, skipped: NotAnswered, label: str
) -> Conversations:
    """Write the answers; returns the artifact, with the counts of answered, failed and skipped prompts."""
    ctx, names = work.ctx, _write_shards(work, shard_size)
    origin = f"The server at {work.server.base_url} answered these prompts."
    sample_of_shards(ctx.out, names, work.options.tokenizer, origin)
    write_manifest(ctx, target.key, names, shard_size)
    answered = len(work.answers)
    assert answered + len(work.failed) == len(work.jobs)
    for prompt_id, reason in sorted(work.failed.items()):
        ctx.set_aside(work.server.base_url, 0, reason, prompt_id)
    retokenised = sum(not answer.own_ids for answer in work.answers.values())
    if retokenised:
        ctx.note(f"{work.server_name}: shows no token ids, so the text of {retokenised} answers was tokenised again")
    accounts = {
        "num_asked": len(work.jobs) + skipped.too_long + skipped.marked,
        "num_answered": answered,
        "num_failed": len(work.failed),
        "num_skipped": skipped.too_long + skipped.marked,
        "num_tokenised_again": retokenised,
    }
    ctx.note(", ".join(f"{name.removeprefix('num_')} {number}" for name, number in list(accounts.items())[:4]))
    facts = {"target_key": target.key, **skipped.facts(), "server": work.server_name, "label": label}
    return Conversations.of_step(ctx, {**facts, **accounts, **summarise(ctx, names)})


def _write_shards(work: _ServerRun, shard_size: int) -> list[str]:
    """Write the answered prompts as shards, in the order of the jobs; returns the names of the shards."""
    rows = [job for job in work.jobs if job.prompt_id in work.answers]
    names = []
    for number, start in enumerate(range(0, len(rows), shard_size)):
        names.append(shard_name(number))
        answered = [(job, work.answers[job.prompt_id]) for job in rows[start : start + shard_size]]
        temperature = work.options.temperature
        conversations = [
            job.answered(reply.ids, ended=reply.ended, temperature=temperature, by="server") for job, reply in answered
        ]
        write_shard(work.ctx.out / names[-1], conversations)
    for stale in set(work.ctx.out.glob("shard-*")) - {work.ctx.out / name for name in names}:
        stale.unlink()  # from an attempt with another number of failures
    sweep(work.ctx.out)
    return names


def _end_tokens(tokenizer: Any, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that end a text, first the one with which the tokenizer ends a turn."""
    turn_end = tokenizer.eos_token_id
    return tuple(sorted(map(int, eos_token_ids), key=lambda token: (token != turn_end, token)))


def _digest_of_jobs(jobs: Sequence[Job]) -> str:
    """A digest of the prompts and how they are sampled."""
    digest = hashlib.sha256()
    for job in jobs:
        digest.update(f"{job.prompt_id} {job.sampled} {job.ids}\n".encode())
    return digest.hexdigest()[:16]
