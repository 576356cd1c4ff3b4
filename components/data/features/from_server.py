"""Step `data.features_from_server`: vLLM runs the target over its answers and hands out the hidden states.

The artifact is that of `record_features`, shard by shard, and training needs three tensors of the target. The server
writes a file for each conversation into a folder that both sides see (components/engines/hidden_states.py), or puts its
states into a Mooncake store, from which they come into a file here (components/engines/mooncake.py). A file is checked
as soon as it is whole, and kept until every conversation of its shard has one (served.py); then the shard is written
and the files are deleted. So the folder never holds more than the shards being filled: those of `concurrency`
conversations and of one shard more.

What the protocol cannot say is checked by what can: the token that the server itself puts after a conversation must
follow from the last state by the target's own norm and head, which fails for another model and for another last layer.
Which taps a server hands out cannot be seen; their number can.

With `storage: none` nothing is asked for yet: the artifact holds tokens, masks and where the server is, and training
asks for its batches (streamed.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
import torch

from components.contract import Context, Conversations, Features, Target, UserError, unfinished
from components.data.features.format import Storage
from components.data.features.record import (
    check_space,
    chosen_taps,
    copy_answers,
    lengths_of,
    write_features_manifest,
    written_shard,
)
from components.data.features.served import StatesClient, read_states, where_states_come
from components.data.formats.responses import Conversation, open_answers, read_shard
from components.engines.hidden_states import StatesShape, connect, discard, server_command
from components.engines.requests import Patience, RetryableError, http_client, in_flight
from components.engines.server_address import BaseUrl, MooncakeAddress, ServerAddress
from components.files import sweep
from components.outside_json import JsonObject
from components.targets.load import is_read_whole, open_target, target_facts


def features_from_server(
    target: Target,
    answers: Conversations,
    *,
    base_url: BaseUrl,
    folder: str,
    engine: Literal["auto", "vllm"],
    model: str,
    api_key_variable: str,
    mooncake: MooncakeAddress | None,
    tap_layers: list[int] | None,
    storage: Storage,
    buffer_gb: float,
    concurrency: int,
    retries: int,
    backoff_s: float,
    timeout_s: float,
    wait_s: float,
    num_checked: int,
    ctx: Context,
) -> Features:
    """The step `data.features_from_server`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    taps, hidden_size = chosen_taps(tap_layers, facts, "data.features_from_server"), int(facts["shape"]["hidden_size"])
    names = open_answers(answers).shards
    shards = [_Shard(ctx.out / name, answers.path / name) for name in names]
    todo = unfinished(shards)
    num_tokens = int(answers.info["num_tokens"])
    check_space(ctx, num_tokens, hidden_size, storage, len(taps), share_left=len(todo) / max(1, len(names)))
    shape, patience = StatesShape(len(taps) + 1, hidden_size), Patience(retries, backoff_s, timeout_s)
    server = ServerAddress(base_url=base_url, engine=engine, model=model, api_key_variable=api_key_variable)
    layers, model_name = [*taps, int(facts["shape"]["num_layers"])], str(target.info.get("model", ""))
    longest = max((max(lengths_of(shard.answers)) for shard in shards), default=0)
    command = server_command(model_name, layers, mooncake or folder, max_tokens=longest + 1)
    ctx.note(f"expects at {base_url}: {command}")
    if storage == "none":
        copy_answers(ctx, answers, names)
        settings: JsonObject = {
            **server.model_dump(exclude={"engine"}),
            "folder": folder,
            "mooncake": mooncake and mooncake.model_dump(),
            **dataclasses.asdict(patience),
        }
        settings |= {"wait_s": wait_s, "concurrency": concurrency, "num_checked": num_checked, "buffer_gb": buffer_gb}
        return write_features_manifest(ctx, target, answers, names, taps, storage, server=settings)
    head = None
    if num_checked and todo and not is_read_whole(target):
        head = open_target(target, device=ctx.device, kernel="plain", layers=False)
    owner = (target.key, answers.key)
    if todo:
        place, reader = where_states_come(folder, mooncake)
        states = StatesClient(server, place, shape, patience, owner, taps, head, num_checked, reader)
        torch.set_num_threads(ctx.num_threads)
        work = _ServerRun(states, shards, storage, concurrency, ctx)
        with closing(states):
            asyncio.run(work.run(wait_s))
    sweep(ctx.out)
    return write_features_manifest(ctx, target, answers, names, taps, storage)


