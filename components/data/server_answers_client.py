"""One prompt to a server, as often as it takes: the request in its engine's words, its answer checked, and retries.

    vllm            POST /v1/completions  prompt as ids, token ids back
    sglang          POST /generate        input_ids, output_ids back
    llama.cpp       POST /completion      prompt as ids, tokens back
    transformers,
    openai          POST /v1/completions  prompt as a text that encodes to the same ids; its text is tokenised again

What may pass (no connection, no answer in time, 408, 425, 429, 5xx, an answer that is none) is tried again after an
exponentially growing, jittered wait, or as long as Retry-After says; what will not pass is refused at once.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from components.data.answering import Job
from components.data.server_address import Reached, ServerAddress
from components.data.server_answers_journal import Answered
from components.data.server_tokens import ids_of_answer, text_of

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

MAX_REPLY_BYTES: Final = 16 << 20
MAX_WAIT_S: Final = 60.0
MAX_RETRY_AFTER_S: Final = 300.0
_MAY_PASS: Final = frozenset({408, 409, 425, 429})

_UNCHANGED: Final[dict[str, dict[str, float]]] = {
    "vllm": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    "sglang": {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "llama.cpp": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
}
"""Engine -> what leaves the target's distribution as it is, as answers are sampled in process; OpenAI knows top_p."""


class MayPass(Exception):
    """This attempt failed, the next may not. retry_after: seconds that the server asks to wait."""

    def __init__(self, why: str, retry_after: float = 0.0) -> None:
        super().__init__(why)
        self.retry_after = retry_after


class Refused(Exception):
    """The server will never answer this prompt, in words."""


