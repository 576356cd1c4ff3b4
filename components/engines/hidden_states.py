"""How vLLM hands out hidden states: the command that starts such a server, the request, and the file that it names.

`extract_hidden_states` keeps, for every token, the input of the layers that it is told: layer i's input is Hugging
Face's hidden_states[i], and n, of n layers, is the last one's output before the final norm. A KV connector writes them
to a file in a folder that both sides see, and the reply to a completion names it (kv_transfer_params). The server holds
a lock (flock) on FILE.lock until the file is whole. Where no folder is shared, another connector puts them into a
Mooncake store (mooncake.py).

SGLang has no such protocol: its `return_hidden_states` gives the last state alone, as JSON; the trainers that take
states from it patch it.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from components.contract import UserError
from components.engines.client import wait_until_ready
from components.engines.launch import at_revision
from components.engines.requests import Patience, RefusedPrompt, RetryableError
from components.engines.server_address import MooncakeAddress, ServerAddress
from components.files import try_lock
from components.outside_json import JsonObject

CONNECTOR: Final = "ExampleHiddenStatesConnector"
"""vLLM's own; it copies by CUDA streams, so it needs a GPU."""
CPU_CONNECTOR: Final = "CpuHiddenStatesConnector"
CPU_MODULE: Final = "components.engines.vllm_cpu_connector"
FP8_CONNECTOR: Final = "FP8HiddenStatesConnector"
FP8_MODULE: Final = "hs_connectors.fp8_hidden_states_connector"
MOONCAKE_CONNECTOR: Final = "MooncakeHiddenStatesConnector"
MOONCAKE_MODULE: Final = "hs_connectors.mooncake_hidden_states_connector"
"""Of the package hs-connectors, in vLLM's environment."""
SUFFIX: Final = ".safetensors"
APPEARS_WITHIN_S: Final = 5.0
"""Seconds after a reply until its file or lock must be seen: folders over a network show new files late."""
LOOKS_EVERY_S: Final = 0.01


class StatesShape(NamedTuple):
    """What a file must hold for each token: so many states, the taps and then the last, of so many numbers."""

    num_states: int
    hidden_size: int


class StatesReply(NamedTuple):
    """How a server hands a conversation's states out (kv_transfer_params), and the token that it says comes next."""

    transfer: JsonObject
    next_token: int | None


