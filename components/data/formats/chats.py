"""File format of Chats artifacts: whole conversations and plain documents in Parquet parts, read in batches.

Every step between a source and the prompts (collecting, removing duplicates, mixing) reads and writes these rows, in
one shape. A directory holds `part-00000.parquet`, ... and, written last, `manifest.json` {"parts": [...], "num_rows":
n, "by_source": {source: rows}}. The rows that a step leaves out are listed in its `dropped.parquet`, with reason and
origin; kept + dropped = read.

Rows are flushed by size, so memory use is that of a row group, not of the data set; the bytes depend on the rows alone.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypedDict

import pyarrow
import pyarrow.parquet

from components.contract import Chats, UserError
from components.data.sources.turns import Message
from components.outside_json import JsonObject
from components.text import as_utf8

COLUMNS: Final = ("row_id", "source", "where", "language", "domain", "text", "messages", "tools", "num_chars")
DROPPED_COLUMNS: Final = ("reason", "source", "where", "excerpt")
MANIFEST: Final = "manifest.json"
DROPPED: Final = "dropped.parquet"
ROWS_PER_PART: Final = 50_000
EXCERPT_CHARACTERS: Final = 500
_COMPACT_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SORTED_JSON: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), sort_keys=True)
_REPEATED: Final = ("source", "language", "domain", "tools")
"""Columns whose values repeat; a dictionary of the other columns would be as large as their values."""
_GROUP_ROWS: Final = 4096
_GROUP_CHARACTERS: Final = 8 << 20


@dataclass(frozen=True)
class Chat:
    """One row: a conversation (`messages`) or a plain document (`text`), never both.

    row_id:    16 hex digits, a hash of the messages or the text alone: equal content has equal ids.
    source:    the name of its source in the mix. where: "file:line" in that source.
    language:  ISO 639-1, "" unknown. domain: the subject, "" unknown.
    messages:  {"role", "content"} and, where present, "reasoning_content", "tool_calls", "tool_call_id", "name"; role
        is system, user, assistant or tool.
    tools:     the offered tools as JSON, or "".
    num_chars: characters of the text, or of all content and reasoning.
    """

    row_id: str
    source: str
    where: str
    language: str = ""
    domain: str = ""
    text: str = ""
    messages: tuple[Message, ...] = ()
    tools: str = ""
    num_chars: int = 0

    @classmethod
    def of(
        cls,
        *,
        source: str,
        where: str,
        text: str = "",
        messages: Sequence[Message] = (),
        tools: str = "",
        language: str = "",
        domain: str = "",
    ) -> Self:
        """Make the row of this content, with its id and size. Exactly one of text and messages is not empty."""
        assert bool(text) != bool(messages), "a row is a document or a conversation"
        copies = tuple(dict(message) for message in messages)
        size = len(text) + sum(
            len(message.get("content") or "") + len(message.get("reasoning_content") or "") for message in copies
        )
        return cls(row_id_of(text, copies), source, where, language, domain, text, copies, tools, size)

    def as_row(self) -> JsonObject:
        """The stored columns."""
        return {**self.__dict__, "messages": messages_json(self.messages)}

    def as_text(self) -> str:
        """All contents, turn after turn, as one text (for language detection and duplicates)."""
        return self.text or "\n\n".join(message.get("content") or "" for message in self.messages)


def row_id_of(text: str, messages: Sequence[Message]) -> str:
    """16 hex digits of sha256 over the messages as JSON with sorted keys, or over the text."""
    content = _SORTED_JSON.encode(messages) if messages else text
    return hashlib.sha256(f"{'chat' if messages else 'text'}\0{content}".encode()).hexdigest()[:16]


def messages_json(messages: Sequence[Message]) -> str:
    """The value of the column `messages`; "" for none."""
    return _COMPACT_JSON.encode(messages) if messages else ""


def chats_schema() -> pyarrow.Schema:
    """The columns and their types; no value is null."""
    types = {name: pyarrow.int64() if name == "num_chars" else pyarrow.string() for name in COLUMNS}
    return pyarrow.schema([pyarrow.field(name, types[name], nullable=False) for name in COLUMNS])


class ChatsManifest(TypedDict):
    """The content of `manifest.json`. parts: file names in order. by_source: rows of each source."""

    parts: list[str]
    num_rows: int
    by_source: dict[str, int]


class ChatWriter:
    """Writes rows into the parts of a directory in order, and the manifest when it closes without an error.

    directory: parts and a manifest that an earlier, killed writer left there are removed.
    rows_per_part: the most rows of a part.
    """

    def __init__(self, directory: Path, rows_per_part: int = ROWS_PER_PART) -> None:
        assert rows_per_part > 0
        self.directory, self.rows_per_part = directory, rows_per_part
        self.parts: list[str] = []
        self.num_rows = 0
        self.by_source: Counter[str] = Counter()
        self._open: Any = None
        self._rows_in_part = 0
        self._pending: list[JsonObject] = []
        self._characters = 0
        directory.mkdir(parents=True, exist_ok=True)
        for stale in (*directory.glob("part-*.parquet"), directory / MANIFEST):
            stale.unlink(missing_ok=True)

    def write(self, chat: Chat) -> None:
        """Add one row."""
        self._pending.append(chat.as_row())
        self._characters += chat.num_chars
        if len(self._pending) >= _GROUP_ROWS or self._characters >= _GROUP_CHARACTERS:
            self._flush()

    def write_batch(self, batch: pyarrow.RecordBatch) -> None:
        """Add the rows of a batch that has all columns, as returned by `iter_batches`."""
        self._flush()
        self._write_rows(batch.select(list(COLUMNS)).cast(chats_schema()))

    def close(self) -> ChatsManifest:
        """Write the pending rows and the manifest, and return the manifest."""
        self._flush()
        self._close_part()
        manifest: ChatsManifest = {
            "parts": self.parts,
            "num_rows": self.num_rows,
            "by_source": dict(sorted(self.by_source.items())),
        }
        write_manifest(self.directory, manifest)
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        elif self._open is not None:
            self._open.close()

    def _flush(self) -> None:
        if self._pending:
            self._write_rows(pyarrow.RecordBatch.from_pylist(self._pending, schema=chats_schema()))
            self._pending, self._characters = [], 0

    def _write_rows(self, batch: pyarrow.RecordBatch) -> None:
        at = 0
        while at < batch.num_rows:
            if self._open is None:
                self.parts.append(f"part-{len(self.parts):05d}.parquet")
                file = self.directory / self.parts[-1]
                self._open = pyarrow.parquet.ParquetWriter(
                    file, chats_schema(), compression="zstd", use_dictionary=list(_REPEATED), write_statistics=False
                )
            piece = batch.slice(at, self.rows_per_part - self._rows_in_part)
            self._open.write_batch(piece)
            at += piece.num_rows
            self._rows_in_part += piece.num_rows
            self.num_rows += piece.num_rows
            if self._rows_in_part == self.rows_per_part:
                self._close_part()
        for counted in batch.column("source").value_counts().to_pylist():
            self.by_source[counted["values"]] += counted["counts"]

    def _close_part(self) -> None:
        if self._open is not None:
            self._open.close()
        self._open, self._rows_in_part = None, 0


class DroppedWriter:
    """Writes dropped rows to `dropped.parquet` and counts them by reason in `counts`; the file is always written."""

    def __init__(self, directory: Path, name: str = DROPPED) -> None:
        self.counts: Counter[str] = Counter()
        self._schema = pyarrow.schema([pyarrow.field(column, pyarrow.string(), False) for column in DROPPED_COLUMNS])
        self._pending: list[dict[str, str]] = []
        self._file = pyarrow.parquet.ParquetWriter(directory / name, self._schema, compression="zstd")

    def write(self, reason: str, source: str, location: str, excerpt: str) -> None:
        """Add one row; the excerpt is cut after 500 characters."""
        text = as_utf8(excerpt[:EXCERPT_CHARACTERS])
        self._pending.append({"reason": reason, "source": source, "where": location, "excerpt": text})
        self.counts[reason] += 1
        if len(self._pending) >= _GROUP_ROWS:
            self._flush()

    def copy(self, directory: Path) -> None:
        """Add all rows of another directory's `dropped.parquet`."""
        for row in read_dropped(directory):
            self.write(row["reason"], row["source"], row["where"], row["excerpt"])

    def close(self) -> dict[str, int]:
        """Write the pending rows; returns the number of rows by reason, the most frequent first."""
        self._flush()
        self._file.close()
        return most_first(self.counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _flush(self) -> None:
        if self._pending:
            self._file.write_batch(pyarrow.RecordBatch.from_pylist(self._pending, schema=self._schema))
            self._pending = []


def most_first(counts: Mapping[str, int]) -> dict[str, int]:
    """The counts, largest first, equal ones by name."""
    return dict(sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))


