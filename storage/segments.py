"""The directory of one table: a Parquet file for each key, and segments that compaction made of many.

    TABLE/KEY.parquet            the rows of one key, immutable
    TABLE/_segment-ID.parquet    the rows of many keys
    TABLE/_keys-ID.txt           which keys, one a line
    TABLE/_manifest.json         {"segments": [{"file", "rows"}], "keys": file name, "retired": [file names], digests}
    TABLE/_sums.txt              "sha256 of the file, of its footer, its name" of each Parquet file, one a line

Pages have checksums of their own, but a footer has none, and a missing file leaves no trace: the sums reveal both. A
file without a sum (a kill came between, or it is older) counts as whole. The manifest is swapped in by a rename,
so a reader sees the state before a compaction or the one after it. Retired files are those whose rows a segment holds;
they go when nobody reads. Three locks (flock: they end with their process) guard the files. `reading`: shared by
readers; a deletion takes it alone, and does not wait for it. `writing`: shared by appends, so that they go on side by
side; taken alone for the swap. `compacting`: one compactor a table.
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

REPAIR_HINT = "`draftsmith doctor --repair` makes the history anew from the artifacts, journals and promotions"
CHECKED_PARQUET = ParquetFileFormat(
    default_fragment_scan_options=ParquetFragmentScanOptions(page_checksum_verification=True)
)
"""The Parquet format whose pages are compared with their checksums as they are read."""


class DamagedHistory(UserError):
    """The history is not as it was written; it can be made anew."""


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
        damaged = _has_merged_keys(directory)
        if path.exists():  # a first compaction has ended meanwhile
            return read_manifest(directory)
        if damaged:
            raise DamagedHistory(f"{path}: is missing, and with it merged rows; {REPAIR_HINT}") from None
        return Manifest()
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedHistory(f"{path}: cannot be read ({type(error).__name__}); {REPAIR_HINT}") from error
    try:
        segments = tuple(Segment(**segment) for segment in content["segments"])
        manifest = Manifest(segments, content["keys"], tuple(content["retired"]), content.get("keys_sha256", ""))
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedHistory(f"{path}: another version of Draftsmith has written this; {REPAIR_HINT}") from error
    if content.keys() != {"segments", "keys", "retired"} and content.get("digest") != _digest_of(
        directory, manifest
    ):  # else older
        raise DamagedHistory(f"{path}: has changed since it was written; {REPAIR_HINT}")
    return manifest


def _digest_of(directory: Path, manifest: Manifest) -> str:
    return hashlib.sha256(json.dumps({"table": directory.name, **asdict(manifest)}).encode()).hexdigest()


def _has_merged_keys(directory: Path) -> bool:
    """Whether merged keys have no file of their own any more; a compaction that was killed leaves them theirs."""
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
    lines = [line for name, line in _sums(directory).items() if (directory / name).exists()]
    write_text(directory / "_sums.txt", "".join(f"{' '.join(line)}\n" for line in lines))


def segment_keys(directory: Path, manifest: Manifest) -> set[str]:
    """The keys whose rows are in segments. Raises DamagedHistory."""
    if not manifest.keys:
        return set()
    try:
        data = (directory / manifest.keys).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        fault = f"cannot be read ({error.strerror})"
        raise DamagedHistory(f"{directory / manifest.keys}: {fault}; {REPAIR_HINT}") from error
    if manifest.keys_sha256 not in ("", hashlib.sha256(data).hexdigest()):
        raise DamagedHistory(f"{directory / manifest.keys}: has changed since it was written; {REPAIR_HINT}")
    return set(data.decode("utf-8", "replace").split())


def fresh_keys(directory: Path, manifest: Manifest) -> list[str]:
    """The keys that have a file of their own that counts, oldest first."""
    retired = set(manifest.retired)
    with os.scandir(directory) as entries:
        files = [
            (entry.stat().st_mtime_ns, entry.name)
            for entry in entries
            if entry.name.endswith(".parquet") and entry.name[0] not in "_." and entry.name not in retired
        ]
    return [name.removesuffix(".parquet") for _, name in sorted(files)]


def is_known(directory: Path, key: str) -> bool:
    """Whether the rows of this key are there. Without the lock `writing` the answer may be outdated."""
    return (directory / f"{key}.parquet").is_file() or key in _merged_keys(directory)


def names_of(directory: Path, artifact_key: str) -> set[str]:
    """The keys of the files that hold rows of an artifact: its own, or its own with a dot and a session."""
    separate = {path.name.removesuffix(".parquet") for path in directory.glob(f"{artifact_key}*.parquet")}
    start = f"{artifact_key}."
    return {name for name in separate | _merged_keys(directory) if name == artifact_key or name.startswith(start)}


def _merged_keys(directory: Path) -> set[str]:
    while True:
        manifest = read_manifest(directory)
        try:
            return segment_keys(directory, manifest)
        except FileNotFoundError:  # a compaction has put another file of keys in its place meanwhile
            if read_manifest(directory) == manifest:
                raise DamagedHistory(f"{directory / manifest.keys}: is missing; {REPAIR_HINT}") from None


def files_of(directory: Path) -> list[str]:
    """The files that hold a table's rows now. They stay until the lock `reading` is released."""
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
    missing = [name for name in sums if not (directory / name).exists() and (name[0] != "_" or name in named)]
    merged = _merged_keys(directory) if missing or whole else set()
    for name in missing:
        if name not in manifest.retired and name.removesuffix(".parquet") not in merged:
            yield name, "is missing"
    for name in (Path(file).name for file in files_of(directory)):
        if name in sums:
            try:
                sums_now = _sum_of(directory / name, whole=whole)
            except OSError as error:
                yield name, f"cannot be read ({error.strerror})"
                continue
            if sums_now[1] != sums[name][1] or (whole and sums_now[0] != sums[name][0]):
                yield name, "is not as it was written"


