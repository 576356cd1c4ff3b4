"""Ask a server patiently: what may pass is tried again, replies are bounded, and so many requests are in flight.

Failures that may pass (no connection, no answer in time, 408, 409, 425, 429, 5xx, a malformed answer) are tried again
after an exponentially growing, jittered wait, or as long as Retry-After says; other failures are final at once.
"""

from __future__ import annotations

import asyncio
import email.utils
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeVar

import httpx
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from components.engines.server_address import ServerAddress
from components.outside_json import JsonObject

MAX_REPLY_BYTES: Final = 16 << 20
MAX_WAIT_S: Final = 60.0
MAX_RETRY_AFTER_S: Final = 300.0
_RETRYABLE_STATUSES: Final = frozenset({408, 409, 425, 429})

Item = TypeVar("Item")
Result = TypeVar("Result")


class RetryableError(Exception):
    """This attempt failed, the next may succeed. retry_after: seconds that the server asks to wait."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RefusedPrompt(Exception):
    """The server will never answer this prompt; the message says why."""


@dataclass(frozen=True)
class Patience:
    """How a request is tried: further attempts, the first wait and the longest attempt, both in seconds."""

    retries: int
    backoff_s: float
    timeout_s: float

    async def until_answered(self, attempt: Callable[[], Awaitable[Result]]) -> Result:
        """What the first attempt without RetryableError gives; the last one's error where none is."""
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(RetryableError),
            stop=stop_after_attempt(self.retries + 1),
            wait=self._wait,
            reraise=True,
        )
        async for one in retrying:
            with one:
                return await attempt()
        raise AssertionError("the last attempt raises")

    def _wait(self, state: RetryCallState) -> float:
        error = state.outcome.exception() if state.outcome is not None else None
        retry_after = error.retry_after if isinstance(error, RetryableError) else 0.0
        return max(retry_after, wait_random_exponential(multiplier=self.backoff_s, max=MAX_WAIT_S)(state))

    async def post(self, client: httpx.AsyncClient, server: ServerAddress, address: str, request: JsonObject) -> bytes:
        """The body of one attempt's reply; raises RetryableError or RefusedPrompt for any status but 200."""
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                client.stream("POST", address, json=request, headers=server.headers()) as reply,
            ):
                body = await _read_body(reply)
        except TimeoutError as error:
            raise RetryableError(f"no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise RetryableError(server.without_key(f"{type(error).__name__}: {error}")) from error
        if reply.status_code != 200:
            reason = server.without_key(f"status {reply.status_code}: {body.decode('utf-8', 'replace')}")
            if reply.status_code in _RETRYABLE_STATUSES or reply.status_code >= 500:
                raise RetryableError(reason, _retry_after(reply.headers))
            raise RefusedPrompt(reason)
        return body


def http_client(concurrency: int, timeout_s: float) -> httpx.AsyncClient:
    """A client for so many connections that takes no proxy from the environment."""
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx.AsyncClient(timeout=httpx.Timeout(timeout_s), limits=limits, trust_env=False)


async def in_flight(items: Iterable[Item], concurrency: int, ask: Callable[[Item], Awaitable[None]]) -> None:
    """A closed loop: each of `concurrency` workers asks for the next item as soon as its last is answered."""
    waiting = iter(items)

    async def worker() -> None:
        for item in waiting:
            await ask(item)

    tasks = [asyncio.create_task(worker()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read_body(reply: httpx.Response) -> bytes:
    """The body of a reply; raises RetryableError where it is too long."""
    parts, size = [], 0
    async for part in reply.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise RetryableError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
    return b"".join(parts)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that Retry-After asks for, as a number or a date; 0 without a readable value."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.isdigit():
        return min(float(value), MAX_RETRY_AFTER_S)
    try:
        when = email.utils.parsedate_to_datetime(value).timestamp() if value else 0.0
    except ValueError:
        return 0.0
    return min(max(0.0, when - time.time()), MAX_RETRY_AFTER_S) if when else 0.0
