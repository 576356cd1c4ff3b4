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

Compaction: many small Parquet files become few large ones, while others read and write, whenever it is killed.

Ten thousand files take seconds to scan, one file of the same rows takes milliseconds. A compaction writes a segment of
the files that count, then swaps the manifest, then deletes what nobody reads any more. A kill before the swap changes
nothing, a kill after it loses nothing, and the next compaction deletes what was left over. Segments grow by tiers
(O'Neil et al. 1996): a segment is rewritten only together with at least a quarter of its size in newer rows, so a row
is copied a few times in its life and a table has a handful of files.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.dataset import Dataset, ParquetFileFormat, ParquetFragmentScanOptions, dataset

from components.contract import UserError
from components.files import locked, sha256_of, write_whole, written_whole
from storage.history.schema import all_tables, reading_schema

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
    write_whole(
        directory / "_manifest.json", json.dumps({**asdict(manifest), "digest": _digest_of(directory, manifest)})
    )
    lines = [line for name, line in _sums(directory).items() if (directory / name).exists()]
    write_whole(directory / "_sums.txt", "".join(f"{' '.join(line)}\n" for line in lines))


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
    return sha256_of(file) if whole else "", footer


def new_name(kind: str, ending: str) -> str:
    """A new unique file name: _segment-1a2b….parquet."""
    return f"_{kind}-{uuid.uuid4().hex[:16]}{ending}"


def write_parquet(path: Path, rows: pa.Table) -> None:
    """Write a Parquet file whole or not at all."""
    with written_whole(path) as beside:
        pq.write_table(rows, beside, compression="zstd", write_page_checksum=True)
    note_sum(path.parent, path.name)


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
    with locked(lock, shared=True, mode="r"):  # a read-only disk lets it be locked, not be written
        yield


@contextmanager
def nobody_reads(history: Path) -> Iterator[bool]:
    """Yield whether nobody reads now; if so, nobody begins to read until the end. It never waits."""
    with locked(history / ".reading.lock", wait=False) as is_unread:
        yield is_unread


@contextmanager
def writing(directory: Path, *, alone: bool = False) -> Iterator[None]:
    """Hold the lock of writers: shared by appends, alone for as long as a compaction swaps the manifest."""
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / ".writing.lock", shared=not alone):
        yield


@contextmanager
def compacting(directory: Path) -> Iterator[None]:
    """Hold the right to change the segments."""
    with locked(directory / ".compacting.lock"):
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


COMPACT_AT = 300  # files of their own in a table: their scan takes a tenth of a second
TIER = 4  # a segment is merged when the rows newer than it are at least this part of it
ROWS_AT_ONCE = 122_880  # about what a compaction holds in memory, and the largest row group
GROUP_BYTES = 4 << 20  # of a row group before compression: a question about the newest rows reads the last few groups


def compact(history: Path, at_least: int = COMPACT_AT, *, whole: bool = False) -> dict[str, int]:
    """Merge the files of every table that has at least so many; table -> number of files merged.

    whole: all segments of such a table become one; with at_least 0 every table becomes one file.
    """
    merged: dict[str, int] = {}
    for table in all_tables():
        directory = history / table
        if directory.is_dir() and (count := _compact_table(history, directory, table, at_least, whole)):
            merged[table] = count
    return merged


def _compact_table(history: Path, directory: Path, table: str, at_least: int, whole: bool) -> int:
    with compacting(directory):
        old = read_manifest(directory)
        _sweep(history, directory, old)
        old = read_manifest(directory)
        new_keys = fresh_keys(directory, old)
        if len(new_keys) < at_least or len(new_keys) + len(old.segments) < 2:
            return 0
        for name, fault in faulty_files(directory):  # what is merged counts as whole from then on
            raise DamagedHistory(f"{directory / name}: {fault}; {REPAIR_HINT}")
        names = [f"{key}.parquet" for key in new_keys]
        rows = _open_files(directory, names, table).count_rows()
        untouched = list(old.segments)
        merged: list[Segment] = []
        while untouched and (whole or untouched[-1].rows <= TIER * rows):
            merged.insert(0, untouched.pop())
            rows += merged[0].rows
        sources = [*(segment.file for segment in merged), *names]
        segment = _write_segment(directory, table, _read_batches(directory, sources, table))
        assert segment.rows == rows, f"{table}: {segment.rows} rows written of {rows}"
        keys = _write_keys(directory, segment_keys(directory, old) | set(new_keys))
        replaced = [*sources, *([old.keys] if old.keys else [])]
        _swap(history, directory, old, Manifest((*untouched, segment), keys), replaced)
        return len(sources)


def _write_keys(directory: Path, keys: set[str]) -> str:
    """A new file of the keys in segments; it counts once a manifest names it."""
    name = new_name("keys", ".txt")
    write_whole(directory / name, "\n".join(sorted(keys)) + "\n")
    return name


def _swap(history: Path, directory: Path, old: Manifest, new: Manifest, replaced: list[str]) -> None:
    """From now on the new manifest counts; files it replaces are deleted, or retired while somebody reads."""
    retired = (*old.retired, *replaced)
    with writing(directory, alone=True):
        swap_manifest(directory, Manifest(new.segments, new.keys, retired))
    _sweep(history, directory, read_manifest(directory))


def _sweep(history: Path, directory: Path, manifest: Manifest) -> None:
    """Delete retired files if nobody reads, and what killed compactions and writers have left."""
    with writing(directory, alone=True):
        named = manifest.files()
        leftovers = [
            name
            for name in os.listdir(directory)
            if (name.startswith(("_segment-", "_keys-")) and name not in named) or name.endswith(".tmp")
        ]
        delete(directory, leftovers)  # no manifest ever named them, and no writer is at work
    if not manifest.retired:
        return
    with nobody_reads(history) as is_unread:
        if is_unread:
            with writing(directory, alone=True):
                delete(directory, manifest.retired)
                swap_manifest(directory, Manifest(manifest.segments, manifest.keys))


def _read_batches(directory: Path, names: Iterable[str], table: str) -> Iterator[pa.Table]:
    """The rows of some files under the present schema, about ROWS_AT_ONCE at a time."""
    pending: list[pa.RecordBatch] = []
    for batch in _open_files(directory, names, table).to_batches(batch_size=ROWS_AT_ONCE, fragment_readahead=16):
        pending.append(batch)
        if sum(map(len, pending)) >= ROWS_AT_ONCE:
            yield pa.Table.from_batches(pending)
            pending = []
    if pending:
        yield pa.Table.from_batches(pending)


def _open_files(directory: Path, names: Iterable[str], table: str) -> Dataset:
    files = [str(directory / name) for name in names]
    return dataset(files, schema=reading_schema(table), format=CHECKED_PARQUET)


def _write_segment(directory: Path, table: str, batches: Iterable[pa.Table]) -> Segment:
    """A new segment; it counts once a manifest names it."""
    name = new_name("segment", ".parquet")
    schema, rows = reading_schema(table), 0
    with (
        written_whole(directory / name) as beside,
        pq.ParquetWriter(beside, schema, compression="zstd", write_page_checksum=True) as writer,
    ):
        for batch in batches:
            fitting = GROUP_BYTES * max(1, len(batch)) // max(1, batch.nbytes)
            writer.write_table(batch, row_group_size=min(ROWS_AT_ONCE, max(1024, fitting)))
            rows += len(batch)
    note_sum(directory, name)
    return Segment(name, rows)
