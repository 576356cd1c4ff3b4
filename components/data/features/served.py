"""Files of hidden states that a server writes: asked for, checked against what was asked, and kept under our names.

A file holds `hidden_states` [T, L, H] and `token_ids` [T]; where the server's connector stores fp8, also
`hidden_states_scales` [T, 1, 1], one scale for each token. The L states are the taps and then the last layer's output
before the final norm.

A file that is whole and right is renamed, within the server's folder, to a name that follows from the target, the
answers, the taps and the conversation. Those names are the journal: after a kill, what has its file is not asked for
again, and what was in flight is.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from components.contract import UserError
from components.data.features.format import States
from components.engines.hidden_states import StatesShape, ask_for_states, discard, fetch_file, lock_of
from components.engines.mooncake import MooncakeReader
from components.engines.requests import Patience, RetryableError
from components.engines.server_address import MooncakeAddress, ServerAddress
from components.files import digest_of_json
from components.targets.interface import AbstractTarget

LIKELIEST: Final = 5
"""The server's next token must be among so many that the last state makes likeliest; rounding may swap the first."""
POLL_S: Final = 0.02
"""How often a process looks whether another one has what both need."""


@dataclass
class StatesClient:
    """Brings the states of conversations from one server.

    folder: the server's, or our own where they come by `mooncake`.
    owner: the keys of the target and the answers. taps: the layers before the last one. head: the target, of whose
    norm and head the next `num_checked` conversations must make the token that the server puts after them.
    """

    server: ServerAddress
    folder: Path
    shape: StatesShape
    patience: Patience
    owner: Sequence[str]
    taps: Sequence[int]
    head: AbstractTarget | None = None
    num_checked: int = 0
    mooncake: MooncakeReader | None = None

    def close(self) -> None:
        """Leave the Mooncake store, where states come by one."""
        if self.mooncake is not None:
            self.mooncake.close()

    def file_of(self, row_id: str) -> Path:
        """Where a conversation's file is, once it is kept."""
        digest = digest_of_json([*self.owner, list(self.taps), row_id])
        return self.folder / f"kept-{digest[:32]}.safetensors"

    def read_kept(self, row_id: str, ids: Tensor) -> States | None:
        """A conversation's states from its file; None where there is none, or a power cut has torn it."""
        try:
            return read_states(self.file_of(row_id), ids, self.shape)
        except RetryableError:
            return None

    async def bring(self, client: httpx.AsyncClient, model: str, row_id: str, ids: Tensor) -> None:
        """Ask for a conversation, int64 [T], and keep its file; raises RetryableError when the last attempt failed."""
        await self.patience.until_answered(lambda: self._attempt(client, model, row_id, ids))

    async def bring_once(self, client: httpx.AsyncClient, model: str, row_id: str, ids: Tensor) -> None:
        """As `bring`, among processes with the same folder: while one asks the others wait, and find what came.

        Who asks holds a lock, which the system takes from a process that dies.
        """
        mark = self.file_of(row_id).with_suffix(".asked")
        with mark.open("w") as asking:
            while not _locked(asking):
                await asyncio.sleep(POLL_S)
            try:
                if self.read_kept(row_id, ids) is None:
                    await self.bring(client, model, row_id, ids)
            finally:
                mark.unlink(missing_ok=True)

    async def _attempt(self, client: httpx.AsyncClient, model: str, row_id: str, ids: Tensor) -> None:
        reply = await ask_for_states(client, self.server, model, ids.tolist(), self.shape, self.patience)
        if self.mooncake is not None:
            file = self.file_of(row_id).with_suffix(".coming")  # what a kill leaves, the next attempt writes over
            await self.mooncake.fetch(reply.transfer, file, self.patience.timeout_s)
        else:
            file = await fetch_file(self.server, reply.transfer, self.folder, self.patience.timeout_s)
        try:
            states = await asyncio.to_thread(read_states, file, ids, self.shape)
            if self.num_checked and reply.next_token is not None:
                self.num_checked -= 1
                self._check_next(row_id, states, reply.next_token)
        except (RetryableError, UserError):
            discard(file)
            raise
        os.replace(file, self.file_of(row_id))
        lock_of(file).unlink(missing_ok=True)

    def _check_next(self, row_id: str, states: States, token: int) -> None:
        if self.head is not None and not follows(self.head, states, token):
            raise UserError(
                f"{self.server.location}: says token {token} after {row_id}, which the target's norm and head do not "
                "make of the last state; serve this target, with the number of its layers last"
            )


def _locked(file: IO[str]) -> bool:
    """Whether this process has the file's lock now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read_states(file: Path, ids: Tensor, shape: StatesShape) -> States:
    """The states of a conversation's tokens, int64 [T], as bf16.

    Raises:
        UserError: they are of other tokens or layers, or not numbers: the server is not set up for this.
        RetryableError: the file is damaged.
    """
    try:
        tensors = load_file(file)
        states, token_ids = tensors["hidden_states"], tensors["token_ids"]
    except (OSError, SafetensorError, KeyError) as error:
        raise RetryableError(f"{file.name} is no whole file of hidden states ({error})") from error
    if not torch.equal(token_ids.long(), ids.long()):
        raise UserError(f"{file}: holds states of other tokens than were sent; serve the target that answered")
    wanted = (len(ids), *shape)
    if tuple(states.shape) != wanted:
        raise UserError(
            f"{file}: holds states {list(states.shape)}, not {list(wanted)} (tokens, layers, width); serve this target,"
            f" with {shape.num_states} layers: tap_layers and then the number of its layers"
        )
    scales = tensors.get("hidden_states_scales")
    if scales is not None:
        states = states.float() * scales
    states = states.to(torch.bfloat16)
    if not bool(torch.isfinite(states).all()):
        raise UserError(f"{file}: the hidden states are not all finite; serve the target in bfloat16, or mend it")
    return States(states[:, :-1].flatten(1), states[:, -1])


@torch.no_grad()
def follows(model: AbstractTarget, states: States, next_token: int) -> bool:
    """Whether the target's own norm and head make a token one of the likeliest after the last state."""
    last = states.last[-1:].to(model.device, model.dtype)[None]
    logits = model.unembed(model.final_norm(last))[0, 0]
    return next_token in logits.topk(min(LIKELIEST, len(logits))).indices.tolist()


def where_states_come(folder: str, mooncake: MooncakeAddress | None) -> tuple[Path, MooncakeReader | None]:
    """The folder of the server's files, or our own beside the reader of the Mooncake store that states come by.

    Raises:
        UserError: files cannot be read and deleted in the folder, or the store does not answer.
    """
    path = Path(folder).expanduser()
    if mooncake is not None:
        path.mkdir(parents=True, exist_ok=True)
    if not path.is_dir():
        raise UserError(
            f"folder: {path} is no folder here; name the server's shared_storage_path, as this machine sees it"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise UserError(f"folder: {path} cannot be read and written here; files are deleted once they are stored")
    return path, MooncakeReader(mooncake) if mooncake is not None else None
