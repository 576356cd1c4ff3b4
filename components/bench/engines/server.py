"""Step `bench.measure_server`: measures serving engines on the same workloads, as a client sees them.

Every server gets the same prompts as the same token ids. Workload by workload and concurrency by concurrency, servers
take turns in random order; within a turn at most `concurrency` requests are in flight, each followed by the next at
once (a closed loop). Counters are read before and after each turn, so other clients of a server must be quiet.

Prefix caches are avoided where the engine allows it: vLLM gets a salt for each request, llama.cpp reuses no prompts,
SGLang's cache is emptied before each turn. Other engines may have a prefix cache: then TTFT at the second repetition or
concurrency is that of a hit.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from components.bench.engines.connect import (
    Answer,
    Connected,
    ServerPrompt,
    empty_cache,
    read_server_counters,
    send_request,
)
from components.bench.engines.rows import EngineSession, Turn, TurnResult, arm_of, check_arms_differ, decode_expected
from components.bench.prompts import EncodedPrompt, fitting_prompts, spread_by_workload, warm_up_prompts
from components.bench.settings import BatchSizes, EngineServer
from components.contract import Context, Draft, Machine, Measurements, Prompts, Target, UserError
from components.engines.client import text_of, wait_until_ready
from components.rows import write_rows
from components.targets.load import open_tokenizer


def measure_server(
    target: Target,
    prompts: Prompts,
    draft: Draft | None,
    *,
    servers: list[EngineServer],
    label: str,
    num_prompts: int,
    max_new_tokens: int,
    concurrency: BatchSizes,
    reps: int,
    num_warm_up: int,
    temperature: float,
    num_compared: int,
    wait_s: float,
    timeout_s: float,
    dtype: str,
    ctx: Context,
    machine: Machine,
) -> Measurements:
    """The step `bench.measure_server`; its settings are explained in components/bench/steps.py."""
    if num_compared and temperature > 0:
        raise UserError("num_compared: only greedy answers can be compared; set temperature to 0, or num_compared to 0")
    if silent := target.info.get("suppressed_tokens"):
        ctx.note(
            f"servers may say the {len(silent)} tokens that the target suppresses: vLLM takes no logit_bias while it"
            " drafts, so these requests have none"
        )
    tokenizer = open_tokenizer(target)
    picked = spread_by_workload(fitting_prompts(target, prompts, "test", max_new_tokens, ctx), num_prompts)
    warm_up = warm_up_prompts(target, prompts, picked, num_warm_up, max_new_tokens, ctx)
    timed, warming = ([server_prompt(tokenizer, prompt) for prompt in some] for some in (picked, warm_up))
    expected = decode_expected(target, timed, num_compared, max_new_tokens, dtype, ctx)
    sweep = Sweep(max_new_tokens, temperature, sorted(set(concurrency)), reps, ctx)
    results = asyncio.run(
        sweep.run([with_draft_key(server, draft) for server in servers], warming, timed, wait_s, timeout_s)
    )
    rows = EngineSession(ctx.key[:16], target.key, dtype, temperature).rows(results, tokenizer, expected)
    if all(row.status == "error" for row in rows.requests):
        raise UserError(f"servers: every request failed; the first: {rows.requests[0].error}")
    write_rows(ctx.out, [*rows.requests, *rows.rounds, *rows.acceptance])
    failed = sum(row.status == "error" for row in rows.requests)
    if failed:
        ctx.note(f"{failed} of {len(rows.requests)} requests failed; each is a row with its reason")
    return Measurements.of_step(
        ctx,
        {
            "label": label,
            "servers": [server.label for server in dict.fromkeys(result.turn.server for result in results)],
            "num_prompts": len(timed),
            "num_requests": len(rows.requests),
            "num_failed": failed,
            "machine_id": machine.machine_id,
            "arms": rows.summary(),
        },
    )


def with_draft_key(server: EngineServer, draft: Draft | None) -> EngineServer:
    """The server's settings, with the drafter's key if they state none and the method is the drafter's."""
    if draft is None or server.draft_key or server.method != draft.info["method"]:
        return server
    return server.model_copy(update={"draft_key": draft.key})


def server_prompt(tokenizer: Any, prompt: EncodedPrompt) -> ServerPrompt:
    """A prompt as token ids, and as a text that encodes to the same ids, for servers that take text only."""
    return ServerPrompt(prompt.prompt_id, prompt.workload, prompt.ids, text_of(tokenizer, prompt.ids))


@dataclass(frozen=True)
class Sweep:
    """Settings of the requests to all servers."""

    max_new_tokens: int
    temperature: float
    concurrency: Sequence[int]
    reps: int
    ctx: Context

    async def run(
        self,
        servers: Sequence[EngineServer],
        warm_up: Sequence[ServerPrompt],
        timed: Sequence[ServerPrompt],
        wait_s: float,
        timeout_s: float,
    ) -> list[TurnResult]:
        """Run all turns; results in their order, warm-up first."""
        # One connection per request: a server may close an idle one just as a request is sent.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=httpx.Timeout(timeout_s), limits=limits, trust_env=False) as client:
            connected = [Connected(server, *await wait_until_ready(client, server, wait_s)) for server in servers]
            for server in connected:
                self.ctx.note(f"{server.settings.base_url}: {server.label}, model {server.model}")
            check_arms_differ([arm_of(one, one.settings.arm_method, one.settings.arm_depth) for one in connected])
            turns = self._turns(connected, warm_up, timed)
            total, results = sum(len(turn.prompts) for turn in turns), list[TurnResult]()
            for turn in turns:
                results.append(await self._run_turn(client, turn))
                self.ctx.progress(sum(len(result.answers) for result in results), total, "requests")
        return results

    def _turns(
        self, servers: Sequence[Connected], warm_up: Sequence[ServerPrompt], timed: Sequence[ServerPrompt]
    ) -> list[Turn]:
        order = random.Random(self.ctx.seed)
        groups: Mapping[str, list[ServerPrompt]] = {
            workload: [prompt for prompt in timed if prompt.workload == workload]
            for workload in dict.fromkeys(prompt.workload for prompt in timed)
        }
        turns = [Turn(server, "warm_up", 1, 0, True, warm_up) for server in servers if warm_up]
        for rep in range(self.reps):
            for concurrency in self.concurrency:
                for workload, group in groups.items():
                    shuffled = order.sample(list(servers), len(servers))
                    turns += [Turn(server, workload, concurrency, rep, False, group) for server in shuffled]
        return turns

    async def _run_turn(self, client: httpx.AsyncClient, turn: Turn) -> TurnResult:
        """Run one closed loop: each of `concurrency` workers sends its next request when its last one has ended."""
        if not await empty_cache(client, turn.server):
            address = turn.server.settings.base_url
            self.ctx.note(
                f"{address}: /flush_cache was refused: times to the first token may be hits of its prefix cache"
            )
        before = await read_server_counters(client, turn.server)
        answers: dict[int, Answer] = {}
        waiting = iter(enumerate(turn.prompts))

        async def work() -> None:
            for number, prompt in waiting:
                answers[number] = await send_request(client, turn.server, prompt, self.max_new_tokens, self.temperature)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(turn.concurrency, len(turn.prompts))):
                group.create_task(work())
        after = await read_server_counters(client, turn.server)
        server_counts = None
        if before is not None and after is not None:
            try:
                server_counts = after.since(before)
            except ValueError as error:
                raise UserError(f"servers: {turn.server.settings.base_url}: {error}; measure again") from error
        return TurnResult(turn, [answers[number] for number in range(len(turn.prompts))], server_counts)