def note_sum(directory: Path, name: str) -> None:
    """Append the sums of a file that was just written. Hold `writing`, since a compaction rewrites the sums."""
    with (directory / "_sums.txt").open("a", encoding="utf-8") as file:
        file.write(f"{' '.join((*_sum_of(directory / name, whole=True), name))}\n")


def _sums(directory: Path) -> dict[str, tuple[str, str, str]]:
    """Name -> (sha256, that of the footer, name). A line that was cut short is ignored."""
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
    """A new unique file name: _segment-1a2b….parquet."""
    return f"_{kind}-{uuid.uuid4().hex[:16]}{ending}"


def write_parquet(path: Path, rows: pa.Table) -> None:
    """Write a Parquet file whole or not at all."""
    part = part_of(path)
    pq.write_table(rows, part, compression="zstd", write_page_checksum=True)
    put_in_place(part, path)
    note_sum(path.parent, path.name)


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all."""
    part = part_of(path)
    part.write_text(text, encoding="utf-8")
    put_in_place(part, path)


def part_of(path: Path) -> Path:
    """The temporary path of a file while it is written."""
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")


def delete(directory: Path, names: Sequence[str]) -> None:
    """Delete files that nobody reads any more."""
    for name in names:
        (directory / name).unlink(missing_ok=True)


@contextmanager
def reading(history: Path) -> Iterator[None]:
    """Hold the shared lock of readers: no file that counts now is deleted until the end."""
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
    """Yield whether nobody reads now; if so, nobody begins to read until the end. It never waits."""
    with open_lock(history / ".reading.lock") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@contextmanager
def writing(directory: Path, *, alone: bool = False) -> Iterator[None]:
    """Hold the lock of writers: shared by appends, alone for as long as a compaction swaps the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    with _lock(directory / ".writing.lock", fcntl.LOCK_EX if alone else fcntl.LOCK_SH):
        yield


@contextmanager
def compacting(directory: Path) -> Iterator[None]:
    """Hold the right to change the segments."""
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
