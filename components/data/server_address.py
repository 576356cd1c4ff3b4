"""A server that answers for a model: its address, its key, and which engine it turns out to be.

What a step that lets a server answer prompts and a step that measures servers both need. Answers of a server are never
trusted to be well-formed; anything unexpected is one line that names the address.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

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


BaseUrl = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+(/[^?#@\s]*)?$")]


class ServerAddress(BaseModel):
    """Where a server is, and what is known of it.

    base_url: its address with or without /v1, such as http://127.0.0.1:8000; no credentials, query or fragment.
    engine: which it is; auto asks it. openai is any other with /v1/completions.
    model: the name it serves; empty takes the first of /v1/models.
    api_key_variable: the environment variable that holds its key; the key is written nowhere.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    setting: ClassVar[str] = "base_url"  # of the step; errors begin with it

    base_url: BaseUrl
    engine: Engine = "auto"
    model: str = ""
    api_key_variable: str = ""

    @property
    def root(self) -> str:
        """The address without /v1."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    @property
    def where(self) -> str:
        """How an error begins."""
        return f"{self.setting}: {self.base_url}"

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
        where = f"{self.where}: ${self.api_key_variable}"
        key = os.environ.get(self.api_key_variable, "").strip()
        if not key:
            raise UserError(f"{where} is not set; put the server's key there")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"{where} is no key: only printable ASCII characters can be sent; set it again")
        return key


class Reached(NamedTuple):
    """What a server that answers says of itself."""

    engine: str
    version: str
    model: str


async def reach(client: httpx.AsyncClient, server: ServerAddress, wait_s: float) -> Reached:
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
        raise UserError(f"{server.where}: no answer within {wait_s:g} s ({said}); start it first") from error
    if reply.status_code >= 400 and not server.model:
        raise UserError(f"{server.where}: /v1/models says {reply.status_code}; name the `model` it serves")
    engine, version = await _identify(client, server, headers)
    return Reached(engine, version, server.model or _first_model(reply, server))


def _first_model(reply: httpx.Response, server: ServerAddress) -> str:
    try:
        served = [str(entry["id"]) for entry in reply.json()["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{server.where}: /v1/models is not OpenAI's; name the `model`") from error
    if not served:
        raise UserError(f"{server.where}: serves no model by itself; name the `model`")
    return served[0]


async def _identify(client: httpx.AsyncClient, server: ServerAddress, headers: dict[str, str]) -> tuple[str, str]:
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
