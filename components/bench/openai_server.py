"""Step `bench.measure_server`: serving engines on the same workloads, as a client sees them, in the same rows.

Every server gets the same prompts as the same token ids. Workload by workload and concurrency by concurrency, servers
take turns in random order; within a turn at most `concurrency` requests are in flight, each followed by the next at
once (a closed loop). Counters are read before and after each turn, so other clients of a server must be quiet.

Every request pays for its own prompt where the engine lets it: vLLM gets a salt for each request, llama.cpp is told not
to reuse prompts, SGLang's cache is emptied before each turn. Others may answer from a prefix cache: then TTFT at the
second repetition or concurrency is that of a hit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.bench.engine_server import EngineServer
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError

if TYPE_CHECKING:
    import httpx

    from components.bench.engine_acceptance import Acceptance
    from components.bench.engine_answers import Answer, Asked
    from components.bench.engine_server import Connected


@dataclass(frozen=True)
class Turn:
    """One server's turn: some prompts of one workload at one concurrency."""

    server: Connected
    workload: str
    concurrency: int
    rep: int
    is_warmup: bool
    asked: Sequence[Asked]


@dataclass(frozen=True)
class Taken:
    """A turn that is over. counted: the server's own counters, after minus before; None where it has none."""

    turn: Turn
    answers: Sequence[Answer]
    counted: Acceptance | None


