"""Sessions: each time an artifact is made it gets a session beside its key, and its earlier sessions are kept.

The key names the inputs and code of an artifact; a measuring step that runs again gives other numbers under the same
key. Each time an artifact is sealed, `artifact.json` gets a `session`, unique and sortable by time. The newest is in
`store/KEY`, those before it at `earlier/KEY/SESSION`, whole where they are evidence. Of an artifact of another kind
(features, a drafter) only the record is kept, since its files may be as large as all the rest and are made from what
the record names. An artifact that is older than sessions has the session "".
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from components.contract import UserError
from components.files import written_whole
from storage.artifacts.records import RECORD_FILE as RECORD_FILE
from storage.artifacts.records import ArtifactRecord, BadRecord, read_checked

EVIDENCE = ("Measurements", "DepthPolicy", "Release", "Page")
"""Kinds that hold measurements and decisions: when they are made again, all files of the earlier ones are kept."""


@dataclass(frozen=True)
class Session:
    """One session of an artifact. name: "" where it is older than sessions. finished_at: seconds since 1970."""

    name: str
    path: Path
    finished_at: float
    is_newest: bool


COLLECTED = "collected"
"""A file beside the record of an artifact whose files `draftsmith gc` has deleted (storage/collect.py)."""
_NAME = re.compile(r"\w[\w-]{0,127}")


def require_path_part(name: str) -> str:
    """The name of a key or session, once it is checked that it can safely become a part of a path.

    Raises:
        UserError: it holds anything but letters, digits, _ and -, and might lead elsewhere.
    """
    if not is_path_part(name):
        raise UserError(f"{name[:80]!r} is no key of an artifact: letters, digits, - and _ alone")
    return name


def is_path_part(name: str) -> bool:
    """Whether a name has the form of a key or of a session."""
    return _NAME.fullmatch(name) is not None


def file_key(key: str, session: str) -> str:
    """KEY.SESSION, the name of one session of an artifact; KEY alone where it is older than sessions."""
    return f"{key}.{session}" if session else key


def new_session(at: float) -> str:
    """A new unique name that sorts by time. at: seconds since 1970."""
    return f"{_stamp(at)}-{uuid.uuid4().hex[:8]}"


def session_of(content: Mapping[str, Any]) -> str:
    """The session of an artifact.json."""
    return str(content.get("session", ""))


def directory_name(content: ArtifactRecord) -> str:
    """The name of the directory of an earlier session, also of one that is older than sessions."""
    return session_of(content) or f"{_stamp(float(content['finished_at']))}-unnamed"


def read_record(path: Path) -> ArtifactRecord | None:
    """artifact.json in a directory; None when there is none, or none that can be read."""
    try:
        content = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    is_record = isinstance(content, dict) and {"key", "kind", "files", "finished_at"} <= content.keys()
    return cast("ArtifactRecord", content) if is_record else None


def earlier_dir(home: Path, key: str) -> Path:
    """Where the earlier sessions of a key are."""
    return home / "earlier" / key


def earlier_paths(home: Path, key: str) -> list[Path]:
    """The directories of the earlier sessions of a key, oldest first."""
    folder = earlier_dir(home, key)
    return sorted(path for path in folder.iterdir() if (path / RECORD_FILE).is_file()) if folder.is_dir() else []


def collected_path(home: Path, key: str) -> Path | None:
    """The directory with the record of an artifact that was collected last, or deleted by hand; None without one."""
    paths = [path for path in earlier_paths(home, key) if (path / COLLECTED).is_file()]
    if paths:
        return paths[-1]
    try:  # two names have the same bytes: where the artifact was damaged in its record, this is damaged too
        read_checked(record_dir(home, key))
    except BadRecord:
        return None
    return record_dir(home, key)


def record_dir(home: Path, key: str) -> Path:
    """Where the record of an artifact has a second name, which stays if somebody deletes the artifact."""
    return home / "records" / key


def keep_record(home: Path, path: Path, key: str) -> None:
    """Give the record of an artifact, which is at `path`, its second name."""
    place = record_dir(home, key)
    place.mkdir(parents=True, exist_ok=True)
    with written_whole(place / RECORD_FILE) as beside:
        try:
            os.link(path / RECORD_FILE, beside)
        except OSError:  # a file system without second names
            shutil.copyfile(path / RECORD_FILE, beside)


def delete_files(path: Path) -> None:
    """Delete the files of an artifact; its record stays. It can be repeated, and killed at any moment."""
    content = read_record(path)
    for name in content["files"] if content is not None else ():
        (path / name).unlink(missing_ok=True)
    for folder in sorted((inner for inner in path.rglob("*") if inner.is_dir()), reverse=True):
        folder.rmdir()


def thin(path: Path, newer: Path) -> None:
    """Delete from an earlier session what need not be kept twice. It can be repeated, and killed at any moment.

    Of evidence every file stays, one with the newer session's bytes as a second name of the same file; of other kinds
    the record alone stays.
    """
    content, now = read_record(path), read_record(newer)
    if content is None or now is None:
        return
    if content["kind"] not in EVIDENCE or (path / COLLECTED).is_file():
        delete_files(path)
        return
    for name, facts in content["files"].items():
        same = now["files"].get(name)
        if same is not None and same["sha256"] == facts["sha256"]:
            _share_bytes(newer / name, path / name)


def _share_bytes(file: Path, copy: Path) -> None:
    """Make `copy` a hard link to `file`, where the file system can; a kill leaves the copy or the link."""
    if file.samefile(copy):
        return
    with contextlib.suppress(OSError), written_whole(copy) as beside:  # where links cannot be made the copy stays
        os.link(file, beside)


def _stamp(at: float) -> str:
    whole = int(at)
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(whole))}-{int((at - whole) * 1e6):06d}"
