"""What the directory of one table holds: a Parquet file for each key, and segments that compaction made of many.

    TABLE/KEY.parquet            the rows of one key, immutable
    TABLE/_segment-ID.parquet    the rows of many keys
    TABLE/_keys-ID.txt           which keys, one a line
    TABLE/_manifest.json         {"segments": [{"file", "rows"}], "keys": file name, "retired": [file names], digests}
    TABLE/_sums.txt              "sha256 of the file, of its footer, its name" of each Parquet file, one a line

Pages have checksums of their own, but a footer has none, and a file that is gone leaves no trace: that is what the sums
are for. A file without one (a kill came between, or it is older) is believed. The manifest is swapped in by a rename,
so a reader sees the state before a compaction or the one after it. Retired files are those whose rows a segment holds;
they go when nobody reads. Three locks (flock: they end with their process) keep the promises. `reading`: shared by
readers, taken by whoever deletes, never waited for. `writing`: shared by appends, so that they go on side by side;
alone for the swap. `compacting`: one compactor a table.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import ParquetFileFormat, ParquetFragmentScanOptions

from components.contract import UserError
from storage.locks import open_lock
from storage.whole_files import put_in_place

HOW_TO_MEND = "`draftsmith doctor --repair` makes the history anew from the artifacts, journals and promotions"
CHECKED_PARQUET = ParquetFileFormat(
    default_fragment_scan_options=ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""Parquet whose pages are held against their checksums as they are read."""


class DamagedHistory(UserError):
    """The history says something else than was written into it; it can be made anew."""


@dataclass(frozen=True)
class Segment:
    """A file of many keys. rows: how many."""

    file: str
    rows: int


@dataclass(frozen=True)
class Manifest:
    """Which files count. keys: the file that names the keys in the segments, "" for none, and its sha256."""

    segments: tuple[Segment, ...] = ()
    keys: str = ""
    retired: tuple[str, ...] = ()
    keys_sha256: str = ""

    def files(self) -> set[str]:
        """Every file that the manifest names."""
        return {segment.file for segment in self.segments} | {self.keys} | set(self.retired)


