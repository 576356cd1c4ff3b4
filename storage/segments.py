"""What the directory of one table holds: a Parquet file for each key, and segments that compaction made of many.

    TABLE/KEY.parquet            the rows of one key, immutable
    TABLE/_segment-ID.parquet    the rows of many keys
    TABLE/_keys-ID.txt           which keys, one a line
    TABLE/_manifest.json         {"segments": [{"file", "rows"}], "keys": file name, "retired": [file names]}
    TABLE/_schema.parquet        no rows, the present columns

The manifest is swapped in by a rename, so a reader sees the state before a compaction or the one after it. Retired
files are those whose rows a segment holds; they go when nobody reads. Three locks (flock:
they end with their process) keep the promises. `reading`: shared by readers, taken by whoever deletes, never waited
for. `writing`: shared by appends, so that they go on side by side; alone for the swap. `compacting`: one compactor a
table.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from components.contract import UserError
from storage.schema import schema_of

SCHEMA_FILE = "_schema.parquet"
HOW_TO_MEND = "`draftsmith doctor --repair` makes the history anew from the artifacts, journals and promotions"


@dataclass(frozen=True)
class Segment:
    """A file of many keys. rows: how many."""

    file: str
    rows: int


@dataclass(frozen=True)
class Manifest:
    """Which files count. keys: the file that names the keys in the segments, "" for none."""

    segments: tuple[Segment, ...] = ()
    keys: str = ""
    retired: tuple[str, ...] = ()

    def files(self) -> set[str]:
        """Every file that the manifest names."""
        return {segment.file for segment in self.segments} | {self.keys} | set(self.retired)


def read_manifest(directory: Path) -> Manifest:
    """The present manifest; an empty one where nothing was compacted yet.

    Raises:
        UserError: another version of Draftsmith has written it.
    """
    path = directory / "_manifest.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        damaged = _was_compacted(directory)
        if path.exists():  # a first compaction has ended meanwhile
            return read_manifest(directory)
        if damaged:
            raise UserError(f"{path}: is missing, and with it merged rows; {HOW_TO_MEND}") from None
        return Manifest()
    except ValueError as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}); {HOW_TO_MEND}") from error
    try:
        segments = tuple(Segment(**segment) for segment in content["segments"])
        return Manifest(segments, content["keys"], tuple(content["retired"]))
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: another version of Draftsmith has written this; {HOW_TO_MEND}") from error


def _was_compacted(directory: Path) -> bool:
    """Keys were merged into segments and have no file of their own any more; a compaction killed before its end has
    left them theirs."""
    merged = {key for file in directory.glob("_keys-*.txt") for key in file.read_text(encoding="utf-8").split()}
    return any(not (directory / f"{key}.parquet").is_file() for key in merged)


def swap_manifest(directory: Path, manifest: Manifest) -> None:
    """Make this the manifest; the one step of a compaction that readers notice. Hold `writing` alone."""
    write_text(directory / "_manifest.json", json.dumps(asdict(manifest)))


def segment_keys(directory: Path, manifest: Manifest) -> set[str]:
    """The keys whose rows are in segments."""
    return set((directory / manifest.keys).read_text(encoding="utf-8").split()) if manifest.keys else set()


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
                raise


def files_of(directory: Path) -> list[str]:
    """The files that hold a table's rows now. They stay until the lock `reading` is let go."""
    manifest = read_manifest(directory)
    names = [SCHEMA_FILE, *(segment.file for segment in manifest.segments)]
    return [str(directory / name) for name in [*names, *(f"{key}.parquet" for key in fresh_keys(directory, manifest))]]


def seed(directory: Path, table: str) -> None:
    """An empty typed file, so that views work before the first row."""
    directory.mkdir(parents=True, exist_ok=True)
    path, schema = directory / SCHEMA_FILE, schema_of(table)
    if not path.is_file() or not pq.read_schema(path).equals(schema):
        with writing(directory):
            write_parquet(path, schema.empty_table())


def new_name(kind: str, ending: str) -> str:
    """A file name that nobody has had before: _segment-1a2b….parquet."""
    return f"_{kind}-{uuid.uuid4().hex[:16]}{ending}"


def write_parquet(path: Path, rows: pa.Table) -> None:
    """A whole file or none."""
    part = part_of(path)
    pq.write_table(rows, part, compression="zstd", write_page_checksum=True)
    os.replace(part, path)


def write_text(path: Path, text: str) -> None:
    """A whole file or none."""
    part = part_of(path)
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


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
    history.mkdir(parents=True, exist_ok=True)
    with _lock(history / ".reading.lock", fcntl.LOCK_SH):
        yield


@contextmanager
def nobody_reads(history: Path) -> Iterator[bool]:
    """Whether nobody reads now; if so, nobody begins to until the end. Never waits."""
    with (history / ".reading.lock").open("a") as file:
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


@contextmanager
def _lock(path: Path, how: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield
