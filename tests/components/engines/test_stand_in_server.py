"""Our own clients take a stand-in server for the engine whose protocol it speaks."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from components.bench.engines.connect import Connected, ServerPrompt, empty_cache, read_server_counters, send_request
from components.bench.settings import EngineServer
from components.engines.client import wait_until_ready
from components.engines.stand_in_server import DEPTH, stand_in_server

COUNT = 9


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp", "openai"])
def test_it_is_told_by_its_engine_and_streams_tokens_with_that_engine_s_acceptance(engine: str) -> None:
    async def ask(url: str) -> None:
        async with httpx.AsyncClient() as client:
            info = await wait_until_ready(client, EngineServer(base_url=url), 30.0)
            assert (info.engine, info.model) == (engine, "stand-in")
            server = Connected(EngineServer(base_url=url), *info)
            assert await empty_cache(client, server)
            before = await read_server_counters(client, server)
            answer = await send_request(client, server, ServerPrompt("p", "w", [1, 2, 3], "a b"), COUNT, 0.0)
            assert (answer.error, answer.finish_reason, answer.completion_tokens) == (None, "length", COUNT)
            assert answer.text == " a" * COUNT
            if engine != "openai":
                assert answer.tokens is not None and len(answer.tokens) == COUNT
                assert answer.acceptance is not None
                assert answer.acceptance.num_drafted == DEPTH * answer.acceptance.num_rounds
            after = await read_server_counters(client, server)
            if engine == "vllm":
                assert before is not None and after is not None
                counted = after.since(before)
                assert (counted.num_rounds, counted.num_accepted) == (4, 4)

    with stand_in_server(engine) as server:
        asyncio.run(ask(server.url))
