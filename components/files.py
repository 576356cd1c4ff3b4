"""Files: written whole or not at all, hashed, locked, and swept up after a kill.

Each writer has a temporary name of its own, `.NAME.ID.tmp`, beside the file, and renames it when the content is
complete. A reader sees the old file or the new one, and of two writers of the same bytes it does not matter who comes
last. What a killed writer has left under its temporary name is removed by `sweep`. A lock is an empty file under
flock, which ends with its process.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from components.contract import UserError

SAFETENSORS_PARTIAL = ".tmp??????"
"""Pattern of the temporary name under which safetensors writes a file, in the folder of that file."""


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A path to write to; it becomes `file` if the block ends well, and is gone otherwise.

    Raises:
        UserError: a folder stands in the file's place.
    """
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield beside
        if file.is_dir():
            raise UserError(f"{file}: is a folder where a file belongs; `draftsmith doctor --repair` sets it aside")
        os.replace(beside, file)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def write_whole(file: Path, text: str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Write a text so that a reader sees the old file or the new one, never half of it.

    durable: not after a power cut either. mode: the permissions of the file, less those that the umask takes away.

    Raises:
        UserError: a folder stands in the file's place.
    """
    with written_whole(file) as beside:
        handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            if durable:
                stream.flush()
                os.fsync(stream.fileno())


def flush(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Remove the files that killed writers have left in `folder` and below."""
    for beside in [path for pattern in (".*.tmp", SAFETENSORS_PARTIAL) for path in folder.rglob(pattern)]:
        if beside.is_file():
            beside.unlink(missing_ok=True)


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_of_json(content: Any) -> str:
    """Hex sha256 of JSON values in canonical form: keys sorted, no spaces, ASCII."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def open_lock(path: Path, mode: str = "a") -> IO[str]:
    """The file of a lock, made when it is not there yet. mode: "r" for one that is there, on a read-only disk too.

    Raises:
        UserError: a folder stands in its place.
    """
    try:
        return path.open(mode)
    except IsADirectoryError as error:
        raise UserError(
            f"{path}: is a folder where a lock belongs; `draftsmith doctor --repair` sets it aside"
        ) from error


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Take the lock of an open file without waiting; False when others hold it. Closing the file lets go."""
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: IO[Any], *, shared: bool = False) -> None:
    """Take the lock of an open file, however long others hold it. Closing the file lets go."""
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = True, mode: str = "a") -> Iterator[bool]:
    """Hold a lock; yields whether it was got, which is always so where it waits. mode: as in `open_lock`."""
    with open_lock(path, mode) as file:
        if wait:
            wait_for_lock(file, shared=shared)
            yield True
        else:
            yield try_lock(file, shared=shared)