@dataclass(frozen=True)
class Asking:
    """How every prompt is asked."""

    server: ServerAddress
    reached: Reached
    tokenizer: Any
    vocab_size: int
    ends: tuple[int, ...]  # token ids that end a text
    max_new_tokens: int
    temperature: float
    seed: int
    retries: int
    backoff_s: float
    timeout_s: float

    async def ask(self, client: httpx.AsyncClient, job: Job) -> Answered:
        """The answer to one prompt; raises Refused, or MayPass when the last attempt failed."""
        from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(MayPass),
            stop=stop_after_attempt(self.retries + 1),
            wait=self._wait,
            reraise=True,
        )
        async for attempt in retrying:
            with attempt:
                return await self._try(client, job)
        raise AssertionError("the last attempt raises")

    def _wait(self, state: RetryCallState) -> float:
        from tenacity import wait_random_exponential

        error = state.outcome.exception() if state.outcome is not None else None
        asked = error.retry_after if isinstance(error, MayPass) else 0.0
        return max(asked, wait_random_exponential(multiplier=self.backoff_s, max=MAX_WAIT_S)(state))

    async def _try(self, client: httpx.AsyncClient, job: Job) -> Answered:
        import httpx

        prompt = "" if self._takes_ids else text_of(self.tokenizer, job.ids)
        if prompt is None:
            raise Refused("this server takes text only, and no text encodes to this prompt's tokens")
        address, body = self._request(job, prompt)
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                client.stream("POST", address, json=body, headers=self.server.headers()) as reply,
            ):
                said = await _limited(reply)
        except TimeoutError as error:
            raise MayPass(f"no answer within {self.timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise MayPass(self.server.shown(f"{type(error).__name__}: {error}")) from error
        if reply.status_code != 200:
            why = self.server.shown(f"status {reply.status_code}: {said.decode('utf-8', 'replace')}")
            if reply.status_code in _MAY_PASS or reply.status_code >= 500:
                raise MayPass(why, _retry_after(reply.headers))
            raise Refused(why)
        try:
            return self._answered(job, prompt, _read(json.loads(said)))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise MayPass(self.server.shown(f"not an answer of {self.reached.engine}: {error!r}")) from error

    @property
    def _takes_ids(self) -> bool:
        return self.reached.engine in ("vllm", "sglang", "llama.cpp")

    def _request(self, job: Job, prompt: str) -> tuple[str, dict[str, Any]]:
        """(address, JSON body) in this engine's own words. A row's seed is its own, as in process.

        Every parameter of sampling is said: a server takes those left out from the model's generation_config.json.
        SGLang takes no seed of a request outside of its deterministic mode: its samples differ from run to run.
        """
        from components.targets.generate import row_generator

        root, temperature = self.server.root, self.temperature if job.sampled else 0.0
        seed = row_generator(self.seed, job.prompt_id).initial_seed() % 2**31
        if self.reached.engine == "sglang":
            sampling = {"temperature": temperature, "max_new_tokens": self.max_new_tokens, **_UNCHANGED["sglang"]}
            return f"{root}/generate", {"input_ids": list(job.ids), "sampling_params": sampling}
        if self.reached.engine == "llama.cpp":
            wanted = {
                "n_predict": self.max_new_tokens,
                "temperature": temperature,
                "seed": seed,
                **_UNCHANGED["llama.cpp"],
            }
            return f"{root}/completion", {"prompt": list(job.ids), **wanted, "return_tokens": True}
        body: dict[str, Any] = {
            "model": self.reached.model,
            "prompt": list(job.ids) if self._takes_ids else prompt,
            "max_tokens": self.max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            **_UNCHANGED.get(self.reached.engine, {"top_p": 1.0}),
        }
        if self.reached.engine == "vllm":
            body["return_token_ids"] = True
        return f"{root}/v1/completions", body

    def _answered(self, job: Job, prompt: str, said: _Said) -> Answered:
        """The answer as token ids that this target's tokenizer knows; raises ValueError for what cannot be one."""
        if said.prompt_ids is not None and tuple(said.prompt_ids) != job.ids:
            raise ValueError("the server saw another prompt")
        ids = said.ids
        if ids is None:
            if "\ufffd" in said.text:
                raise Refused("its text holds bytes that are no UTF-8, so the tokens cannot be known")
            shown = prompt or text_of(self.tokenizer, job.ids)
            ids = ids_of_answer(self.tokenizer, shown, job.ids, said.text) if shown is not None else None
            if ids is None:
                raise Refused("its text cannot be turned back into tokens of this target")
        if any(isinstance(token, bool) or not 0 <= token < self.vocab_size for token in ids):
            raise ValueError("a token id outside of the vocabulary")
        cut = next((at for at, token in enumerate(ids) if token in self.ends), None)
        ids = ids if cut is None else ids[: cut + 1]
        ended = cut is not None or said.stopped
        if ended and cut is None and self.ends:  # a text shows no end-of-text token, nor do some engines' ids
            ids = [*ids, self.ends[0]]
        if not ids or len(ids) > self.max_new_tokens + 1:
            raise ValueError(f"{len(ids)} tokens where 1 to {self.max_new_tokens} were asked for")
        if not ended and said.ids is not None and len(ids) < self.max_new_tokens:
            raise Refused(
                f"the server stopped after {len(ids)} of {self.max_new_tokens} tokens: it takes shorter texts than this"
                " target; raise its limit (vLLM: --max-model-len)"
            )
        return Answered(tuple(ids), ended, said.ids is not None)


class _Said(NamedTuple):
    """What was found in an engine's reply."""

    text: str
    ids: list[int] | None
    stopped: bool  # by the model, not by the limit
    prompt_ids: list[int] | None


def _read(reply: Any) -> _Said:
    """The answer in a JSON reply of any of the engines; raises what is no answer."""
    if not isinstance(reply, dict) or "error" in reply:
        raise ValueError(str(reply.get("error") if isinstance(reply, dict) else reply)[:200])
    if "meta_info" in reply:  # SGLang
        finish = reply["meta_info"]["finish_reason"]
        stopped = isinstance(finish, Mapping) and finish.get("type") == "stop"
        return _Said(str(reply.get("text") or ""), _ids(reply.get("output_ids")), stopped, None)
    if "choices" not in reply:  # llama.cpp
        ids = _ids(reply.get("tokens"))
        return _Said(str(reply["content"]), ids or None, reply.get("stop_type") in ("eos", "word"), None)
    choice = reply["choices"][0]
    text, finish = choice["text"], choice["finish_reason"]
    if not isinstance(text, str) or finish not in ("stop", "length"):
        raise ValueError(f"finish_reason {finish!r}")
    return _Said(text, _ids(choice.get("token_ids")), finish == "stop", _ids(choice.get("prompt_token_ids")))


def _ids(found: Any) -> list[int] | None:
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
        raise ValueError("token ids that are none")
    return found


async def _limited(reply: httpx.Response) -> bytes:
    """The body; raises MayPass where it does not end."""
    parts, size = [], 0
    async for part in reply.aiter_bytes():
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise MayPass(f"a reply of more than {MAX_REPLY_BYTES >> 20} MiB")
    return b"".join(parts)


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that Retry-After asks for, as a number or a date; 0 where it says nothing that can be read."""
    said = headers.get("retry-after", "").strip()
    if said.isascii() and said.isdigit():
        return min(float(said), MAX_RETRY_AFTER_S)
    try:
        when = email.utils.parsedate_to_datetime(said).timestamp() if said else 0.0
    except ValueError:
        return 0.0
    return min(max(0.0, when - time.time()), MAX_RETRY_AFTER_S) if when else 0.0
