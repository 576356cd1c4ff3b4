"""A serving engine under measurement: its stated settings, and its counters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from components.bench.engine_acceptance import Counters, read_counters
from components.data.server_address import ServerAddress, wait_until_ready

if TYPE_CHECKING:
    import httpx


class EngineServer(ServerAddress):
    """One server to be measured.

    base_url: its address with or without /v1, such as http://127.0.0.1:8000; no credentials, query or fragment.
    engine: which it is; auto asks it. openai is any other with /v1/completions.
    model: the name it serves; empty takes the first of /v1/models.
    method: how it speculates (eagle3, mtp, ngram ...); empty is external where it drafts, none where it does not.
    depth_k: draft tokens a round it was started with; 0 takes what it reports itself.
    draft_key: the artifact key of the drafter it serves, where it is one of ours.
    api_key_variable: the environment variable that holds its key; the key is written nowhere.
    """

    setting: ClassVar[str] = "servers"

    method: str = ""
    depth_k: int = Field(default=0, ge=0)
    draft_key: str = ""


@dataclass(frozen=True)
class Connected:
    """A server that answered, and its identity."""

    settings: EngineServer
    engine: str
    version: str
    model: str

    @property
    def label(self) -> str:
        """Its name in tables and notes."""
        method = f" {self.settings.method or 'external'} k={self.settings.depth_k}" if self.settings.depth_k else ""
        return f"{self.engine} {self.version}".strip() + method


async def connect(client: httpx.AsyncClient, server: EngineServer, wait_s: float) -> Connected:
    """Wait until a server answers and identify it; raises UserError after `wait_s` seconds without an answer."""
    return Connected(server, *await wait_until_ready(client, server, wait_s))


async def empty_cache(client: httpx.AsyncClient, server: Connected) -> bool:
    """Empty SGLang's prefix cache before a turn; returns False where the server refused."""
    import httpx

    if server.engine != "sglang":
        return True
    try:
        reply = await client.post(f"{server.settings.root}/flush_cache", headers=server.settings.headers())
    except httpx.TransportError:  # its requests fail next, with their reasons
        return False
    return reply.status_code == 200


async def read_server_counters(client: httpx.AsyncClient, server: Connected) -> Counters | None:
    """The server's current speculation counters; None where it has none that can be read."""
    import httpx

    try:
        reply = await client.get(f"{server.settings.root}/metrics", headers=server.settings.headers())
    except httpx.TransportError:
        return None
    if reply.status_code != 200 or "vllm:" not in reply.text:
        return None
    try:
        return read_counters(reply.text)
    except (ValueError, KeyError):  # not Prometheus text, or cut off
        return None
