"""One shard of data.collect_chats: reads files of one source into unified rows, and records why others are dropped.

A shard depends on its files and settings alone and is written atomically, so it may run in any process on any machine,
and a killed step resumes after its finished shards. For every file, kept + dropped = read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.contract import ReportProgress, UserError
from components.data.chat_shapes import read_content
from components.data.chat_source_files import SourceFile, UnusableFile
from components.data.chat_sources import ChatSource
from components.data.chat_turns import BadRow, Message, field_names, valid_text
from components.data.chats import EXCERPT_CHARACTERS, Chat, ChatWriter, DroppedWriter
from components.data.cleaning import Cleaning, drop_reason
from components.data.hub_rows import hub_rows
from components.data.row_files import read_rows
from components.data.row_streams import is_url

COUNTS: Final = "counts.json"
_ROWS_PER_PROGRESS: Final = 2000
_BROKEN_SHOWN: Final = 5
_REASONS: Final = (
    ("nested too deeply", "nested_too_deeply"),
    ("longer than", "too_long_a_row"),
    ("not UTF-8", "not_utf8"),
    ("UTF-16", "not_utf8"),
    ("not valid JSON", "not_json"),
    ("NaN is not JSON", "not_json"),
    ("Infinity is not JSON", "not_json"),
    ("-Infinity is not JSON", "not_json"),
    ("the list breaks off", "not_json"),
    ("text after the end", "not_json"),
    ("not CSV", "not_csv"),
    ("cells under", "not_csv"),
)
"""Part of an error message of the readers in row_files.py -> the reason under which the row is counted."""


@dataclass(frozen=True)
class ChatShard:
    """The inputs of one shard, and its output folder.

    files: read in this order; empty for a source that `datasets` streams. unusable: files that cannot be read.
    """

    folder: Path
    source: ChatSource
    files: tuple[SourceFile, ...]
    unusable: tuple[UnusableFile, ...]
    clean: Cleaning
    redact: bool

    @property
    def file(self) -> Path:
        """The counts; the folder appears with all of its files at once."""
        return self.folder / COUNTS


def collect_shard(shard: ChatShard, report_progress: ReportProgress) -> None:
    """Write the shard's parts, `dropped.parquet` and `counts.json` under its folder."""
    beside = shard.folder.with_name(f".{shard.folder.name}.{uuid.uuid4().hex}.tmp")
    beside.mkdir(parents=True)
    try:
        counts = _ShardCollector(shard, beside, report_progress).run()
        (beside / COUNTS).write_text(json.dumps(counts, ensure_ascii=False), encoding="utf-8")
        try:
            os.replace(beside, shard.folder)
        except OSError:
            if not shard.file.is_file():  # else another worker was first, with the same bytes
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _ShardCollector:
    """The state of one shard while it is read."""

    def __init__(self, shard: ChatShard, folder: Path, report_progress: ReportProgress) -> None:
        self.shard, self.folder, self.report_progress = shard, folder, report_progress
        self.source = shard.source
        self.name = shard.source.label
        self.counts: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {name: Counter() for name in ("languages", "domains", "shapes", "redacted")}
        self.bytes_before, self.characters_here = 0, 0
        self.total = max(1, sum(file.size for file in shard.files))
        self.broken: list[str] = []

    def run(self) -> dict[str, Any]:
        """Read all files; returns the counts."""
        if self.shard.redact:
            from components.data.redaction import require_redaction

            require_redaction()
        with ChatWriter(self.folder) as self.chats, DroppedWriter(self.folder) as self.dropped:
            for unusable in self.shard.unusable:
                self._drop(unusable.reason, unusable.name, unusable.message)
                self._record_broken(unusable.name, unusable.message)
            if self.source.hub is not None:
                self._collect_rows(self.name, hub_rows(self.source.hub))
            for file in self.shard.files if self.source.hub is None else ():
                if not self._collect_file(file):
                    break
                self.bytes_before, self.characters_here = self.bytes_before + file.size, 0
        return {
            **{name: self.counts[name] for name in ("read", "kept", "characters", "repaired", "stopped", "broken")},
            "dropped": dict(self.dropped.counts),
            "parts": self.chats.parts,
            "first_broken": self.broken,
            **{name: dict(counter) for name, counter in self.by.items()},
        }

    def _collect_file(self, file: SourceFile) -> bool:
        """All rows of a file; False where max_rows is reached."""
        location = file.location if is_url(file.location) else Path(file.location)

        def set_aside(_: str, line: int, message: str, row: str) -> None:
            self._drop(_reason_of(message), f"{file.name}:{line}", f"{message}: {row}" if row else message)

        source = self.source
        rows = read_rows(location, set_aside, kind=source.kind, documents=source.documents, span=file.span)
        try:
            return self._collect_rows(file.name, rows)
        except UserError as error:  # the file breaks off: rows read before are kept, the rest is reported
            message = str(error).removeprefix("source: ").removeprefix(file.location).lstrip(": ")
            reason = _reason_of(message)
            self._drop("unreadable_file" if reason == "unreadable" else reason, file.name, message)
            self._record_broken(file.name, message)
            return True

    def _collect_rows(self, name: str, rows: Iterator[tuple[int, Any]]) -> bool:
        for line, row in rows:
            if self.source.max_rows is not None and self.counts["read"] >= self.source.max_rows:
                self.counts["stopped"] = 1
                return False
            try:
                self._collect_row(row, f"{name}:{line}")
            except BadRow as error:
                self._drop(error.reason, f"{name}:{line}", f"{error}: {_excerpt(row)}")
            if self.counts["read"] % _ROWS_PER_PROGRESS == 0:
                self.report_progress(min(0.99, (self.bytes_before + self.characters_here) / self.total))
        return True

    def _collect_row(self, row: Any, location: str) -> None:
        """Write a row, or drop it with a reason; raises BadRow for a row without content."""
        if self.source.chat_preset is not None:
            _require_any_field(row, self.source.chat_preset.fields)
        content = read_content(row, self.source.fields)
        text, messages = content.text, content.messages
        if self.shard.clean.repair:
            text, messages = self._repaired(text, messages)
        if self.shard.redact:
            text, messages = self._redacted(text, messages)
        if not (text or messages):  # repair removed all of the text
            raise BadRow("text is empty", "empty_text")
        chat = Chat.of(source=self.name, where=location, text=text, messages=messages, tools=content.tools)
        self.characters_here += chat.num_chars
        if (reason := drop_reason(chat, self.shard.clean)) is not None:
            self._drop(reason, location, chat.as_text())
            return
        chat = dataclasses.replace(chat, language=self._language(chat), domain=self._domain(chat, row))
        self.chats.write(chat)
        self.counts.update(read=1, kept=1, characters=chat.num_chars)
        self.by["languages"][chat.language] += 1
        self.by["domains"][chat.domain] += 1
        self.by["shapes"][content.shape] += 1

    def _drop(self, reason: str, location: str, excerpt: str) -> None:
        if self.shard.redact:
            from components.data.redaction import redact

            excerpt, _ = redact(excerpt[: 2 * EXCERPT_CHARACTERS])  # also redact data that crosses the cut
        self.dropped.write(reason, self.name, location, excerpt)
        self.counts["read"] += 1

    def _record_broken(self, name: str, message: str) -> None:
        """Count a file that was not read to its end, and store the messages of the first few."""
        self.counts["broken"] += 1
        if len(self.broken) < _BROKEN_SHOWN:
            self.broken.append(f"{name}: {message}")

    def _language(self, chat: Chat) -> str:
        from components.data.language import language_of, language_of_messages

        preset = self.source.chat_preset
        language = self.source.language or (preset.language if preset is not None else "")
        return language or (language_of_messages(chat.messages) if chat.messages else language_of(chat.text))

    def _domain(self, chat: Chat, row: Any) -> str:
        from components.data.language import domain_of

        preset = self.source.chat_preset
        field = self.source.domain_field or (preset.domain_field if preset is not None else "")
        if field and isinstance(row, Mapping) and row.get(field):
            return valid_text(row[field], field)
        return self.source.domain or domain_of(chat.as_text())

    def _repaired(self, text: str, messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
        from components.data.cleaning_encoding import repair

        fields = ("content", "reasoning_content")
        repaired = repair(text), tuple(_with_changes(message, fields, repair) for message in messages)
        self.counts["repaired"] += repaired != (text, messages)
        return repaired

    def _redacted(self, text: str, messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
        from components.data.redaction import redact

        def redact_text(text: str) -> str:
            clear, counts = redact(text)
            self.by["redacted"].update(counts)
            return clear

        fields = ("content", "reasoning_content", "tool_calls")
        return redact_text(text), tuple(_with_changes(message, fields, redact_text) for message in messages)


def _with_changes(value: Any, fields: tuple[str, ...], change: Any) -> Any:
    """A message with the texts in these fields changed, including those inside tool calls."""
    return {name: _changed(inner, change) if name in fields else inner for name, inner in value.items()}


def _changed(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    if isinstance(value, Mapping):
        return {name: _changed(inner, change) for name, inner in value.items()}
    return value


def _require_any_field(row: Any, fields: tuple[str, ...]) -> None:
    if isinstance(row, Mapping) and not any(row.get(field) is not None for field in fields):
        names = " or ".join(fields)
        raise BadRow(f"no field {names}, which this preset's rows have (has: {field_names(row)})", "unknown_shape")


def _reason_of(message: str) -> str:
    return next((reason for part, reason in _REASONS if part in message[:300]), "unreadable")


def _excerpt(row: Any) -> str:
    """The beginning of a row as JSON, a little longer than is shown so that redaction sees past the cut."""
    text = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(row):
            text += piece[: 2 * EXCERPT_CHARACTERS]
            if len(text) >= 2 * EXCERPT_CHARACTERS:
                break
    except (RecursionError, ValueError, TypeError):  # too deep, or keys that are no text: what came before is enough
        pass
    return text
