"""What is remembered between processes: JSON objects in the project's home, which may be deleted at any time.

The home is DRAFTSMITH_HOME, else `draftsmith` in the user's cache folder. A file is replaced whole by whoever adds to
it; of what two processes add at once, one may be lost, and is then found out again.

Digests of large files are among it: keys depend on content, and hashing ten gigabytes for every plan takes a minute.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from components import files
from components.outside_json import JsonObject

LARGE: Final = 32 << 20
"""Bytes from which a digest is cached."""
DIGESTS: Final = "digests.json"


def sha256_of(file: Path) -> str:
    """Hex sha256 of the file's content; a large one is known by path, size, inode and modification time."""
    stat = file.stat()
    if stat.st_size < LARGE:
        return files.sha256_of(file)
    identity = f"{file.resolve()}|{stat.st_size}|{stat.st_ino}|{stat.st_mtime_ns}"
    known = recall(DIGESTS).get(identity)
    if isinstance(known, str):
        return known
    digest = files.sha256_of(file)
    remember(DIGESTS, {identity: digest})
    return digest


def recall(name: str) -> JsonObject:
    """The content of the file; {} where there is none, or a damaged one."""
    try:
        content = json.loads(_file(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, or cut short by a crash
        return {}
    return content if isinstance(content, dict) else {}


def remember(name: str, entries: Mapping[str, object]) -> bool:
    """Add entries to the file; False where the home cannot be written to, which costs nothing but time."""
    file = _file(name)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_whole(file, json.dumps({**recall(name), **entries}, indent=0))
    except OSError:  # a read-only disk, as where a released model is served
        return False
    return True


def cache_folder() -> Path:
    """Draftsmith's part of the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftsmith"


def _file(name: str) -> Path:
    home = os.environ.get("DRAFTSMITH_HOME")
    return (Path(home) if home else cache_folder()) / name
