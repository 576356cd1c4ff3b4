"""A server is identified by the paths that only its engine serves, and what is no answer is one line."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from components.contract import UserError
from components.engines.client import ServerInfo, wait_until_ready
from components.engines.server_address import ServerAddress

MODELS = {"data": [{"id": "tiny"}, {"id": "other"}]}


def identify(replies: dict[str, object], **settings: str) -> ServerInfo:
    """The info of a server that answers these paths with JSON, and every other with 404."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.path
        return httpx.Response(200, json=replies[path]) if path in replies else httpx.Response(404)

    async def ask() -> ServerInfo:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await wait_until_ready(client, ServerAddress(base_url="http://host/v1", **settings), 1.0)  # type: ignore[arg-type]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("replies", "info"),
    [
        ({"/version": {"version": "0.32.0"}}, ("vllm", "0.32.0", "tiny")),
        ({"/get_server_info": {"version": "0.6"}}, ("sglang", "0.6", "tiny")),
        ({"/props": {"build_info": "b1"}}, ("llama.cpp", "b1", "tiny")),
        ({"/version": ["no object"], "/openapi.json": {"paths": {"/load_model": {}}}}, ("transformers", "", "tiny")),
        ({}, ("openai", "", "tiny")),
    ],
)
def test_an_engine_is_known_by_what_only_it_serves(replies: dict[str, object], info: tuple[str, str, str]) -> None:
    assert identify({"/v1/models": MODELS, **replies}) == info


def test_settings_come_before_what_the_server_says() -> None:
    info = identify({"/v1/models": MODELS, "/version": {"version": "1"}}, engine="sglang", model="mine")
    assert info == ("sglang", "", "mine")


@pytest.mark.parametrize(("models", "message"), [({"data": []}, "serves no model"), ({"models": 3}, "is not OpenAI's")])
def test_a_list_without_models_is_one_line(models: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=rf"base_url: http://host/v1: .*{message}"):
        identify({"/v1/models": models})