def measure_server(
    target: Target,
    prompts: Prompts,
    draft: Draft | None = None,
    *,
    servers: Annotated[list[EngineServer], Field(min_length=1)],
    label: str = "",
    num_prompts: Annotated[int, Field(ge=1)] = 32,
    max_new_tokens: Annotated[int, Field(ge=2)] = 128,
    concurrency: Annotated[list[Annotated[int, Field(ge=1, le=1024)]], Field(min_length=1)] = [1],  # noqa: B006
    reps: Annotated[int, Field(ge=1, le=100)] = 1,
    num_warm_up: Annotated[int, Field(ge=0)] = 2,
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.0,
    num_compared: Annotated[int, Field(ge=0)] = 0,
    wait_s: Annotated[float, Field(gt=0.0)] = 30.0,
    timeout_s: Annotated[float, Field(gt=0.0)] = 600.0,
    dtype: str = "unknown",
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """Time every server on the same prompts, and count what it accepted.

    Args:
        target: the model they serve; its tokenizer encodes the prompts and counts tokens where a server does not.
        prompts: its `test` split is timed, its `warm_up` split runs first and does not count.
        draft: the drafter that servers of its method serve; its key is their draft_key where they state none.
        servers: base_url of each, with engine, model, method, depth_k, draft_key and api_key_variable where they say
            more than the server itself does.
        label: what is behind the addresses, in words; it is part of the step's key, which a server is not: change it,
            or use --force, when the server has changed.
        num_prompts: test prompts of each workload, evenly over the split.
        max_new_tokens: the longest answer, tokens.
        concurrency: requests in flight at most, one sweep through the prompts for each.
        reps: times that every server answers every prompt at every concurrency.
        num_warm_up: warm-up prompts that every server answers before time counts.
        temperature: 0 is greedy.
        num_compared: test prompts of each workload whose answers are compared token for token with Draftsmith's own
            plain greedy decoding of the target on this machine (needs temperature 0); 0 compares none.
        wait_s: how long a server may take to answer for the first time, seconds.
        timeout_s: how long a request may go without news from the server before it counts as failed, seconds.
        dtype: the arithmetic of the server, for the record; our own answers are decoded in bfloat16 where it is that.
    """
    from components.bench.end_to_end import only_untimed
    from components.bench.engine_rows import EngineSession, compared_answers
    from components.bench.subjects import fitting_prompts, spread
    from components.rows import write_rows
    from components.targets.load import open_tokenizer, target_facts

    if num_compared and temperature > 0:
        raise UserError("num_compared: only greedy answers can be compared; set temperature to 0, or num_compared to 0")
    room = int(target_facts(target)["shape"]["max_position_embeddings"])
    tokenizer = open_tokenizer(target)
    found = fitting_prompts(target, room, prompts, "test", max_new_tokens, ctx)
    by_workload = {prompt.workload: [p for p in found if p.workload == prompt.workload] for prompt in found}
    chosen = [prompt for workload in sorted(by_workload) for prompt in spread(by_workload[workload], num_prompts)]
    timed = [asked_of(tokenizer, prompt.prompt_id, prompt.workload, prompt.ids) for prompt in chosen]
    warm_up = []
    if num_warm_up:
        warming = only_untimed(fitting_prompts(target, room, prompts, "warm_up", max_new_tokens, ctx), chosen)
        warming = warming[:num_warm_up]
        warm_up = [asked_of(tokenizer, prompt.prompt_id, prompt.workload, prompt.ids) for prompt in warming]
    expected = compared_answers(target, timed, num_compared, max_new_tokens, dtype, ctx)
    sweep = Sweep(max_new_tokens, temperature, sorted(set(concurrency)), reps, ctx)
    taken = asyncio.run(sweep.run([with_key(one, draft) for one in servers], warm_up, timed, wait_s, timeout_s))
    rows = EngineSession(ctx.key[:16], target.key, dtype, temperature).rows(taken, tokenizer, expected)
    if all(row.status == "error" for row in rows.requests):
        raise UserError(f"servers: every request failed; the first: {rows.requests[0].error}")
    write_rows(ctx.out, [*rows.requests, *rows.rounds, *rows.counted])
    failed = sum(row.status == "error" for row in rows.requests)
    if failed:
        ctx.note(f"{failed} of {len(rows.requests)} requests failed; each is a row with its reason")
    return Measurements.made(
        ctx,
        {
            "label": label,
            "servers": [server.label for server in dict.fromkeys(turn.turn.server for turn in taken)],
            "num_prompts": len(timed),
            "num_requests": len(rows.requests),
            "num_failed": failed,
            "machine_id": machine.machine_id,
            "arms": rows.summary(),
        },
    )


def with_key(server: EngineServer, draft: Draft | None) -> EngineServer:
    """The server with the key of the drafter that it serves, where it stated none."""
    if draft is None or server.draft_key or server.method != draft.info["method"]:
        return server
    return server.model_copy(update={"draft_key": draft.key})


def asked_of(tokenizer: Any, prompt_id: str, workload: str, ids: list[int]) -> Asked:
    """A prompt as ids, and as the text that a server without ids has to be given to see the same ones."""
    from components.bench.engine_answers import Asked
    from components.data.server_tokens import text_of

    return Asked(prompt_id, workload, ids, text_of(tokenizer, ids))


@dataclass(frozen=True)
class Sweep:
    """How every server is asked."""

    max_new_tokens: int
    temperature: float
    concurrency: Sequence[int]
    reps: int
    ctx: Context

    async def run(
        self,
        servers: Sequence[EngineServer],
        warm_up: Sequence[Asked],
        timed: Sequence[Asked],
        wait_s: float,
        timeout_s: float,
    ) -> list[Taken]:
        """Every turn, in the order in which they were taken; warm-up first."""
        import httpx

        from components.bench.engine_rows import arm_of, refuse_doubles
        from components.bench.engine_server import connect

        # A connection for every request: servers close idle ones, and losing that race is no failure of theirs.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=httpx.Timeout(timeout_s), limits=limits, trust_env=False) as client:
            connected = [await connect(client, server, wait_s) for server in servers]
            for server in connected:
                self.ctx.note(f"{server.settings.base_url}: {server.label}, model {server.model}")
            refuse_doubles([arm_of(server, server.settings.method, server.settings.depth_k) for server in connected])
            turns = self._turns(connected, warm_up, timed)
            total, taken = sum(len(turn.asked) for turn in turns), list[Taken]()
            for turn in turns:
                taken.append(await self._take(client, turn))
                self.ctx.progress(sum(len(one.answers) for one in taken), total, "requests")
        return taken

    def _turns(self, servers: Sequence[Connected], warm_up: Sequence[Asked], timed: Sequence[Asked]) -> list[Turn]:
        order = random.Random(self.ctx.seed)
        groups: Mapping[str, list[Asked]] = {
            workload: [asked for asked in timed if asked.workload == workload]
            for workload in dict.fromkeys(asked.workload for asked in timed)
        }
        turns = [Turn(server, "warm_up", 1, 0, True, warm_up) for server in servers if warm_up]
        for rep in range(self.reps):
            for concurrency in self.concurrency:
                for workload, asked in groups.items():
                    shuffled = order.sample(list(servers), len(servers))
                    turns += [Turn(server, workload, concurrency, rep, False, asked) for server in shuffled]
        return turns

    async def _take(self, client: httpx.AsyncClient, turn: Turn) -> Taken:
        """One closed loop: `concurrency` workers, each with its next request as soon as the last has ended."""
        from components.bench.engine_answers import ask
        from components.bench.engine_server import counters, empty_cache

        if not await empty_cache(client, turn.server):
            where = turn.server.settings.base_url
            self.ctx.note(
                f"{where}: /flush_cache was refused: times to the first token may be hits of its prefix cache"
            )
        before = await counters(client, turn.server)
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(turn.asked))

        async def work() -> None:
            for number, asked in waiting:
                answers[number] = await ask(client, turn.server, asked, self.max_new_tokens, self.temperature)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(turn.concurrency, len(turn.asked))):
                group.create_task(work())
        after = await counters(client, turn.server)
        counted = None
        if before is not None and after is not None:
            try:
                counted = after.since(before)
            except ValueError as error:
                raise UserError(f"servers: {turn.server.settings.base_url}: {error}; measure again") from error
        return Taken(turn, [answers[number] for number in range(len(turn.asked))], counted)