def read_manifest(directory: Path) -> Manifest:
    """The present manifest; an empty one where nothing was compacted yet.

    Raises:
        DamagedHistory: it is not as it was written, or another version of Draftsmith has written it.
    """
    path = directory / "_manifest.json"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        damaged = _was_compacted(directory)
        if path.exists():  # a first compaction has ended meanwhile
            return read_manifest(directory)
        if damaged:
            raise DamagedHistory(f"{path}: is missing, and with it merged rows; {HOW_TO_MEND}") from None
        return Manifest()
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedHistory(f"{path}: cannot be read ({type(error).__name__}); {HOW_TO_MEND}") from error
    try:
        segments = tuple(Segment(**segment) for segment in content["segments"])
        found = Manifest(segments, content["keys"], tuple(content["retired"]), content.get("keys_sha256", ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedHistory(f"{path}: another version of Draftsmith has written this; {HOW_TO_MEND}") from error
    if content.keys() != {"segments", "keys", "retired"} and content.get("digest") != _digest_of(
        directory, found
    ):  # else older
        raise DamagedHistory(f"{path}: has changed since it was written; {HOW_TO_MEND}")
    return found


def _digest_of(directory: Path, manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps({"table": directory.name, **asdict(manifest)}).encode()).hexdigest()


def _was_compacted(directory: Path) -> bool:
    """Keys were merged into segments and have no file of their own any more; a compaction killed before its end has
    left them theirs."""
    files = [file for file in directory.glob("_keys-*.txt") if file.is_file()]
    merged = {key for file in files for key in file.read_text(encoding="utf-8", errors="replace").split()}
    return any(not (directory / f"{key}.parquet").is_file() for key in merged)


def swap_manifest(directory: Path, manifest: Manifest) -> None:
    """Make this the manifest; the one step of a compaction that readers notice. Hold `writing` alone."""
    sha256 = hashlib.sha256((directory / manifest.keys).read_bytes()).hexdigest() if manifest.keys else ""
    manifest = replace(manifest, keys_sha256=sha256)
    write_text(
        directory / "_manifest.json", json.dumps({**asdict(manifest), "digest": _digest_of(directory, manifest)})
    )
    kept = [line for name, line in _sums(directory).items() if (directory / name).exists()]
    write_text(directory / "_sums.txt", "".join(f"{' '.join(line)}\n" for line in kept))


def segment_keys(directory: Path, manifest: Manifest) -> set[str]:
    """The keys whose rows are in segments. Raises DamagedHistory."""
    if not manifest.keys:
        return set()
    try:
        data = (directory / manifest.keys).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        why = f"cannot be read ({error.strerror})"
        raise DamagedHistory(f"{directory / manifest.keys}: {why}; {HOW_TO_MEND}") from error
    if manifest.keys_sha256 not in ("", hashlib.sha256(data).hexdigest()):
        raise DamagedHistory(f"{directory / manifest.keys}: has changed since it was written; {HOW_TO_MEND}")
    return set(data.decode("utf-8", "replace").split())


def fresh_keys(directory: Path, manifest: Manifest) -> list[str]:
    """The keys that have a file of their own that counts, oldest first."""
    retired = set(manifest.retired)
    with os.scandir(directory) as entries:
        found = [
            (entry.stat().st_mtime_ns, entry.name)
            for entry in entries
            if entry.name.endswith(".parquet") and entry.name[0] not in "_." and entry.name not in retired
        ]
    return [name.removesuffix(".parquet") for _, name in sorted(found)]


def is_known(directory: Path, key: str) -> bool:
    """The rows of this key are there. Without the lock `writing` the answer may be old."""
    return (directory / f"{key}.parquet").is_file() or key in _keys_now(directory)


def names_of(directory: Path, artifact_key: str) -> set[str]:
    """The keys of the files that hold rows of an artifact: its own, or its own with a dot and a session."""
    own = {path.name.removesuffix(".parquet") for path in directory.glob(f"{artifact_key}*.parquet")}
    start = f"{artifact_key}."
    return {name for name in own | _keys_now(directory) if name == artifact_key or name.startswith(start)}


def _keys_now(directory: Path) -> set[str]:
    while True:
        manifest = read_manifest(directory)
        try:
            return segment_keys(directory, manifest)
        except FileNotFoundError:  # a compaction has put another file of keys in its place meanwhile
            if read_manifest(directory) == manifest:
                raise DamagedHistory(f"{directory / manifest.keys}: is missing; {HOW_TO_MEND}") from None


def files_of(directory: Path) -> list[str]:
    """The files that hold a table's rows now. They stay until the lock `reading` is let go."""
    if not directory.is_dir():
        return []
    manifest = read_manifest(directory)
    names = [segment.file for segment in manifest.segments]
    return [str(directory / name) for name in [*names, *(f"{key}.parquet" for key in fresh_keys(directory, manifest))]]


def faulty_files(directory: Path, *, whole: bool = False) -> Iterator[tuple[str, str]]:
    """(name, what is wrong) of each Parquet file that is gone or not as it was written. Hold `reading`.

    whole: read every byte; without it the footers alone, since pages are held against their checksums when they are
    read.
    """
    sums = _sums(directory) if directory.is_dir() else {}
    if not sums and not whole:
        return
    manifest = read_manifest(directory)
    named = {segment.file for segment in manifest.segments}
    gone = [name for name in sums if not (directory / name).exists() and (name[0] != "_" or name in named)]
    merged = _keys_now(directory) if gone or whole else set()
    for name in gone:
        if name not in manifest.retired and name.removesuffix(".parquet") not in merged:
            yield name, "is missing"
    for name in (Path(file).name for file in files_of(directory)):
        if name in sums:
            try:
                found = _sum_of(directory / name, whole=whole)
            except OSError as error:
                yield name, f"cannot be read ({error.strerror})"
                continue
            if found[1] != sums[name][1] or (whole and found[0] != sums[name][0]):
                yield name, "is not as it was written"


def note_sum(directory: Path, name: str) -> None:
    """Note what a file that was just written is to be. Hold `writing`, so that no compaction does it at once."""
    with (directory / "_sums.txt").open("a", encoding="utf-8") as file:
        file.write(f"{' '.join((*_sum_of(directory / name, whole=True), name))}\n")


def _sums(directory: Path) -> dict[str, tuple[str, str, str]]:
    """Name -> (sha256, that of the footer, name). A line that was cut short says nothing."""
    try:
        text = (directory / "_sums.txt").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    lines = [line.split(" ") for line in text.splitlines()]
    whole = [line for line in lines if len(line) == 3 and len(line[0]) == len(line[1]) == 64]
    return {line[2]: (line[0], line[1], line[2]) for line in whole}


def _sum_of(file: Path, *, whole: bool) -> tuple[str, str]:
    """(sha256 of a file, sha256 of its footer, which is its end)."""
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - 8))
        length = int.from_bytes(stream.read(4), "little") + 8
        stream.seek(max(0, size - length))
        footer = hashlib.sha256(stream.read(length)).hexdigest()
        stream.seek(0)
        return hashlib.file_digest(stream, "sha256").hexdigest() if whole else "", footer


