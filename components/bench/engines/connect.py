"""A serving engine under measurement: its counters, and one request to it, streamed and timed at the client.

A prompt is sent as exact token ids where the engine takes them:

    vllm            POST /v1/completions  prompt as ids, token ids back, acceptance in the last chunk
    sglang          POST /generate        input_ids; every chunk holds all output so far and the counts
    llama.cpp       POST /completion      prompt as ids, token ids back, timings in the last chunk
    transformers,
    openai          POST /v1/completions  prompt as a text that encodes to the same ids; token counts from usage

Time to first token is that of the first chunk with a token; `first_chunk_tokens` shows engines that send several at
once. Every failure becomes an Answer with its reason, so that no request is lost.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field

import httpx

from components.bench.engines.acceptance import Acceptance, Counters, read_acceptance, read_counters
from components.bench.settings import EngineServer
from components.outside_json import JsonObject


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
        depth = self.settings.arm_depth
        method = f" {self.settings.arm_method or 'external'} k={depth}" if depth else ""
        return f"{self.engine} {self.version}".strip() + method


async def empty_cache(client: httpx.AsyncClient, server: Connected) -> bool:
    """Empty SGLang's prefix cache before a turn; returns False where the server refused."""
    if server.engine != "sglang":
        return True
    try:
        reply = await client.post(f"{server.settings.root}/flush_cache", headers=server.settings.headers())
    except httpx.TransportError:  # its requests fail next, with their reasons
        return False
    return reply.status_code == 200


async def read_server_counters(client: httpx.AsyncClient, server: Connected) -> Counters | None:
    """The server's current speculation counters; None where it has none that can be read."""
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


@dataclass(frozen=True)
class ServerPrompt:
    """A prompt for every server: token ids, and a text that encodes to the same ids (None if no text does)."""

    prompt_id: str
    workload: str
    ids: list[int]
    text: str | None


@dataclass
class Answer:
    """The answer to one request. Times are client-side nanoseconds of one clock; tokens is None without token ids.

    chunk_tokens: the number of tokens of each chunk, in order; empty where the engine returns no ids.
    """

    sent_ns: int
    first_ns: int | None = None
    last_ns: int | None = None
    end_ns: int = 0
    text: str = ""
    tokens: list[int] | None = None
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str = ""
    acceptance: Acceptance | None = None
    error: str | None = None


def request_body(
    server: Connected, prompt: ServerPrompt, max_new_tokens: int, temperature: float
) -> tuple[str, JsonObject]:
    """(address, JSON body) of a streaming request in this engine's API."""
    root = server.settings.root
    if server.engine == "sglang":
        sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        return f"{root}/generate", {"input_ids": prompt.ids, "sampling_params": sampling, "stream": True}
    if server.engine == "llama.cpp":
        return f"{root}/completion", {
            "prompt": prompt.ids,
            "n_predict": max_new_tokens,
            "temperature": temperature,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,  # no reuse of earlier prompts
        }
    body: JsonObject = {
        "model": server.model,
        "prompt": prompt.ids if server.engine == "vllm" else prompt.text,
        "max_tokens": max_new_tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if server.engine == "vllm":
        body["return_token_ids"] = True
        body["cache_salt"] = secrets.token_hex(16)  # no hits in the prefix cache
    return f"{root}/v1/completions", body


async def send_request(
    client: httpx.AsyncClient, server: Connected, prompt: ServerPrompt, max_new_tokens: int, temperature: float
) -> Answer:
    """Send one timed request; server and network failures become Answer.error."""
    address, body = request_body(server, prompt, max_new_tokens, temperature)
    answer = Answer(sent_ns=time.perf_counter_ns())
    if body.get("prompt", prompt.ids) is None:
        answer.error = "this engine takes text only, and no text encodes to these tokens"
        answer.end_ns = answer.sent_ns
        return answer
    try:
        async with client.stream("POST", address, json=body, headers=server.settings.headers()) as reply:
            if reply.status_code != 200:
                message = (await reply.aread()).decode("utf-8", "replace")
                answer.error = f"status {reply.status_code}: {message}"
            else:
                async for event in _events(reply):
                    _add_chunk(answer, event, time.perf_counter_ns())
                if answer.error is None and not answer.finish_reason:
                    answer.error = "the stream ended before the answer did"
    except httpx.HTTPError as error:
        answer.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError, TypeError) as error:
        answer.error = f"not an answer of {server.engine}: {error}"
    answer.end_ns = time.perf_counter_ns()
    if answer.error is not None:
        answer.error = server.settings.without_key(answer.error)
    return answer


async def _events(reply: httpx.Response) -> AsyncIterator[JsonObject]:
    """The JSON objects of a stream of server-sent events.

    Lines end at line feeds only: httpx's own line splitting also breaks at U+2028, which JSON text may contain.
    """
    rest = b""
    async for piece in reply.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                event = json.loads(data)
                if not isinstance(event, dict):
                    raise ValueError(f"an event that is no object: {data[:80]!r}")
                yield event


def _add_chunk(answer: Answer, event: JsonObject, now: int) -> None:
    """Add one chunk to the answer."""
    if "error" in event:
        answer.error = str(event["error"])
        return
    if "meta_info" in event:
        _add_cumulative_chunk(answer, event, now)
        return
    choices = event.get("choices") or []
    place: JsonObject = choices[0] if choices else event
    ids = place.get("token_ids", place.get("tokens"))
    text = str(place.get("text") or place.get("content") or "")
    _append_output(answer, text, ids if isinstance(ids, list) else None, now)
    if place.get("finish_reason"):
        answer.finish_reason = str(place["finish_reason"])
    elif event.get("stop") is True:  # llama.cpp
        answer.finish_reason = "length" if event.get("stop_type") == "limit" else "stop"
        answer.prompt_tokens, answer.completion_tokens = event.get("tokens_evaluated"), event.get("tokens_predicted")
    usage = event.get("usage")
    if isinstance(usage, Mapping):
        answer.prompt_tokens, answer.completion_tokens = usage.get("prompt_tokens"), usage.get("completion_tokens")
    answer.acceptance = read_acceptance(event) or answer.acceptance


def _add_cumulative_chunk(answer: Answer, event: JsonObject, now: int) -> None:
    """Add one chunk of SGLang, which holds the output so far."""
    meta = event["meta_info"]
    ids, text = event.get("output_ids"), str(event.get("text") or "")
    num_before = len(answer.tokens or ())
    total = int(meta["completion_tokens"])
    if isinstance(ids, list):
        whole = len(ids) == total  # with incremental output a chunk holds only new tokens
        _append_output(answer, text[len(answer.text) :] if whole else text, ids[num_before:] if whole else ids, now)
    elif total > (answer.completion_tokens or 0):
        _append_output(answer, text[len(answer.text) :], None, now)
    answer.prompt_tokens, answer.completion_tokens = meta.get("prompt_tokens"), total
    finish = meta.get("finish_reason")
    if isinstance(finish, Mapping):
        answer.finish_reason = str(finish.get("type") or "stop")
    answer.acceptance = read_acceptance(event) or answer.acceptance


def _append_output(answer: Answer, text: str, ids: Sequence[int] | None, now: int) -> None:
    """Append new text and tokens and set the times; a chunk without either changes nothing."""
    if not text and not ids:
        return
    if ids is not None:
        answer.tokens = [*(answer.tokens or []), *map(int, ids)]
        answer.chunk_tokens.append(len(ids))
    answer.text += text
    answer.first_ns = now if answer.first_ns is None else answer.first_ns
    answer.last_ns = now
