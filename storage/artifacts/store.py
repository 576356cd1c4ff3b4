"""The store: one directory per key, complete or absent, whatever dies.

A step writes into `partial/KEY`, which outlives a crash so that the next run goes on from it. Only when the step has
returned are its files hashed, `artifact.json` written last, everything flushed to disk, and the directory renamed to
`store/KEY`; what stood there moves to `earlier/KEY` first (storage/artifacts/sessions.py). A kill between the two
renames loses neither: whoever comes next finishes the move. Nothing in the store is believed unread: every file must
be there with its size and sha256, and a directory that fails is moved to `broken/` and never used. One lock a key keeps
two processes from making the same thing twice.

    home/store/KEY/               files and artifact.json
    home/earlier/KEY/SESSION/     what this key was before it was made again
    home/partial/KEY/             what an unfinished step has written; KEY.scratch/ holds its checkpoints
    home/to_share/KEY             made here, not yet in the shared store
    home/verified/KEY.json        inode, time and size that each file had when its sha256 was right
    home/locks/ broken/

Reading gigabytes at every verification would be slow, so a file that is as `verified/` says is not read again for a
week. (A disk that rots changes neither time nor size.)

With $DRAFTSMITH_STORE (storage/artifacts/remote.py) this is the verified cache of a store that many machines share:
what is absent here is downloaded from it, and what is finished here is uploaded to it.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.contract import KINDS, Artifact, UserError
from components.files import flush, locked, sha256_of, sweep, write_whole
from storage.artifacts import sessions
from storage.artifacts.records import ArtifactRecord, BadRecord, FileFacts, read_checked, with_digest
from storage.artifacts.remote import shared_store
from storage.artifacts.sessions import RECORD_FILE as RECORD_FILE
from storage.artifacts.sessions import Session

LONGEST_BELOW = 600
"""Bytes that a path below a home may have: keys, names of steps and MLflow's folders."""
BELIEVED_S: Final = 7 * 24 * 3600.0
"""How long a file counts as whole without being read again."""
Stamps = dict[str, list[int]]
"""File name -> [inode, time of its last change in ns, size in bytes]."""


def default_home() -> Path:
    """Where everything lives: $DRAFTSMITH_HOME, else `.draftsmith` in the current directory."""
    return Path(os.environ.get("DRAFTSMITH_HOME") or ".draftsmith").absolute()