def new_name(kind: str, ending: str) -> str:
    """A file name that nobody has had before: _segment-1a2b….parquet."""
    return f"_{kind}-{uuid.uuid4().hex[:16]}{ending}"


def write_parquet(path: Path, rows: pa.Table) -> None:
    """A whole file or none."""
    part = part_of(path)
    pq.write_table(rows, part, compression="zstd", write_page_checksum=True)
    put_in_place(part, path)
    note_sum(path.parent, path.name)


def write_text(path: Path, text: str) -> None:
    """A whole file or none."""
    part = part_of(path)
    part.write_text(text, encoding="utf-8")
    put_in_place(part, path)


def part_of(path: Path) -> Path:
    """Where a file is written before it has its name."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def delete(directory: Path, names: Sequence[str]) -> None:
    """Delete files that nobody reads any more."""
    for name in names:
        (directory / name).unlink(missing_ok=True)


@contextmanager
def reading(history: Path) -> Iterator[None]:
    """While a question is asked no file that counts at its beginning is deleted."""
    lock = history / ".reading.lock"
    try:
        history.mkdir(parents=True, exist_ok=True)
        lock.touch()
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT):
            raise
        if not lock.is_file():  # who cannot make it here cannot delete anything here either
            yield
            return
    with open_lock(lock, "r") as file:  # a read-only disk lets it be locked, not be written
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextmanager
def nobody_reads(history: Path) -> Iterator[bool]:
    """Whether nobody reads now; if so, nobody begins to until the end. Never waits."""
    with open_lock(history / ".reading.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def writing(directory: Path, *, alone: bool = False) -> Iterator[None]:
    """Appends share it; a compaction takes it alone, for as long as it takes to swap the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory / ".writing.lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        yield


@contextmanager
def compacting(directory: Path) -> Iterator[None]:
    """The right to change what is in segments."""
    with _lock(directory / ".compacting.lock", fcntl.LOCK_EX):
        yield


def empty(history: Path) -> None:
    """Delete every file of a history but its locks, on which others may be waiting."""
    for directory in [path for path in history.glob("*") if path.is_dir()]:
        with compacting(directory), writing(directory, alone=True):
            _delete_all(directory)
    _delete_all(history)


def _delete_all(directory: Path) -> None:
    delete(directory, [path.name for path in directory.glob("*") if path.is_file() and path.suffix != ".lock"])
    for folder in [path for path in directory.glob("*.*") if path.is_dir()]:  # where a file belongs
        shutil.rmtree(folder)


@contextmanager
def _lock(path: Path, how: int) -> Iterator[None]:
    with open_lock(path) as file:
        fcntl.flock(file, how)
        yield
