"""Checks that the files of an artifact are whole, and writes files that are on disk when the call returns.

Reading gigabytes at every verification would be slow, so `home/verified/KEY.json` keeps the inode, time and size that
each file had when its sha256 was right; a file that still has them is not read again for a week. (A disk that rots
changes neither time nor size.)
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from components.contract import UserError

_READ_BYTES = 1 << 20
BELIEVED_S: Final = 7 * 24 * 3600.0  # how long a file counts as whole without being read again
Stamps = dict[str, list[int]]
"""File name -> [inode, time of its last change in ns, size in bytes]."""


def file_fault(home: Path, key: str, path: Path, files: Mapping[str, Any], *, anew: bool = False) -> str:
    """What is wrong with the listed files of an artifact, or ''. Files unchanged since they were hashed are not read.

    files: name -> {"size", "sha256"}. anew: read them all.
    """
    remembered, current = Stamps() if anew else _read_stamps(home, key), Stamps()
    for name, facts in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        stamp = stamp_of(file)
        if stamp[2] != facts["size"]:
            return f"{name} has {stamp[2]} bytes instead of {facts['size']}"
        if remembered.get(name) != stamp and sha256_of(file) != facts["sha256"]:
            return f"{name} has changed since it was made"
        current[name] = stamp
    if current != remembered:
        write_stamps(home, key, current)
    return ""


def write_stamps(home: Path, key: str, stamps: Mapping[str, list[int]]) -> None:
    """Note that files with these stamps had the right sha256."""
    folder = home / "verified"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / f"{key}.json", json.dumps(stamps))
    except (OSError, UserError):
        return  # read-only, somebody else's, full or a folder: only a cache, without it files are hashed each time


def sha256_of(file: Path) -> str:
    """Hex digest of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def digest_of_json(content: Any) -> str:
    """Hex sha256 of JSON values in canonical form: keys sorted, no spaces, ASCII."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def replace_file(file: Path, text: str, *, durable: bool = False) -> None:
    """Write a small file so that a reader sees the old or the new one, never half of it.

    durable: not after a power cut either.

    Raises:
        UserError: a folder stands in its place.
    """
    beside = file.with_name(f".{file.name}.{os.getpid()}.{time.time_ns()}")
    if durable:
        write_flushed(beside, text)
    else:
        beside.write_text(text, encoding="utf-8")
    put_in_place(beside, file)


def put_in_place(written: Path, file: Path) -> None:
    """Rename a written file to its final name, replacing what stood there.

    Raises:
        UserError: a folder stands in its place.
    """
    try:
        os.replace(written, file)
    except IsADirectoryError as error:
        written.unlink(missing_ok=True)
        raise UserError(
            f"{file}: is a folder where a file belongs; `draftsmith doctor --repair` sets it aside"
        ) from error


def stamp_of(file: Path) -> list[int]:
    """The inode, time and size of a file, by which it is recognised as unchanged."""
    stat = file.stat()
    return [stat.st_ino, stat.st_mtime_ns, stat.st_size]


def flush(path: Path) -> None:
    """Return once a file's bytes, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_flushed(file: Path, text: str) -> None:
    """Write a file and return once it is on disk."""
    with file.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _read_stamps(home: Path, key: str) -> Stamps:
    file = home / "verified" / f"{key}.json"
    try:
        if not 0 <= time.time() - file.stat().st_mtime <= BELIEVED_S:  # from the future: a clock was wrong
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # only a cache: without it, files are hashed again
    return dict(content) if isinstance(content, dict) else {}
