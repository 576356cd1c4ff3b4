"""A serving engine behind an address: which one it is, which version, which model, and what its counters say.

Answers of a server are never trusted to be well-formed; anything unexpected is one line that names the address.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from components.bench.engine_acceptance import Counters, read_counters
from components.contract import UserError

if TYPE_CHECKING:
    import httpx

Engine = Literal["auto", "vllm", "sglang", "llama.cpp", "transformers", "openai"]

_SIGNS: Final[tuple[tuple[Engine, str, str], ...]] = (
    ("vllm", "/version", "version"),
    ("sglang", "/get_server_info", "version"),
    ("llama.cpp", "/props", "build_info"),
)
"""(engine, an address that only it has, the field with its version)."""

_NOT_YET: Final = (429, 502, 503, 504)
"""What servers answer while they load."""


class EngineServer(BaseModel):
    """One server to be measured.

    base_url: its address with or without /v1, such as http://127.0.0.1:8000; no credentials, query or fragment.
    engine: which it is; auto asks it. openai is any other with /v1/completions.
    model: the name it serves; empty takes the first of /v1/models.
    method: how it speculates (eagle3, mtp, ngram ...); empty is external where it drafts, none where it does not.
    depth_k: guesses a round it was started with; 0 takes what it reports itself.
    draft_key: the artifact key of the drafter it serves, where it is one of ours.
    api_key_variable: the environment variable that holds its key; the key is written nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str = Field(pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$")
    engine: Engine = "auto"
    model: str = ""
    method: str = ""
    depth_k: int = Field(default=0, ge=0)
    draft_key: str = ""
    api_key_variable: str = ""

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def headers(self) -> dict[str, str]:
        """The credentials, where there are some; raises UserError when the variable holds no usable key."""
        key = self._key()
        return {"Authorization": f"Bearer {key}"} if key else {}

    def shown(self, said: str) -> str:
        """What the server or a library said, as one line of at most 300 characters, without the key."""
        key = self._key()
        for form in (key, json.dumps(key)[1:-1]) if key else ():  # as it is, and as a JSON text holds it
            said = said.replace(form, "***")
        return " ".join(said.split())[:300]

    def _key(self) -> str:
        """The key without the line feed that files end on; never shown, since HTTP libraries quote a bad header."""
        if not self.api_key_variable:
            return ""
        where = f"servers: {self.base_url}: ${self.api_key_variable}"
        key = os.environ.get(self.api_key_variable, "").strip()
        if not key:
            raise UserError(f"{where} is not set; put the server's key there")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{where} is no key: only printable ASCII characters can be sent; set it again")
        return key


@dataclass(frozen=True)
class Connected:
    """A server that answers."""

    settings: EngineServer
    engine: str
    version: str
    model: str

    @property
    def label(self) -> str:
        """How tables and notes call it."""
        method = f" {self.settings.method or 'external'} k={self.settings.depth_k}" if self.settings.depth_k else ""
        return f"{self.engine} {self.version}".strip() + method


async def connect(client: httpx.AsyncClient, server: EngineServer, wait_s: float) -> Connected:
    """Wait until a server answers, and ask what it is; raises UserError after `wait_s` seconds without an answer."""
    import httpx
    from tenacity import AsyncRetrying, RetryError, retry_if_exception_type, stop_after_delay, wait_exponential

    retrying = AsyncRetrying(
        retry=retry_if_exception_type((httpx.TransportError, httpx.HTTPStatusError)),
        wait=wait_exponential(multiplier=0.2, max=3),
        stop=stop_after_delay(wait_s),
    )
    headers = server.headers()
    try:
        async for attempt in retrying:
            with attempt:
                reply = await client.get(f"{server.root}/v1/models", headers=headers)
                if reply.status_code in _NOT_YET:
                    reply.raise_for_status()
    except RetryError as error:
        why = error.last_attempt.exception()
        said = " ".join(str(why).split())[:200] or type(why).__name__
        raise UserError(
            f"servers: {server.base_url}: no answer within {wait_s:g} s ({said}); start it first"
        ) from error
    if reply.status_code >= 400 and not server.model:
        raise UserError(f"servers: {server.base_url}: /v1/models says {reply.status_code}; name the `model` it serves")
    engine, version = await _identify(client, server, headers)
    return Connected(server, engine, version, server.model or _first_model(reply, server))


async def empty_cache(client: httpx.AsyncClient, server: Connected) -> bool:
    """Empty SGLang's prefix cache, so that a turn pays for its prompts; whether it was done, or is not needed."""
    import httpx

    if server.engine != "sglang":
        return True
    try:
        reply = await client.post(f"{server.settings.root}/flush_cache", headers=server.settings.headers())
    except httpx.TransportError:  # its requests fail next, each a row with its reason
        return False
    return reply.status_code == 200


async def counters(client: httpx.AsyncClient, server: Connected) -> Counters | None:
    """The server's speculation counters now; None where it shows none, or none that can be read."""
    import httpx

    try:
        reply = await client.get(f"{server.settings.root}/metrics", headers=server.settings.headers())
    except httpx.TransportError:
        return None
    if reply.status_code != 200 or "vllm:" not in reply.text:
        return None
    try:
        return read_counters(reply.text)
    except (ValueError, KeyError):  # not Prometheus text, or cut off: its requests are still worth their rows
        return None


def _first_model(reply: httpx.Response, server: EngineServer) -> str:
    try:
        served = [str(entry["id"]) for entry in reply.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"servers: {server.base_url}: /v1/models is not OpenAI's; name the `model`") from error
    if not served:
        raise UserError(f"servers: {server.base_url}: serves no model by itself; name the `model`")
    return served[0]


async def _identify(client: httpx.AsyncClient, server: EngineServer, headers: dict[str, str]) -> tuple[str, str]:
    for engine, place, field in _SIGNS:
        if server.engine not in ("auto", engine):
            continue
        found = await _facts(client, server.root + place, headers)
        if found is not None and isinstance(found.get(field), str):
            return engine, str(found[field])
    if server.engine != "auto":
        return server.engine, ""
    paths = (await _facts(client, f"{server.root}/openapi.json", headers) or {}).get("paths")
    return ("transformers" if isinstance(paths, dict) and "/load_model" in paths else "openai"), ""


async def _facts(client: httpx.AsyncClient, address: str, headers: dict[str, str]) -> dict[str, Any] | None:
    """The JSON object at an address, or None where there is none."""
    import httpx

    try:
        reply = await client.get(address, headers=headers)
        found = reply.json() if reply.status_code == 200 else None
    except (httpx.TransportError, ValueError):  # this engine does not have it
        return None
    return found if isinstance(found, dict) else None
