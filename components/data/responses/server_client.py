"""A client that asks one server for completions, and the journal of its answers.

    vllm            POST /v1/completions  prompt as ids, token ids back
    sglang          POST /generate        input_ids, output_ids back
    llama.cpp       POST /completion      prompt as ids, tokens back
    transformers,
    openai          POST /v1/completions  prompt as a text that encodes to the same ids; its text is tokenised again

Replies are checked; a malformed one is asked for again (components/engines/requests.py).

The journal has one JSON line for each answer, so that a killed step asks for no prompt twice. An answer is written in
one piece as soon as it has come and synced to the disk with the next few. A kill can cost only the last line; an
incomplete line is cut off before another is appended. The first line (the header) names the model and the prompts,
because answers of another model must not mix with these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import httpx

from components.contract import UserError
from components.data.responses.generate import Job
from components.engines.client import ServerInfo, ids_of_answer, text_of
from components.engines.requests import Patience, RefusedPrompt, RetryableError
from components.engines.server_address import ServerAddress
from components.outside_json import JsonObject
from components.targets.generate import row_generator

SYNCED_LINES: Final = 32
SYNCED_SECONDS: Final = 1.0

_NEUTRAL_SAMPLING: Final[dict[str, dict[str, float]]] = {
    "vllm": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
    "sglang": {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    "llama.cpp": {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0},
}
"""Engine -> sampling options that leave the target's distribution unchanged, as in process; OpenAI has only top_p."""


@dataclass(frozen=True)
class RequestOptions:
    """What every request has in common.

    ends: the token ids that end a text, first the one that ends a turn. suppressed: those that the target never says.
    """

    tokenizer: Any
    vocab_size: int
    ends: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    seed: int
    patience: Patience
    suppressed: frozenset[int] = frozenset()


class ServerAnswer(NamedTuple):
    """One answer. ended: by an end-of-text token. own_ids: the server sent the ids; else its text was tokenised."""

    ids: tuple[int, ...]
    ended: bool
    own_ids: bool


@dataclass(frozen=True)
class CompletionClient:
    """Sends prompts to one server and checks its answers."""

    server: ServerAddress
    info: ServerInfo
    options: RequestOptions

    async def complete(self, client: httpx.AsyncClient, job: Job) -> ServerAnswer:
        """The answer to one prompt; raises RefusedPrompt, or RetryableError when the last attempt failed."""
        return await self.options.patience.until_answered(lambda: self._attempt(client, job))

    async def _attempt(self, client: httpx.AsyncClient, job: Job) -> ServerAnswer:
        prompt = "" if self._takes_ids else text_of(self.options.tokenizer, job.ids)
        if prompt is None:
            raise RefusedPrompt("this server takes text only, and no text encodes to this prompt's tokens")
        body = await self.options.patience.post(client, self.server, *self._request(job, prompt))
        try:
            return self._validate(job, prompt, _parse_reply(json.loads(body)))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise RetryableError(self.server.without_key(f"not an answer of {self.info.engine}: {error!r}")) from error

    @property
    def _takes_ids(self) -> bool:
        return self.info.engine in ("vllm", "sglang", "llama.cpp")

    def _request(self, job: Job, prompt: str) -> tuple[str, JsonObject]:
        """(address, JSON body) in this engine's format. Each row has a seed of its own, as in process.

        Every sampling parameter is sent: a server takes omitted ones from the model's generation_config.json, but not
        the tokens that it suppresses; the request biases against these. SGLang takes no seed per request outside of its
        deterministic mode, so its samples differ from run to run.
        """
        root, engine = self.server.root, self.info.engine
        temperature, limit = self.options.temperature if job.sampled else 0.0, self.options.max_new_tokens
        neutral: JsonObject = {**_NEUTRAL_SAMPLING.get(engine, {"top_p": 1.0})}
        if silent := sorted(self.options.suppressed):
            biases = [[token, False] for token in silent]
            neutral["logit_bias"] = biases if engine == "llama.cpp" else dict.fromkeys(map(str, silent), -100)
        if engine == "sglang":
            sampling = {"temperature": temperature, "max_new_tokens": limit, **neutral}
            return f"{root}/generate", {"input_ids": list(job.ids), "sampling_params": sampling}
        seed = row_generator(self.options.seed, job.prompt_id).initial_seed() % 2**31
        sent = list(job.ids) if self._takes_ids else prompt
        body: JsonObject = {"prompt": sent, "temperature": temperature, "seed": seed, **neutral}
        if engine == "llama.cpp":
            return f"{root}/completion", {**body, "n_predict": limit, "return_tokens": True}
        body |= {"model": self.info.model, "max_tokens": limit}
        return f"{root}/v1/completions", body | ({"return_token_ids": True} if engine == "vllm" else {})

    def _validate(self, job: Job, prompt: str, reply: _Reply) -> ServerAnswer:
        """The answer as token ids of the target; raises ValueError for a reply that cannot be an answer."""
        if reply.prompt_ids is not None and tuple(reply.prompt_ids) != job.ids:
            raise ValueError("the server saw another prompt")
        ids = reply.ids
        if ids is None:
            if "\ufffd" in reply.text:
                raise RefusedPrompt("its text holds bytes that are no UTF-8, so the tokens cannot be known")
            tokenizer = self.options.tokenizer
            prompt_text = prompt or text_of(tokenizer, job.ids)
            if prompt_text is not None:
                ids = ids_of_answer(tokenizer, prompt_text, job.ids, reply.text)
            if ids is None:
                raise RefusedPrompt("its text cannot be turned back into tokens of this target")
        if any(isinstance(token, bool) or not 0 <= token < self.options.vocab_size for token in ids):
            raise ValueError("a token id outside of the vocabulary")
        if silenced := [token for token in ids if token in self.options.suppressed]:
            raise RefusedPrompt(
                f"it says token {silenced[0]}, which the target's generation_config.json suppresses: this server heeds"
                " no logit_bias; take another, or data.write_answers"
            )
        end_at = next((at for at, token in enumerate(ids) if token in self.options.ends), None)
        ids = ids if end_at is None else ids[: end_at + 1]
        finished = end_at is not None or reply.stopped
        # a text shows no end-of-text token, nor do some engines' ids
        if finished and end_at is None and self.options.ends:
            ids = [*ids, self.options.ends[0]]
        if not ids or len(ids) > self.options.max_new_tokens + 1:
            raise ValueError(f"{len(ids)} tokens where 1 to {self.options.max_new_tokens} were asked for")
        if not finished and reply.ids is not None and len(ids) < self.options.max_new_tokens:
            raise RefusedPrompt(
                f"the server stopped after {len(ids)} of {self.options.max_new_tokens} tokens: it takes shorter texts"
                " than this target; raise its limit (vLLM: --max-model-len)"
            )
        return ServerAnswer(tuple(ids), finished, reply.ids is not None)


