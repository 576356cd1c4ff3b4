"""How vLLM hands out hidden states where no folder is shared: by Mooncake, a store in the memory of several machines.

vLLM's connector of the package hs-connectors puts the tensors of a conversation into the store as one object. The reply
to the completion says its name and how the tensors lie in it (a manifest). The object may come a few milliseconds after
the reply; an object NAME:error in its place says what went wrong. The package reads it, over TCP or RDMA.

Here an object becomes a file in a folder of our own and is removed from the store at once. What a killed process leaves
in the store, Mooncake lets go when it needs the room.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save

from components.contract import UserError
from components.engines.requests import RetryableError
from components.engines.server_address import MooncakeAddress
from components.outside_json import JsonObject

MISSING: Final = (
    "needs the packages hs-connectors and mooncake-transfer-engine: pip install 'draftsmith[mooncake]', and Debian's "
    "libibverbs1"
)
STAGING_BYTES: Final = 1 << 26
"""What Mooncake's client registers for itself; objects go straight into a reader's own buffer, as large as they are."""
READERS: Final = 2
"""Threads that read objects, each with a buffer as large as the largest object yet."""
ANSWERS_WITHIN_S: Final = 10.0
LOOKS_FOR_S: Final = 0.5
"""Seconds that a thread waits for an object before it looks for another one, or ends."""


class MooncakeReader:
    """Reads what vLLM has put into a Mooncake store, as a client that gives no memory of its own to the store."""

    def __init__(self, address: MooncakeAddress) -> None:
        """Connect; raises UserError where a package is missing or no master answers."""
        os.environ.setdefault("GLOG_minloglevel", "3")  # its engine tells every connection on the standard error
        try:
            from hs_connectors.mooncake_store import MooncakeHiddenStatesStore, MooncakeStoreConfig

            host, _, port = address.master.rpartition(":")
            socket.create_connection((host, int(port)), ANSWERS_WITHIN_S).close()  # the engine would try for 90 s
            self._store = MooncakeHiddenStatesStore(
                MooncakeStoreConfig(
                    local_hostname=address.local_hostname or socket.gethostbyname(socket.gethostname()),
                    metadata_server=address.metadata_server,
                    master_server_address=address.master,
                    global_segment_size=0,
                    local_buffer_size=STAGING_BYTES,
                    protocol=address.protocol,
                    device_name=address.device,
                )
            )
            self._store.setup()
        except ImportError as error:
            raise UserError(f"mooncake: {MISSING} ({error})") from error
        except (RuntimeError, OSError) as error:
            raise UserError(
                f"mooncake: no store at {address.master} ({error}); start mooncake_master, or name where it is"
            ) from error
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="mooncake")

    async def fetch(self, transfer: JsonObject, file: Path, wait_s: float) -> None:
        """Bring an object that a reply names into this file, and remove it from the store.

        Raises:
            UserError: the reply is none of a server with Mooncake's connector.
            RetryableError: the server says that it failed, nothing came within `wait_s` seconds, or it is not whole.
        """
        handle = transfer.get("handle")
        if not isinstance(handle, str) or not isinstance(transfer.get("tensors"), dict):
            raise UserError(
                "mooncake: the server hands out files; start vLLM with its Mooncake connector, or leave `mooncake` out"
            )
        loop, began = asyncio.get_running_loop(), time.monotonic()
        while not await loop.run_in_executor(self._threads, self._take, transfer, file):
            if time.monotonic() - began > wait_s:
                await loop.run_in_executor(self._threads, self._remove, handle)
                raise RetryableError(f"mooncake: {handle} did not come within {wait_s:g} s; the server's log says why")

    def _take(self, transfer: JsonObject, file: Path) -> bool:
        """Write an object's file, and remove the object; False where it has not come yet."""
        try:
            tensors = self._store.get_sample(transfer, timeout=LOOKS_FOR_S)
        except TimeoutError:
            return False
        except (RuntimeError, KeyError, TypeError, ValueError) as error:
            self._remove(transfer["handle"])
            what = " ".join(str(error).partition("Transfer manifest")[0].split())
            raise RetryableError(f"mooncake: {what[:300]}") from error
        self._remove(transfer["handle"])
        write_tensors(tensors, file)
        return True

    def _remove(self, handle: str) -> None:
        """Remove an object, and the word of what went wrong with it."""
        try:
            self._store.delete_sample(handle)
        except RuntimeError as error:
            raise RetryableError(f"mooncake: {error}") from error

    def close(self) -> None:
        """Leave the store."""
        self._threads.shutdown()
        connection: Any = self._store._store  # the package has no way to close it
        connection.close()


def write_tensors(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file under its own name, which the next attempt writes over.

    safetensors' `save_file` writes one of a random name first, and a kill would leave that for ever.
    """
    file.write_bytes(save(tensors))