@dataclass(frozen=True)
class _Shard:
    """A shard of features, and of the answers that it is made from."""

    file: Path
    answers: Path


@dataclass
class _Filling:
    """A shard whose conversations are being asked for."""

    shard: _Shard
    conversations: Sequence[Conversation]
    num_missing: int = 0  # conversations without a file


@dataclass
class _ServerRun:
    """The requests of this step to one server."""

    states: StatesClient
    shards: Sequence[_Shard]
    storage: Storage
    concurrency: int
    ctx: Context
    _num_done: int = 0
    _num_rows: int = 0
    _new_tokens: int = 0
    _started_at: float = 0.0

    async def run(self, wait_s: float) -> None:
        """Ask for every conversation that no shard and no file holds yet."""
        lengths = {shard: lengths_of(shard.answers) for shard in self.shards}
        todo = unfinished(self.shards)
        self._num_rows = sum(map(len, lengths.values()))
        self._num_done = self._num_rows - sum(len(lengths[shard]) for shard in todo)
        longest = max(max(lengths[shard]) for shard in todo)
        async with http_client(self.concurrency, self.states.patience.timeout_s) as client:
            served = await connect(client, self.states.server, wait_s, longest)
            self._discard_stored()
            self._started_at = time.monotonic()

            async def ask(row: tuple[_Filling, Conversation]) -> None:
                await self._ask(client, served, *row)

            await in_flight(self._missing(todo), self.concurrency, ask)

    def _discard_stored(self) -> None:
        """Delete files whose shard was written before a kill."""
        for shard in self.shards:
            if shard.file.exists():
                for conversation in read_shard(shard.answers):
                    discard(self.states.file_of(conversation.row.row_id))

    def _missing(self, todo: Sequence[_Shard]) -> Iterator[tuple[_Filling, Conversation]]:
        """The conversations without a file, shard by shard; a shard is read when its first one is asked for."""
        for shard in todo:
            conversations = read_shard(shard.answers)
            missing = [one for one in conversations if self.states.read_kept(one.row.row_id, one.ids) is None]
            self._num_done += len(conversations) - len(missing)
            filling = _Filling(shard, conversations, len(missing))
            if not missing:
                self._store(filling)
            for conversation in missing:
                yield filling, conversation

    async def _ask(self, client: httpx.AsyncClient, model: str, filling: _Filling, conversation: Conversation) -> None:
        """Bring one conversation's states, and store its shard if it was the last."""
        row_id, server = conversation.row.row_id, self.states.server
        try:
            await self.states.bring(client, model, row_id, conversation.ids)
        except RetryableError as error:
            hint = f"{self._num_done} conversations are kept: mend it and run again, and only the others are asked for"
            raise UserError(f"{server.location}: {row_id}: {error}; {hint}") from error
        filling.num_missing -= 1
        self._num_done += 1
        self._new_tokens += len(conversation.ids)
        rate = self._new_tokens / max(1e-9, time.monotonic() - self._started_at)
        self.ctx.progress(self._num_done, self._num_rows, f"conversations, {rate:,.0f} tokens/s")
        if not filling.num_missing:
            await asyncio.to_thread(self._store, filling)

    def _store(self, filling: _Filling) -> None:
        """Write a shard, then delete the files that it was made from."""
        num_taps, size = len(self.states.taps), self.states.shape.hidden_size
        with written_shard(filling.shard.file, filling.conversations, self.storage, num_taps, size) as write_states:
            for index, (row, ids, _) in enumerate(filling.conversations):
                write_states(index, read_states(self.states.file_of(row.row_id), ids, self.states.shape))
        for row, _, _ in filling.conversations:
            discard(self.states.file_of(row.row_id))
