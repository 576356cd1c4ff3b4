"""Features that a server hands out while a drafter is trained on them: asked for ahead of training, never stored.

The order of batches is known, so a thread beside training asks for the conversations of the next ones, up to
`concurrency` at a time, and keeps their files in the server's folder (served.py) until `buffer_bytes` of them are
there. Then it waits: a file makes room once its batch is over, the oldest first. What training needs at once, such as
the rows that it evaluates on, does not wait for room.

Files that still fit stay, over epochs, over a kill, and for the next drafter on the same answers. So with room for
all, every conversation is asked for once; with room for what is read between two checkpoints, a kill asks for none
twice; with less, each epoch asks anew. Several training processes share the folder, each with its part of the buffer
and its share of every batch; what all of them read, to scale and to evaluate a drafter, one of them asks for.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import httpx
from torch import Tensor

from components.contract import UserError
from components.data.features.format import Example, FeatureRow, FeatureSource, Shards, States
from components.data.features.served import StatesClient, where_states_come
from components.engines.hidden_states import StatesShape, connect, discard
from components.engines.requests import Patience, RetryableError, http_client
from components.engines.server_address import MooncakeAddress, ServerAddress
from components.targets.interface import AbstractTarget


@final
class StreamedFeatures(FeatureSource):
    """Features that a server computes, for as long as its block lasts (contextlib.closing)."""

    def __init__(
        self,
        source: FeatureSource,
        states: StatesClient,
        concurrency: int,
        buffer_bytes: int,
        wait_s: float,
        *,
        alone: bool = True,
    ) -> None:
        """Waits `wait_s` for the server; raises UserError where it cannot be one of hidden states.

        alone: whether no other process trains from the same folder.
        """
        super().__init__(source.path, source.manifest)
        sizes = {row.row_id: self._bytes_of(row) for row in self._rows}
        self._buffer = _Buffer(states, sizes, concurrency, buffer_bytes, alone)
        self._buffer.start(wait_s, max((row.num_tokens for row in self._rows), default=0))

    def _bytes_of(self, row: FeatureRow) -> int:
        return row.num_tokens * 2 * int(self.manifest["hidden_size"]) * (len(self.manifest["tap_layers"]) + 1)

    def close(self) -> None:
        """See FeatureSource."""
        self._buffer.stop()

    def expect(self, batches: Iterable[Sequence[FeatureRow]]) -> None:
        """See FeatureSource."""
        apart = Shards(self.path)  # the thread reads them while training does
        self._buffer.ask_ahead([(row.row_id, apart.part(row, "ids").long()) for row in batch] for batch in batches)

    def load_all(self, rows: Sequence[FeatureRow], max_tokens: int | None = None) -> list[Example]:
        """See FeatureSource."""
        examples = []
        whole = [self.shards.part(row, "ids").long() for row in rows]
        row_states = self._buffer.read([(row.row_id, ids) for row, ids in zip(rows, whole, strict=True)])
        for row, ids, (taps, last) in zip(rows, whole, row_states, strict=True):
            mask = self.shards.part(row, "mask", max_tokens)
            states = (taps[:max_tokens], last[:max_tokens])
            examples.append(Example(row.row_id, row.workload, ids[:max_tokens], mask, *states))
        return examples


def with_states(source: FeatureSource, model: AbstractTarget, num_processes: int = 1) -> FeatureSource:
    """A source whose states can be read: by passes of the model or from the server that its manifest names.

    model: the target; of one whose states are served, norm and head are enough. num_processes: those that read the
    same source, each a part of the buffer.
    """
    settings = source.manifest.get("server")
    if settings is None:
        return source.computed_by(model)
    mooncake = MooncakeAddress(**settings["mooncake"]) if settings["mooncake"] else None
    address = ServerAddress(**{name: settings[name] for name in ("base_url", "model", "api_key_variable")})
    folder, reader = where_states_come(settings["folder"], mooncake)
    taps = source.manifest["tap_layers"]
    states = StatesClient(
        server=address,
        folder=folder,
        shape=StatesShape(len(taps) + 1, source.manifest["hidden_size"]),
        patience=Patience(settings["retries"], settings["backoff_s"], settings["timeout_s"]),
        owner=(source.manifest["target_key"], source.manifest["answers_key"]),
        taps=taps,
        head=model,
        num_checked=settings["num_checked"],
        mooncake=reader,
    )
    room = int(settings["buffer_gb"] * 1e9) // num_processes
    alone = num_processes == 1
    return StreamedFeatures(source, states, settings["concurrency"], room, settings["wait_s"], alone=alone)


Asked = tuple[str, Tensor]
"""A conversation's id, and its tokens."""


AHEAD: Final = 64
"""The most batches that are asked for ahead, however much room there is."""


