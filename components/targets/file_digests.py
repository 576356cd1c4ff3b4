"""sha256 of files, remembered: a key must follow content, and hashing ten gigabytes at every plan would take a minute.

Digests of large files are kept in `digests.json` in the project's home (DRAFTSMITH_HOME, else the user's cache folder),
by path, size, inode and modification time; small files are hashed every time. Deleting that file costs time, no more.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Final

LARGE: Final = 32 << 20
"""Bytes from which a digest is remembered."""


def sha256_of(file: Path) -> str:
    """Hex sha256 of the file's content."""
    stat = file.stat()
    if stat.st_size < LARGE:
        return _hash(file)
    memory = _memory_file()
    identity = f"{file.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}"
    known = _read(memory)
    if identity not in known:
        known[identity] = _hash(file)
        _write(memory, {**_read(memory), **known})
    return known[identity]


def _hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _memory_file() -> Path:
    home = os.environ.get("DRAFTSMITH_HOME")
    if home:
        return Path(home) / "digests.json"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftsmith" / "digests.json"


def _read(memory: Path) -> dict[str, str]:
    try:
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or cut short by an old crash: it is only a memory
        return {}
    return found if isinstance(found, dict) else {}


def _write(memory: Path, known: dict[str, str]) -> None:
    memory.parent.mkdir(parents=True, exist_ok=True)
    beside = memory.with_name(f"{memory.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps(known, indent=0), encoding="utf-8")
    beside.replace(memory)
