"""sha256 of files, cached: keys depend on content, and hashing ten gigabytes for every plan would take a minute.

Digests of large files are cached in `digests.json` in the project's home (DRAFTSMITH_HOME, else the user's cache
folder), by path, size, inode and modification time; small files are hashed every time. The cache may be deleted.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Final

from components import files

LARGE: Final = 32 << 20
"""Bytes from which a digest is cached."""


def sha256_of(file: Path) -> str:
    """Hex sha256 of the file's content."""
    stat = file.stat()
    if stat.st_size < LARGE:
        return files.sha256_of(file)
    cache = _cache_file()
    identity = f"{file.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}"
    digests = _read(cache)
    if identity not in digests:
        digests[identity] = files.sha256_of(file)
        _write(cache, {**_read(cache), **digests})
    return digests[identity]


def _cache_file() -> Path:
    home = os.environ.get("DRAFTSMITH_HOME")
    if home:
        return Path(home) / "digests.json"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftsmith" / "digests.json"


def _read(cache: Path) -> dict[str, str]:
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or cut short by a crash: the digests are computed again
        return {}
    return content if isinstance(content, dict) else {}


def _write(cache: Path, digests: dict[str, str]) -> None:
    cache.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(cache, json.dumps(digests, indent=0))
