"""A home in one file: `draftsmith backup` writes a tar, consistent while runs go on, and `draftsmith restore` reads it.

Databases are copied by SQLite's own backup, MLflow's together with the promotion log under the registry's lock. What
never changes once it is there (artifacts, files of the history, models in MLflow) is copied as it is, and what names
something before the thing that it names: the databases first, then the history, journals, and the store last. So
everything that a restored home speaks of is in it; a run that was going on counts as killed there, and the same command
goes on from its finished steps. Of a run that ended meanwhile the history may lack the rows, which `resync` makes up.
Left out: unfinished steps, logs, caches, the servers' password. The last member says that the backup is whole.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from components.contract import UserError
from components.files import locked, written_whole
from components.outside_json import parse_json
from storage import journal
from storage.artifacts.sessions import is_path_part, record_dir
from storage.artifacts.store import RECORD_FILE, Store
from storage.history.files import history_dir
from storage.history.records import draftsmith_version
from storage.history.segments import reading, writing
from storage.registry.tracking import mlflow_lock
from storage.repair import DATABASES

_LAST = "backup.json"
_FORMAT = 1
_LOGS = ("home.json", "runs", "steps")
_TRIES = 10  # at an artifact that is made anew while it is copied


@dataclass(frozen=True)
class Backup:
    """What a backup holds; its last member. home: where it was made. made_at: seconds since 1970."""

    format: int
    home: str
    made_at: float
    draftsmith_version: str
    artifacts: int
    runs: int


def back_up(home: Path, file: Path) -> Backup:
    """Write everything of a home that cannot be made again into a tar file (compressed where its name ends in gz).

    Raises:
        UserError: there is no home, or an artifact was made anew while it was copied.
    """
    if not home.is_dir():
        raise UserError(f"backup: {home} is no home; set DRAFTSMITH_HOME to the one that is meant")
    file.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:gz" if file.suffix in (".gz", ".tgz") else "w"
    with written_whole(file) as beside, tarfile.open(beside, mode) as archive:  # type: ignore[call-overload]
        _add_databases(archive, home)
        for path in sorted((home / "mlflow").glob("ready-*")):
            _add(archive, home, path)
        _add_tree(archive, home, home / "mlflow" / "artifacts")
        _add_history(archive, home)
        for name in _LOGS:
            _add_tree(archive, home, home / name)
        runs = len(list((home / "runs").glob("*.jsonl")))
        artifacts = _add_artifacts(archive, home)
        backup = Backup(_FORMAT, str(home), time.time(), draftsmith_version(), artifacts, runs)
        _add_bytes(archive, _LAST, json.dumps(asdict(backup)).encode())
    return backup


def restore(file: Path, home: Path) -> Backup:
    """Make a home of a backup, whole or not at all.

    Raises:
        UserError: the file is no whole backup, or there is something at the home's place already.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise UserError(f"restore: there is something in {home} already; name a new folder with --into")
    home.parent.mkdir(parents=True, exist_ok=True)
    beside = home.with_name(f".{home.name}.{uuid.uuid4().hex}.restoring")
    try:
        with tarfile.open(file) as archive:
            archive.extractall(beside, filter="data")
        last = beside / _LAST
        if not last.is_file():
            raise UserError(f"{file}: is no whole backup (it has no {_LAST}); make it again with draftsmith backup")
        content = parse_json(last.read_text(encoding="utf-8"), _LAST)
        if content.get("format") != _FORMAT:
            raise UserError(f"{file}: was made by another version of Draftsmith; restore it with that one")
        last.unlink()
        if home.exists():
            home.rmdir()
        os.rename(beside, home)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"{file}: cannot be read as a backup ({error})") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return Backup(**content)


def _add_databases(archive: tarfile.TarFile, home: Path) -> None:
    """Add both databases, and the promotion log as it was when MLflow's was copied."""
    with tempfile.TemporaryDirectory() as scratch, mlflow_lock(home, "registry"):
        for name in DATABASES:
            if (home / name).is_file():
                archive.add(_snapshot(home / name, Path(scratch) / "database"), name)
        _add_tree(archive, home, journal.promotions_file(home))