class _Buffer:
    """The files of one server in its folder, and the thread that asks for more. Sizes are in bytes.

    All but `read` and the starting happens in the thread's event loop, so nothing is locked.
    """

    def __init__(self, states: StatesClient, sizes: dict[str, int], concurrency: int, room: int, alone: bool) -> None:
        self._states, self._sizes, self._concurrency, self._room = states, sizes, concurrency, room
        self._bring_one = states.bring if alone else states.bring_once
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hidden states", daemon=True)
        self._tasks: dict[str, asyncio.Task[None]] = {}  # conversations that are asked for
        self._held = 0  # of files that are there or asked for
        self._ahead: deque[set[str]] = deque()  # batches asked for ahead, the one in training first
        self._over: OrderedDict[str, None] = OrderedDict()  # files that no batch ahead needs, the oldest first
        self._here: set[str] = set()  # files that are there or asked for
        self._producer: asyncio.Task[None] | None = None

    def start(self, wait_s: float, longest: int) -> None:
        """Wait for the server, and find what an earlier run has kept."""
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._open(wait_s, longest), self._loop).result()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """End the thread; requests in flight are dropped."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def ask_ahead(self, batches: Iterator[Sequence[Asked]]) -> None:
        """Begin to bring the conversations of batches, in their order, as far as there is room."""
        self._loop.call_soon_threadsafe(self._begin, batches)

    def read(self, rows: Sequence[Asked]) -> list[States]:
        """The states of these conversations, waiting for those that are not there yet."""
        asyncio.run_coroutine_threadsafe(self._bring_all(rows), self._loop).result()
        row_states = []
        for row_id, ids in rows:
            while (states := self._states.read_kept(row_id, ids)) is None:  # another process made room, or it was torn
                asyncio.run_coroutine_threadsafe(self._bring_again(row_id, ids), self._loop).result()
            row_states.append(states)
        self._loop.call_soon_threadsafe(self._let_go, {row_id for row_id, _ in rows})
        return row_states

    async def _open(self, wait_s: float, longest: int) -> None:
        self._changed = asyncio.Event()
        self._flights = asyncio.Semaphore(self._concurrency)
        self._client: httpx.AsyncClient = http_client(self._concurrency, self._states.patience.timeout_s)
        self._model = await connect(self._client, self._states.server, wait_s, longest)
        names = {file.name for file in self._states.folder.glob("kept-*")}
        for row_id in self._sizes:
            if self._states.file_of(row_id).name in names:
                self._hold(row_id)
                self._over[row_id] = None

    async def _close(self) -> None:
        tasks = [*self._tasks.values(), *([self._producer] if self._producer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()
        self._states.close()

    def _begin(self, batches: Iterator[Sequence[Asked]]) -> None:
        self._producer = self._loop.create_task(self._produce(batches))

    async def _produce(self, batches: Iterator[Sequence[Asked]]) -> None:
        for batch in batches:
            while len(self._ahead) >= AHEAD:
                await self._change()
            self._ahead.append({row_id for row_id, _ in batch})
            for row_id, ids in batch:
                self._over.pop(row_id, None)
                await self._make_room(row_id)
                if row_id not in self._here:  # training may have come first
                    self._ask(row_id, ids)

    async def _make_room(self, row_id: str) -> None:
        """Wait until a conversation fits or is there, deleting what no batch ahead needs."""
        size = self._sizes[row_id]
        while row_id not in self._here and self._held and self._held + size > self._room:
            self._delete_down_to(self._room - size)
            if self._held and self._held + size > self._room:
                await self._change()

    def _delete_down_to(self, size: int) -> None:
        """Delete files that no batch ahead needs, the oldest first, until the others have `size`."""
        while self._held > size and self._over:
            oldest, _ = self._over.popitem(last=False)
            self._here.discard(oldest)
            self._held -= self._sizes[oldest]
            discard(self._states.file_of(oldest))

    async def _change(self) -> None:
        """Wait until training has read something."""
        self._changed.clear()
        await self._changed.wait()

    def _hold(self, row_id: str) -> None:
        self._here.add(row_id)
        self._held += self._sizes[row_id]

    def _ask(self, row_id: str, ids: Tensor) -> None:
        self._hold(row_id)
        self._tasks[row_id] = self._loop.create_task(self._bring(row_id, ids))

    async def _bring(self, row_id: str, ids: Tensor) -> None:
        async with self._flights:
            await self._bring_one(self._client, self._model, row_id, ids)

    async def _bring_again(self, row_id: str, ids: Tensor) -> None:
        if row_id not in self._tasks:
            self._tasks[row_id] = self._loop.create_task(self._bring(row_id, ids))
        await self._arrival(row_id)

    async def _bring_all(self, rows: Sequence[Asked]) -> None:
        """Return once all files are there; a batch that training has left makes room."""
        names = {row_id for row_id, _ in rows}
        while len(self._ahead) > 1 and not names & self._ahead[0] and names & set().union(*self._ahead):
            self._let_go(self._ahead.popleft())
        for row_id, ids in rows:
            self._over.pop(row_id, None)  # it stays until it is read
            if row_id not in self._here:
                self._ask(row_id, ids)
        for row_id in names:
            await self._arrival(row_id)

    async def _arrival(self, row_id: str) -> None:
        task = self._tasks.get(row_id)
        if task is None:
            return
        try:
            await task
        except RetryableError as error:
            raise UserError(
                f"{self._states.server.location}: {row_id}: {error}; mend it and run again, training goes on from its "
                "checkpoint"
            ) from error
        self._tasks.pop(row_id, None)

    def _let_go(self, names: set[str]) -> None:
        """Files that no batch ahead needs may make room."""
        needed = set().union(*self._ahead)
        for row_id in sorted(names - needed):
            if row_id in self._here:
                self._over[row_id] = None
        self._delete_down_to(self._room)
        self._changed.set()