def read_manifest(chats: Chats | Path) -> ChatsManifest:
    """The manifest; raises UserError where the directory holds no Chats."""
    directory = chats if isinstance(chats, Path) else chats.path
    try:
        manifest: ChatsManifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory}: no {MANIFEST}: not a Chats artifact; make one with data.collect_chats") from None
    return manifest


def write_manifest(directory: Path, manifest: ChatsManifest) -> None:
    """Write `manifest.json`; with it the directory is complete."""
    (directory / MANIFEST).write_text(json.dumps(manifest, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def iter_batches(
    chats: Chats | Path, columns: Sequence[str] | None = None, batch_rows: int = _GROUP_ROWS
) -> Iterator[pyarrow.RecordBatch]:
    """The rows in their stored order as Arrow batches of at most `batch_rows` rows.

    columns: names in `COLUMNS`, all where None; others are never read from the disk.
    """
    directory = chats if isinstance(chats, Path) else chats.path
    for part in read_manifest(chats)["parts"]:
        yield from file_batches(directory / part, columns or COLUMNS, batch_rows)


def read_chats(chats: Chats | Path, columns: Sequence[str] | None = None) -> Iterator[Chat]:
    """The rows in their stored order; columns that are not in `columns` have their empty value."""
    for batch in iter_batches(chats, columns):
        yield from batch_chats(batch)


def batch_chats(batch: pyarrow.RecordBatch) -> Iterator[Chat]:
    """The rows of one batch."""
    empty = {"row_id": "", "source": "", "where": ""}
    for row in batch.to_pylist():
        if row.get("messages"):
            row["messages"] = tuple(json.loads(row["messages"]))
        else:
            row.pop("messages", None)
        yield Chat(**{**empty, **row})


def read_dropped(directory: Path, name: str = DROPPED) -> Iterator[dict[str, str]]:
    """The rows of `dropped.parquet`: {"reason", "source", "where", "excerpt"}."""
    for batch in file_batches(directory / name, DROPPED_COLUMNS):
        yield from batch.to_pylist()


def dropped_examples(directory: Path, number: int = 8) -> list[dict[str, str]]:
    """The first dropped row of each reason, for at most `number` reasons."""
    examples: dict[str, dict[str, str]] = {}
    for row in read_dropped(directory):
        examples.setdefault(row["reason"], row)
        if len(examples) == number:
            break
    return list(examples.values())


def file_batches(file: Path, columns: Sequence[str], batch_rows: int = _GROUP_ROWS) -> Iterator[pyarrow.RecordBatch]:
    """These columns of one Parquet file, in batches of at most `batch_rows` rows."""
    with pyarrow.parquet.ParquetFile(file) as parquet_file:
        yield from parquet_file.iter_batches(batch_size=batch_rows, columns=list(columns))