def server_options(
    layers: Sequence[int], place: str | MooncakeAddress, *, connector: str = "", module: str = ""
) -> list[str]:
    """vLLM's options for handing out the states of `layers`, the last of which is n.

    place: the folder of the files, or the store. connector, module: another connector than the usual one of the place,
    and where it is. Prefixes are not shared and prompts not cut, so that a conversation's states do not depend on those
    before it.
    """
    states = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    speculation = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": states}
    extra: JsonObject = {"shared_storage_path": place} if isinstance(place, str) else place.for_connector()
    if not connector:
        connector, module = (CONNECTOR, "") if isinstance(place, str) else (MOONCAKE_CONNECTOR, MOONCAKE_MODULE)
    transfer: JsonObject = {"kv_connector": connector, "kv_role": "kv_producer"}
    if module:
        transfer["kv_connector_module_path"] = module
    transfer["kv_connector_extra_config"] = extra
    configs = ["--speculative-config", json.dumps(speculation), "--kv-transfer-config", json.dumps(transfer)]
    return [*configs, "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]


def server_command(
    model: str, layers: Sequence[int], place: str | MooncakeAddress, *, max_tokens: int = 8192, gpus: int = 1
) -> str:
    """The command that starts vLLM on GPUs, to be copied. max_tokens: of the longest conversation, and one more."""
    name, revision = at_revision(model)
    options = ["--revision", revision] if revision else []
    options += ["--tensor-parallel-size", str(gpus)] if gpus > 1 else []
    options += ["--max-model-len", str(max_tokens), "--max-num-batched-tokens", str(max_tokens)]
    return shlex.join(["vllm", "serve", name, *options, *server_options(layers, place)])


async def connect(client: httpx.AsyncClient, server: ServerAddress, wait_s: float, longest: int) -> str:
    """Wait for a server; returns the name of its model.

    Raises UserError where it is no vLLM, or takes no conversation of `longest` tokens and one more.
    """
    info = await wait_until_ready(client, server, wait_s)
    if info.engine != "vllm":
        raise UserError(
            f"{server.location}: is {info.engine}, which hands out no states of chosen layers; serve with vLLM"
        )
    limit = await _limit_of(client, server, info.model)
    if limit is not None and longest >= limit:
        raise UserError(
            f"{server.location}: takes conversations of {limit - 1} tokens, and the longest has {longest}; start it "
            f"with --max-model-len {longest + 1}"
        )
    return info.model


async def _limit_of(client: httpx.AsyncClient, server: ServerAddress, model: str) -> int | None:
    """The most tokens of a conversation and its answer; None where the server hides that."""
    try:
        reply = await client.get(f"{server.root}/v1/models", headers=server.headers())
        limits = {entry["id"]: entry.get("max_model_len") for entry in reply.json()["data"]}
    except (httpx.TransportError, ValueError, KeyError, TypeError):
        return None
    limit = limits.get(model)
    return limit if isinstance(limit, int) else None


async def ask_for_states(
    client: httpx.AsyncClient,
    server: ServerAddress,
    model: str,
    ids: Sequence[int],
    shape: StatesShape,
    patience: Patience,
) -> StatesReply:
    """Let the server run one conversation's tokens; raises UserError where it cannot be a server of hidden states.

    The request says what is expected, which vLLM passes over and a stand-in goes by.
    """
    request: JsonObject = {"model": model, "prompt": list(ids), "max_tokens": 1, "temperature": 0.0}
    request |= {"return_token_ids": True, "kv_transfer_params": {"expected": list(shape)}}
    try:
        body = await patience.post(client, server, f"{server.root}/v1/completions", request)
    except RefusedPrompt as error:
        raise UserError(
            f"{server.location}: refuses a conversation of {len(ids)} tokens ({error}); serve the target that answered"
        ) from error
    try:
        reply = json.loads(body)
        choice = reply["choices"][0]
        prompt_ids, answer_ids = choice.get("prompt_token_ids"), choice.get("token_ids")
        transfer = reply.get("kv_transfer_params") or {}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise RetryableError(server.without_key(f"not an answer of vLLM: {error!r}")) from error
    if prompt_ids is not None and prompt_ids != list(ids):
        raise UserError(f"{server.location}: has seen other tokens than were sent; serve the target that answered")
    if not isinstance(transfer, dict):
        raise RetryableError(server.without_key(f"not an answer of vLLM: kv_transfer_params is {transfer!r}"))
    return StatesReply(transfer, _first_token(answer_ids))


def _file_named(server: ServerAddress, transfer: JsonObject) -> str:
    """The name, in its folder, of the file that a server has written; raises UserError where it has written none."""
    path = transfer.get("hidden_states_path")
    if not isinstance(path, str):
        by_mooncake = "hands states out by Mooncake: set `mooncake`, or start vLLM with a connector that writes files"
        no_file = "names no file of hidden states; start vLLM with extract_hidden_states and a connector"
        what = by_mooncake if "handle" in transfer else no_file
        raise UserError(f"{server.location}: {what} (docs/my-data.md, Hidden states from a server)")
    name = path.rpartition("/")[2]
    if not name.endswith(SUFFIX) or name.startswith("."):
        raise UserError(f"{server.location}: names {path[:200]!r}, which is no file of hidden states; take vLLM's own")
    return name


def _first_token(ids: Any) -> int | None:
    token = ids[0] if isinstance(ids, list) and ids else None
    return token if isinstance(token, int) else None


async def fetch_file(server: ServerAddress, transfer: JsonObject, folder: Path, wait_s: float) -> Path:
    """The file of this folder that a reply names, once it is whole; else it is discarded.

    Raises:
        UserError: the reply names none, or it cannot be seen here, or read.
        RetryableError: it was not whole within `wait_s` seconds, or no file came.
    """
    file = folder / _file_named(server, transfer)
    try:
        await _until_whole(server, file, wait_s)
    except (RetryableError, UserError):
        discard(file)
        raise
    return file


async def _until_whole(server: ServerAddress, file: Path, wait_s: float) -> None:
    """Return once the server has let go of a file's lock.

    Raises:
        UserError: neither the file nor its lock can be seen here, or read.
        RetryableError: the lock was held for `wait_s` seconds, or no file came of it.
    """
    lock, began = lock_of(file), time.monotonic()
    while not lock.exists():
        if time.monotonic() - began > APPEARS_WITHIN_S:
            missing = f"lock of {file.name}" if file.exists() else file.name
            raise UserError(
                f"folder: {file.parent} has no {missing}, which {server.base_url} says it wrote; name the server's "
                "shared_storage_path, as this machine sees it, and leave use_synchronization_lock on"
            )
        await asyncio.sleep(LOOKS_EVERY_S)
    try:
        with lock.open("rb") as lock_file:
            while not try_lock(lock_file, shared=True):
                if time.monotonic() - began > wait_s:
                    raise RetryableError(f"{file.name} was not whole within {wait_s:g} s")
                await asyncio.sleep(LOOKS_EVERY_S)
    except PermissionError as error:
        raise UserError(f"folder: {lock} cannot be read here; let the server and this user share a group") from error
    if not file.exists():
        raise RetryableError(f"the server wrote no {file.name}; its log says why (is its folder full?)")


def lock_of(file: Path) -> Path:
    """The lock that a server holds while it writes a file of hidden states."""
    return file.with_name(f"{file.name}.lock")


def discard(file: Path) -> None:
    """Remove a file of hidden states and its lock."""
    file.unlink(missing_ok=True)
    lock_of(file).unlink(missing_ok=True)
