"""Sessions: every making of an artifact has a name of its own beside its key, and what was made before is kept.

The key says what an artifact is made of; a step that measures and is run again gives other numbers under the same key.
Each time an artifact is sealed, `artifact.json` gets a `session`, unique and sortable by time. The newest stands at
`store/KEY`, those before it at `earlier/KEY/SESSION`, whole where they are evidence. Of an artifact of another kind
(features, a drafter) only the record is kept, since its files may be as large as all the rest and are made from what
the record names. An artifact from before there were sessions has "" for a session.
"""

from __future__ import annotations

import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components.contract import UserError
from storage.artifact_records import RECORD_FILE as RECORD_FILE

EVIDENCE = ("Measurements", "DepthPolicy", "Release", "Page")
"""Kinds that say what was measured and decided: of these nothing is thrown away when they are made again."""


@dataclass(frozen=True)
class Session:
    """One making of an artifact. name: "" from before there were sessions. finished_at: seconds since 1970."""

    name: str
    path: Path
    finished_at: float
    is_newest: bool


_NAME = re.compile(r"\w[\w-]{0,127}")


def part_of_path(name: str) -> str:
    """The name of a key or of a session, which becomes a part of a path and may have been read from anywhere.

    Raises:
        UserError: it holds anything but letters, digits, _ and -, and might lead elsewhere.
    """
    if not is_part_of_path(name):
        raise UserError(f"{name[:80]!r} is no key of an artifact: letters, digits, - and _ alone")
    return name


def is_part_of_path(name: str) -> bool:
    """Whether a name can be that of a key or of a session."""
    return _NAME.fullmatch(name) is not None


def file_key(key: str, session: str) -> str:
    """KEY.SESSION, the name of one session of an artifact; KEY alone from before there were sessions."""
    return f"{key}.{session}" if session else key


def new_session(at: float) -> str:
    """A name that nobody has had before, and that sorts by time. at: seconds since 1970."""
    return f"{_stamp(at)}-{uuid.uuid4().hex[:8]}"


def session_of(content: Mapping[str, Any]) -> str:
    """The session of an artifact.json."""
    return str(content.get("session", ""))


def place_name(content: Mapping[str, Any]) -> str:
    """What the directory of an earlier session is called, also of one from before there were sessions."""
    return session_of(content) or f"{_stamp(float(content['finished_at']))}-unnamed"


def read_record(path: Path) -> dict[str, Any] | None:
    """artifact.json in a directory; None when there is none, or none that can be read."""
    try:
        content = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"key", "kind", "files", "finished_at"} <= content.keys() else None


def earlier_dir(home: Path, key: str) -> Path:
    """Where the earlier sessions of a key are."""
    return home / "earlier" / key


def earlier_paths(home: Path, key: str) -> list[Path]:
    """The directories of the earlier sessions of a key, oldest first."""
    folder = earlier_dir(home, key)
    return sorted(path for path in folder.iterdir() if (path / RECORD_FILE).is_file()) if folder.is_dir() else []


def thin(path: Path, newer: Path) -> None:
    """Take from an earlier session what need not be kept twice; safe to repeat, and to be killed in.

    Of evidence every file stays, one with the newer session's bytes as a second name of the same file; of other kinds
    the record alone stays.
    """
    content, now = read_record(path), read_record(newer)
    if content is None or now is None:
        return
    if content["kind"] not in EVIDENCE:
        for name in content["files"]:
            (path / name).unlink(missing_ok=True)
        for folder in sorted((one for one in path.rglob("*") if one.is_dir()), reverse=True):
            folder.rmdir()
        return
    for name, facts in content["files"].items():
        same = now["files"].get(name)
        if same is not None and same["sha256"] == facts["sha256"]:
            _share_bytes(newer / name, path / name)


def _share_bytes(file: Path, copy: Path) -> None:
    """Make a copy another name of a file, where the file system can; it is a whole copy or the file at any moment."""
    if file.samefile(copy):
        return
    beside = copy.with_name(f".{copy.name}.{os.getpid()}")
    beside.unlink(missing_ok=True)
    try:
        os.link(file, beside)
    except OSError:  # it knows no second names: the copy stays
        return
    os.replace(beside, copy)


def _stamp(at: float) -> str:
    whole = int(at)
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(whole))}-{int((at - whole) * 1e6):06d}"