class _Reply(NamedTuple):
    """The answer in an engine's reply; None for token ids that the engine did not send."""

    text: str
    ids: list[int] | None
    stopped: bool  # by the model, not by the limit
    prompt_ids: list[int] | None


def _parse_reply(reply: Any) -> _Reply:
    """The answer in the JSON reply of any engine; raises ValueError, KeyError or TypeError for anything else."""
    if not isinstance(reply, dict) or "error" in reply:
        raise ValueError(str(reply.get("error") if isinstance(reply, dict) else reply)[:200])
    if "meta_info" in reply:  # SGLang
        finish = reply["meta_info"]["finish_reason"]
        stopped = isinstance(finish, Mapping) and finish.get("type") == "stop"
        return _Reply(str(reply.get("text") or ""), _require_ids(reply.get("output_ids")), stopped, None)
    if "choices" not in reply:  # llama.cpp
        ids = _require_ids(reply.get("tokens"))
        return _Reply(str(reply["content"]), ids or None, reply.get("stop_type") in ("eos", "word"), None)
    choice = reply["choices"][0]
    text, finish = choice["text"], choice["finish_reason"]
    if not isinstance(text, str) or finish not in ("stop", "length"):
        raise ValueError(f"finish_reason {finish!r}")
    return _Reply(
        text, _require_ids(choice.get("token_ids")), finish == "stop", _require_ids(choice.get("prompt_token_ids"))
    )


def _require_ids(value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(token, int) for token in value):
        raise ValueError("token ids that are none")
    return value


class Journal:
    """The answers so far and the file that more are appended to; a context manager."""

    def __init__(self, file: Path, header: JsonObject) -> None:
        """header: JSON facts that hold for all answers; raises UserError where those in the file differ."""
        self.answers: dict[str, ServerAnswer] = {}
        self._file, self._header = file, dict(header)
        self._unsynced, self._synced_at = 0, time.monotonic()
        whole = self._read()
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.truncate(self._handle, whole)
        if whole == 0:
            self._write(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.fsync(self._handle)
        os.close(self._handle)

    def add(self, prompt_id: str, answer: ServerAnswer) -> None:
        """Append an answer."""
        assert prompt_id not in self.answers, f"{prompt_id} was asked twice"
        self._write({"id": prompt_id, **answer._asdict()})
        self.answers[prompt_id] = answer
        self._unsynced += 1
        if self._unsynced >= SYNCED_LINES or time.monotonic() - self._synced_at > SYNCED_SECONDS:
            os.fsync(self._handle)
            self._unsynced, self._synced_at = 0, time.monotonic()

    def _write(self, line: JsonObject) -> None:
        data = (json.dumps(line) + "\n").encode("ascii")
        while data:
            data = data[os.write(self._handle, data) :]

    def _read(self) -> int:
        """Read the existing answers; returns the number of bytes of complete lines."""
        if not self._file.is_file():
            return 0
        whole = 0
        with self._file.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:  # after a power cut: blocks of zeros
                    row = None
                if not isinstance(row, dict):
                    break
                if number == 0:
                    self._check(row)
                else:
                    self.answers[row["id"]] = ServerAnswer(tuple(row["ids"]), row["ended"], row["own_ids"])
                whole += len(line)
        return whole

    def _check(self, stored: JsonObject) -> None:
        for name, value in self._header.items():
            if stored.get(name) != value:
                raise UserError(
                    f"{name}: an earlier attempt was answered with {stored.get(name)!r}, now it would be {value!r}; "
                    "let it answer as before, or run with --force"
                )
