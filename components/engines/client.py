"""Talk to a model server: wait until it answers, identify its engine, and turn token ids into text and back.

Replies are never trusted to be well-formed; anything unexpected becomes one line that names the address. Some servers
take or return text only, so ids are converted with the target's tokenizer and refused where they would not survive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import httpx
from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_exponential

from components.contract import UserError
from components.engines.server_address import ServerAddress, ServerEngine
from components.outside_json import JsonObject
from components.text import message_of

_ENGINE_PROBES: Final[tuple[tuple[ServerEngine, str, str], ...]] = (
    ("vllm", "/version", "version"),
    ("sglang", "/get_server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
)
"""(engine, a path that only this engine serves, the field of its reply with the version)."""

_LOADING_STATUSES: Final = (429, 502, 503, 504)
"""HTTP status codes of servers that still load their model."""


class ServerInfo(NamedTuple):
    """The engine, its version and the model of a server that answers."""

    engine: str
    version: str
    model: str


async def wait_until_ready(client: httpx.AsyncClient, server: ServerAddress, wait_s: float) -> ServerInfo:
    """Wait until a server answers and identify it; raises UserError after `wait_s` seconds without an answer."""
    retrying = AsyncRetrying(
        retry=retry_if_exception_type((httpx.TransportError, httpx.HTTPStatusError)),
        wait=wait_exponential(multiplier=0.2, max=3),
        stop=stop_after_delay(wait_s),
    )
    headers = server.headers()
    try:
        async for attempt in retrying:
            with attempt:
                models = await client.get(f"{server.root}/v1/models", headers=headers)
                if models.status_code in _LOADING_STATUSES:
                    models.raise_for_status()
    except RetryError as error:
        message = message_of(error.last_attempt.exception() or error, 200)
        raise UserError(f"{server.location}: no answer within {wait_s:g} s ({message}); start it first") from error
    if models.status_code >= 400 and not server.model:
        raise UserError(f"{server.location}: /v1/models says {models.status_code}; name the `model` it serves")
    engine, version = await _identify(client, server, headers)
    return ServerInfo(engine, version, server.model or _first_model(models, server))


def _first_model(reply: httpx.Response, server: ServerAddress) -> str:
    try:
        served = [str(entry["id"]) for entry in reply.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{server.location}: /v1/models is not OpenAI's; name the `model`") from error
    if not served:
        raise UserError(f"{server.location}: serves no model by itself; name the `model`")
    return served[0]


async def _identify(client: httpx.AsyncClient, server: ServerAddress, headers: dict[str, str]) -> tuple[str, str]:
    for engine, path, field in _ENGINE_PROBES:
        if server.engine not in ("auto", engine):
            continue
        facts = await _get_json(client, server.root + path, headers)
        if facts is not None and isinstance(facts.get(field), str):
            return engine, str(facts[field])
    if server.engine != "auto":
        return server.engine, ""
    paths = (await _get_json(client, f"{server.root}/openapi.json", headers) or {}).get("paths")
    return ("transformers" if isinstance(paths, dict) and "/load_model" in paths else "openai"), ""


async def _get_json(client: httpx.AsyncClient, address: str, headers: dict[str, str]) -> JsonObject | None:
    """The JSON object at an address, None where there is none."""
    try:
        reply = await client.get(address, headers=headers)
        payload = reply.json() if reply.status_code == 200 else None
    except (httpx.TransportError, ValueError):  # this engine does not have it
        return None
    return payload if isinstance(payload, dict) else None


def text_of(tokenizer: Any, ids: Sequence[int]) -> str | None:
    """A text that the server's tokenizer encodes to exactly these ids; None where there is none.

    The text omits a beginning-of-text token that the tokenizer adds, because the server adds it too.
    """
    expected = list(ids)
    beginning = getattr(tokenizer, "bos_token_id", None)
    for part in (expected, expected[1:] if expected and expected[0] == beginning else expected):
        text: str = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if list(tokenizer(text, verbose=False)["input_ids"]) == expected:
            return text
    return None


def ids_of_answer(tokenizer: Any, prompt_text: str, prompt_ids: Sequence[int], answer: str) -> list[int] | None:
    """Token ids for an answer's text; None where no ids decode to exactly this text.

    The answer is tokenised behind its prompt, so that a token which begins with a space keeps it, and by itself where a
    token would span both.
    """
    start = list(prompt_ids)
    together = list(tokenizer(prompt_text + answer, verbose=False)["input_ids"])
    if together[: len(start)] == start:
        return together[len(start) :]
    alone = list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    back = tokenizer.decode(alone, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return alone if back == answer else None