def require_writable(home: Path) -> None:
    """Raise UserError where nothing can be written below the home; called before anything starts."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
        longest = os.pathconf(home, "PC_PATH_MAX") - LONGEST_BELOW
    except OSError as error:
        raise UserError(
            f"{home}: cannot be written to ({error.strerror}); set DRAFTSMITH_HOME to a folder that can"
        ) from error
    if len(os.fsencode(home)) > longest:
        raise UserError(
            f"{str(home)[:80]}...: the path has more than {longest} bytes; set DRAFTSMITH_HOME to a shorter"
        )


@dataclass(frozen=True)
class Finding:
    """The state of a key in the store. artifact: None unless the directory is whole. fault: what is wrong with it."""

    artifact: Artifact | None
    fault: str  # "" when whole; "absent"; or what is broken about it


class DamagedRecord(UserError, ValueError):
    """An artifact of the store whose artifact.json cannot be used."""


class Store:
    """All artifacts under one home directory. Safe to use from many processes and threads."""

    def __init__(self, home: Path | str | None = None) -> None:
        self.home = Path(home).absolute() if home is not None else default_home()
        self.remote = shared_store()

    def path_of(self, key: str) -> Path:
        """The directory that a finished artifact has or would have; that of an earlier session, given KEY.SESSION.

        Raises:
            UserError: it is no key, and might lead out of the store.
        """
        bare, _, session = key.partition(".")
        sessions.require_path_part(bare)
        if session:
            return sessions.earlier_dir(self.home, bare) / sessions.require_path_part(session)
        return self.home / "store" / bare

    def verify_local(self, key: str, *, anew: bool = False) -> Finding:
        """Verify the artifact of a key in this home; change nothing. anew: read files that were verified lately too."""
        path = self.path_of(key)
        if not path.is_dir():
            return Finding(None, "absent")
        try:
            record = read_checked(path)
        except BadRecord as error:
            return Finding(None, str(error))
        if record["key"] != key.partition(".")[0]:
            return Finding(None, f"its record is that of {record['key'][:12]}")
        fault = file_fault(self.home, key, path, record["files"], anew=anew)
        if fault:
            return Finding(None, fault)
        return Finding(KINDS[record["kind"]](key=key, path=path, info=record["info"]), "")

    def probe(self, key: str) -> Finding:
        """Look for an artifact here, then in the shared store, whose record is believed; change nothing."""
        local = self.verify_local(key)
        record = self.remote.record(key) if local.artifact is None and self.remote is not None else None
        if record is None:
            return local
        return Finding(KINDS[record["kind"]](key=key, path=self.path_of(key), info=record["info"]), "")

    def ensure_local(self, key: str) -> Finding:
        """Verify an artifact; download it first when it is absent here and the shared store has it."""
        local = self.verify_local(key)
        if local.fault != "absent" or (self.remote is None and not self._is_sealed(key)):
            return local
        with self.lock(key):
            self.settle(key)
            local = self.verify_local(key)
            if local.fault != "absent":  # another process has downloaded it meanwhile
                return local
            artifact = self.download(key)
            return local if artifact is None else Finding(artifact, "")

    def get(self, key: str) -> Artifact | None:
        """The artifact of this key, verified; downloaded when only the shared store has it.

        A broken one is moved to `broken/` and counts as absent.
        """
        finding = self.ensure_local(key)
        if finding.artifact is not None or finding.fault == "absent" or "." in key:
            return finding.artifact
        with self.lock(key, wait=False) as is_locked:
            if not is_locked:  # somebody is making it anew at this moment
                return None
            finding = self.verify_local(key)
            if finding.artifact is None and finding.fault != "absent":
                self.quarantine(key)
            return finding.artifact or self.download(key)

    def download(self, key: str) -> Artifact | None:
        """Download an artifact that is absent here from the shared store, and verify it. Hold `lock(key)`."""
        if self.remote is None or "." in key:  # of earlier sessions only the rows come, into the history
            return None
        out = self.home / "partial" / f"{key}.incoming"
        shutil.rmtree(out, ignore_errors=True)  # of a process that died
        content = self.remote.download(key, out)
        if content is None:
            shutil.rmtree(out, ignore_errors=True)
            return None
        for name in content["files"]:
            flush(out / name)
        return self._seal(out, content, {name: stamp_of(out / name) for name in content["files"]})

    def share(self, key: str) -> bool:
        """Upload a finished artifact to the shared store, if there is one; True when nothing is left to do."""
        if self.remote is None:
            return True
        for path in [*sessions.earlier_paths(self.home, key), self.path_of(key)]:
            if path.is_dir() and not self.remote.upload(path, json.loads((path / RECORD_FILE).read_text("utf-8"))):
                return False
        (self.home / "to_share" / key).unlink(missing_ok=True)
        return True

    def open_staging(self, key: str) -> tuple[Path, Path]:
        """The folders (out, scratch) for a step's artifact and its checkpoints. What a crash left there stays, but for
        files that it had not written whole: nobody else would ever remove them. Hold `lock(key)`.
        """
        self.settle(key)
        out, scratch = self.home / "partial" / key, self.home / "partial" / f"{key}.scratch"
        out.mkdir(parents=True, exist_ok=True)
        scratch.mkdir(parents=True, exist_ok=True)
        (out / RECORD_FILE).unlink(missing_ok=True)  # a finish that died before its rename
        sweep(out)
        sweep(scratch)
        return out, scratch

    def commit(self, key: str, kind: str, info: Mapping[str, Any], record: Mapping[str, Any]) -> Artifact:
        """Seal `partial/KEY` and move it into the store; the artifact there now becomes an earlier session.

        Hold `lock(key)`. record: how the artifact came to be, kept in artifact.json.
        """
        out, scratch = self.home / "partial" / key, self.home / "partial" / f"{key}.scratch"
        stamps: Stamps = {}
        files: dict[str, FileFacts] = {}
        for file in sorted(path for path in out.rglob("*") if path.is_file() and path.name != RECORD_FILE):
            name = file.relative_to(out).as_posix()
            flush(file)
            files[name] = {"size": file.stat().st_size, "sha256": sha256_of(file)}
            stamps[name] = stamp_of(file)
        earlier_times = [session.finished_at for session in self.sessions(key)[:1]]
        # newer than the session before, also where the clock was put back
        finished_at = max([time.time(), *(earlier + 0.001 for earlier in earlier_times)])
        content: ArtifactRecord = {
            "key": key,
            "kind": kind,
            "session": sessions.new_session(finished_at),
            "info": dict(info),
            "record": dict(record),
            "files": files,
            "finished_at": finished_at,
        }
        content = with_digest(content)
        if self.remote is not None:  # noted before it is there, so that a kill in between leaves nothing unshared
            (self.home / "to_share").mkdir(exist_ok=True)
            (self.home / "to_share" / key).touch()
        artifact = self._seal(out, content, stamps)
        shutil.rmtree(scratch, ignore_errors=True)
        self.share(key)
        return artifact

    def settle(self, key: str) -> bool:
        """Finish a commit that a kill cut short; True when the artifact is in its place now.

        Hold `lock(key)`. A directory that is not whole stays as that of an unfinished step.
        """
        if not self._is_sealed(key):
            return False
        out = self.home / "partial" / key
        content = sessions.read_record(out)
        files = content["files"] if content is not None else {}
        if content is None or any(
            not (out / name).is_file() or sha256_of(out / name) != facts["sha256"] for name, facts in files.items()
        ):
            (out / RECORD_FILE).unlink()
            return False
        self._move_in(out, content, {name: stamp_of(out / name) for name in files})
        return True

    def settle_all(self) -> None:
        """Settle every artifact that nobody is making at this moment."""
        for record in sorted((self.home / "partial").glob(f"*/{RECORD_FILE}")):
            with self.lock(record.parent.name, wait=False) as is_locked:
                if is_locked:
                    self.settle(record.parent.name)

    def sessions(self, key: str) -> list[Session]:
        """Every session of this key that is kept here, the newest first."""
        now = self.path_of(key)
        paths = [*([now] if now.is_dir() else []), *reversed(sessions.earlier_paths(self.home, key))]
        records = [(path, sessions.read_record(path)) for path in paths]
        return [
            Session(sessions.session_of(content), path, float(content["finished_at"]), path == now)
            for path, content in records
            if content is not None
        ]

    def name_of_session(self, key: str, session: str) -> str:
        """The name of a session of a key: KEY.SESSION, or KEY for the newest and for one that is not kept whole."""
        earlier = [making.path.name for making in self.sessions(key) if making.name == session and not making.is_newest]
        name = f"{key}.{earlier[0]}" if earlier else key
        return name if self.verify_local(name).artifact is not None else key

    def path_of_session(self, key: str, session: str) -> Path:
        """The directory of a session of a key; that of the newest where the session is not kept here."""
        return next((making.path for making in self.sessions(key) if making.name == session), self.path_of(key))

    def _is_sealed(self, key: str) -> bool:
        """Whether a process has sealed `partial/KEY`, and died or is about to move it into the store."""
        return (self.home / "partial" / key / RECORD_FILE).is_file()

    def _seal(self, out: Path, content: ArtifactRecord, stamps: Mapping[str, list[int]]) -> Artifact:
        """Write artifact.json last and whole, flush, and move `out` into the store."""
        write_whole(out / RECORD_FILE, json.dumps(content, indent=1), durable=True)
        for folder in [out, *(path for path in out.rglob("*") if path.is_dir())]:
            flush(folder)
        return self._move_in(out, content, stamps)

    def _move_in(self, out: Path, content: ArtifactRecord, stamps: Mapping[str, list[int]]) -> Artifact:
        """Rename a sealed directory into the store, after moving away what is there under this key."""
        key, path = str(content["key"]), self.path_of(str(content["key"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            self._make_room(key)
        os.rename(out, path)
        flush(path.parent)
        sessions.keep_record(self.home, path, key)
        write_stamps(self.home, key, stamps)
        for older in sessions.earlier_paths(self.home, key):
            sessions.thin(older, path)
        return KINDS[content["kind"]](key=key, path=path, info=dict(content["info"]))

    def _make_room(self, key: str) -> None:
        """Move the present artifact of a key to its earlier sessions, or a broken one aside."""
        content = sessions.read_record(self.path_of(key))
        if content is None or self.verify_local(key).artifact is None:
            self.quarantine(key)
            return
        place = sessions.earlier_dir(self.home, key) / sessions.directory_name(content)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.path_of(key), place)
        flush(place.parent)
        flush(place.parent.parent)

    def collect(self, key: str) -> None:
        """Delete the files of an artifact and keep its record, which says what it was and how to make it again.

        Hold `lock(key)`. A kill in the middle leaves it whole in the store, or collected.
        """
        content = read_checked(self.path_of(key))
        place = sessions.earlier_dir(self.home, key) / sessions.directory_name(content)
        (self.path_of(key) / sessions.COLLECTED).touch()
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.path_of(key), place)
        flush(place.parent)
        (self.home / "verified" / f"{key}.json").unlink(missing_ok=True)
        sessions.delete_files(place)

    def is_collected(self, key: str) -> bool:
        """Whether an artifact was made here, and only its record is left."""
        return not self.path_of(key).is_dir() and sessions.collected_path(self.home, key) is not None

    def collected_keys(self) -> list[str]:
        """The keys of all artifacts of which only the record is left."""
        folders = [folder for folder in (self.home / "earlier", self.home / "records") if folder.is_dir()]
        names = sorted({path.name for folder in folders for path in folder.iterdir()})
        return [name for name in names if sessions.is_path_part(name) and self.is_collected(name)]

    def discard_staging(self, key: str) -> None:
        """Delete what an unfinished step has written (used when a step is forced to start again)."""
        shutil.rmtree(self.home / "partial" / key, ignore_errors=True)
        shutil.rmtree(self.home / "partial" / f"{key}.scratch", ignore_errors=True)

    def quarantine(self, key: str) -> Path:
        """Move an artifact from the store into `broken/`; returns its new path. Hold `lock(key)`."""
        place = self.home / "broken" / f"{key}.{time.time_ns()}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.rename(self.path_of(key), place)
        return place

    def record_of(self, key: str) -> ArtifactRecord:
        """artifact.json of an artifact, here or in the shared store: key, kind, info, record, files, finished_at.

        Also of one whose files were collected, or deleted by hand.

        Raises:
            FileNotFoundError: there is none.
            DamagedRecord: it is not as it was written.
        """
        path = self.path_of(key)
        if not path.is_dir() and "." not in key:
            path = sessions.collected_path(self.home, key) or path
        if not (path / RECORD_FILE).exists():
            content = self.remote.record(key) if self.remote is not None else None
            if content is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path / RECORD_FILE))
            return content
        try:
            return read_checked(path)
        except BadRecord as error:
            raise DamagedRecord(
                f"{path}: {error}; `draftsmith doctor --repair` sets it aside, and the next run that needs it makes it "
                "anew"
            ) from error

    def keys(self) -> list[str]:
        """Keys of all directories in the store of this machine, oldest first; unverified."""
        folder = self.home / "store"
        paths = [path for path in folder.iterdir() if (path / RECORD_FILE).is_file()] if folder.is_dir() else []
        return [path.name for path in sorted(paths, key=lambda path: (path / RECORD_FILE).stat().st_mtime)]

    def resolve(self, prefix: str) -> str:
        """The one key that starts with `prefix`, here or else in the shared store; KEY.SESSION for an earlier session.

        Raises:
            UserError: none or several do.
        """
        prefix, _, session = prefix.partition(".")
        if session:
            key = self.resolve(prefix)
            names = [path.name for path in sessions.earlier_paths(self.home, key) if path.name.startswith(session)]
            if len(names) != 1:
                raise UserError(
                    f"{len(names)} earlier sessions of {key[:12]} start with '{session}': see show {key[:12]}"
                )
            return f"{key}.{names[0]}"
        matches = [key for key in self.keys() if key.startswith(prefix)] if prefix else []
        if not matches and prefix:
            matches = [key for key in self.collected_keys() if key.startswith(prefix)]
        if not matches and prefix and self.remote is not None:
            matches = [key for key in self.remote.keys() or () if key.startswith(prefix)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise UserError(f"no artifact in {self.home / 'store'} has a key that starts with '{prefix}'")
        raise UserError(f"'{prefix}' is the start of {len(matches)} keys: give more of it")

    @contextmanager
    def lock(self, key: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the right to make this key; yields False at once when `wait` is off and somebody else has it."""
        folder = self.home / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{key}.lock", wait=wait) as is_locked:
            yield is_locked


def file_fault(home: Path, key: str, path: Path, files: Mapping[str, FileFacts], *, anew: bool = False) -> str:
    """What is wrong with the listed files of an artifact, or ''. Files unchanged since they were hashed are not read.

    anew: read them all.
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
        write_whole(folder / f"{key}.json", json.dumps(stamps))
    except (OSError, UserError):
        return  # read-only, somebody else's, full or a folder: only a cache, without it files are hashed each time


def stamp_of(file: Path) -> list[int]:
    """The inode, time and size of a file, by which it is recognised as unchanged."""
    stat = file.stat()
    return [stat.st_ino, stat.st_mtime_ns, stat.st_size]


def _read_stamps(home: Path, key: str) -> Stamps:
    file = home / "verified" / f"{key}.json"
    try:
        if not 0 <= time.time() - file.stat().st_mtime <= BELIEVED_S:  # from the future: a clock was wrong
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # only a cache: without it, files are hashed again
    return dict(content) if isinstance(content, dict) else {}