def _snapshot(database: Path, copy: Path) -> Path:
    """A copy of a database as it is at one moment, whoever writes into it."""
    copy.unlink(missing_ok=True)
    with closing(sqlite3.connect(database, timeout=60.0)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    return copy


def _add_history(archive: tarfile.TarFile, home: Path) -> None:
    """Add the tables. What a manifest names stays while it is read; new files may come, and are added or not."""
    if not history_dir(home).is_dir():
        return
    with reading(history_dir(home)):
        for table in sorted(path for path in history_dir(home).iterdir() if path.is_dir()):
            with writing(table, alone=True):  # nobody appends, or swaps the manifest, between these two
                first = [path for name in ("_manifest.json", "_sums.txt") if (path := table / name).is_file()]
                for path in first:
                    _add(archive, home, path)
            for path in sorted(set(table.iterdir()) - {*first}):
                if path.suffix in (".parquet", ".txt") and not path.name.startswith("."):
                    _add(archive, home, path)


def _add_artifacts(archive: tarfile.TarFile, home: Path) -> int:
    """Add the store, with the earlier sessions of each key; returns the number of artifacts.

    Each file gets a second name first, so that it stays as it is while it is copied, whatever becomes of its key.
    """
    places = [home / "store", home / "earlier", home / "records"]
    keys = sorted({path.name for place in places if place.is_dir() for path in place.iterdir() if path.is_dir()})
    (home / "locks").mkdir(exist_ok=True)
    with locked(home / "locks" / "backup.lock"):
        for left in home.glob(".backup-*"):  # by a backup that was killed
            shutil.rmtree(left)
        with tempfile.TemporaryDirectory(dir=home, prefix=".backup-") as scratch:
            for key in (key for key in keys if is_path_part(key)):
                for file, linked in _linked(home, key, Path(scratch)):
                    _add(archive, home, file, linked)
    return sum((home / "store" / key / RECORD_FILE).is_file() for key in keys)


def _linked(home: Path, key: str, scratch: Path) -> list[tuple[Path, Path]]:
    """(file, its second name) of all files of a key, in the store and of its earlier sessions, at one moment."""
    store, now = Store(home), home / "store" / key
    for number in range(_TRIES):
        with store.lock(key, wait=False) as is_locked:
            if is_locked:
                store.settle(key)  # of a kill between the two renames of a commit
        if not now.is_dir() and (home / "partial" / key / RECORD_FILE).is_file():  # just between them
            time.sleep(0.05)
            continue
        before = now.stat().st_ino if now.is_dir() else 0
        try:
            files = [file for place in (now, home / "earlier" / key, record_dir(home, key)) for file in _files(place)]
            pairs = [(file, scratch / f"{key}.{number}.{at}") for at, file in enumerate(files)]
            for file, linked in pairs:
                os.link(file, linked)
            if before == (now.stat().st_ino if now.is_dir() else 0):
                return pairs
        except FileNotFoundError:
            continue
        except OSError:  # a file system without second names
            return [(file, file) for file in files]
    raise UserError(f"backup: {key[:12]} is made anew again and again; the same command later")


def _add_tree(archive: tarfile.TarFile, home: Path, path: Path) -> None:
    for inner in _files(path):
        _add(archive, home, inner)


def _files(path: Path) -> Iterator[Path]:
    """A file, or all files below a folder, without those that are being written."""
    if path.is_dir():
        for inner in sorted(path.rglob("*")):
            if inner.is_file() and not (inner.name.startswith(".") and inner.suffix == ".tmp"):
                yield inner
    elif path.is_file():
        yield path


def _add(archive: tarfile.TarFile, home: Path, file: Path, linked: Path | None = None) -> None:
    """Add a file as it is now; a line that is appended meanwhile is not in it. linked: another name of it."""
    with (linked or file).open("rb") as stream:
        facts = archive.gettarinfo(arcname=file.relative_to(home).as_posix(), fileobj=stream)
        archive.addfile(facts, None if facts.islnk() else stream)  # a link: bytes that are in the archive already
        status = os.fstat(stream.fileno())
        if status.st_nlink == 1:  # with its only name goes its number, which another file may have later
            archive.inodes.pop((status.st_ino, status.st_dev), None)  # type: ignore[attr-defined]


def _add_bytes(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    facts = tarfile.TarInfo(name)
    facts.size, facts.mtime, facts.mode = len(content), int(time.time()), 0o600
    archive.addfile(facts, io.BytesIO(content))
