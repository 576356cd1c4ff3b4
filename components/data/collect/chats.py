"""Step `data.collect_chats`: reads any mix of sources, cleans the rows, and unifies them into whole conversations.

Work is cut into shards of files by name and size alone, so the result is the same for any number of workers. A shard
depends on its files and settings alone and is written atomically: it may run in any process on any machine, and a
killed step resumes after its finished shards. Rows stay in the order of the sources, their files and lines. For every
file, kept + dropped = read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from components.contract import Chats, Context, ReportProgress, UserError
from components.data.cleaning.encoding import repair
from components.data.cleaning.language import domain_of, language_of, language_of_messages
from components.data.cleaning.redaction import redact, require_redaction
from components.data.cleaning.rules import drop_reason
from components.data.formats.chats import (
    EXCERPT_CHARACTERS,
    Chat,
    ChatWriter,
    DroppedWriter,
    most_first,
    read_dropped,
    write_manifest,
)
from components.data.settings import ChatSource, Cleaning, duplicate_name
from components.data.sources.addresses import is_url
from components.data.sources.bad_rows import BadFile, BadRow
from components.data.sources.files import read_rows
from components.data.sources.listing import SourceFile, UnusableFile, list_files
from components.data.sources.presets import ChatPreset
from components.data.sources.shapes import read_content
from components.data.sources.tables import hub_rows
from components.data.sources.turns import Message, field_names, valid_text
from components.outside_json import JsonObject

_SHARD_BYTES: Final = 32 << 20
_SHARD_FILES: Final = 256
COUNTS: Final = "counts.json"
_BY: Final = ("languages", "domains", "shapes", "redacted")
_ROWS_PER_PROGRESS: Final = 2000
_BROKEN_SHOWN: Final = 5


def collect_chats(*, sources: list[ChatSource], clean: Cleaning, redact: bool, ctx: Context) -> Chats:
    """The step `data.collect_chats`; its settings are explained in components/data/steps.py."""
    shards = _plan_shards(sources, clean, redact, ctx)
    for _ in ctx.map(collect_shard, shards, what="shards of files"):
        pass
    counts = [Counts.read(shard.file) for shard in shards]
    by_source: dict[str, Counts] = {}
    folders: dict[str, Path] = {}
    total = Counts()
    for shard, counted in zip(shards, counts, strict=True):
        counted.numbers["files"] = sum(file.span is None or file.span.start == 0 for file in shard.files)
        by_source.setdefault(shard.source.label, Counts()).add(counted)
        total.add(counted)
        if counted.dropped:
            folders.setdefault(shard.source.label, shard.folder)
    for name, of_source in by_source.items():
        _report_source(name, of_source, folders.get(name), ctx)
    presets = {shard.source.label: shard.source.chat_preset for shard in shards}
    dropped = _join_parts(ctx, shards, counts, by_source)
    num_read, num_kept = total.numbers["read"], total.numbers["kept"]
    assert num_kept + sum(dropped.values()) == num_read, "a row was lost"
    return Chats.of_step(
        ctx,
        {
            "num_rows": num_kept,
            "num_read": num_read,
            "num_dropped": num_read - num_kept,
            "num_characters": total.numbers["characters"],
            "num_repaired": total.numbers["repaired"],
            "dropped": dropped,
            "by_source": {name: _source_facts(counts, presets[name]) for name, counts in by_source.items()},
            **{name: most_first(total.by[name]) for name in _BY},
        },
    )


def _plan_shards(sources: Sequence[ChatSource], clean: Cleaning, redact: bool, ctx: Context) -> list[ChatShard]:
    """Shards of about 32 MiB of files or lines; a source that is streamed or has a row limit is one shard."""
    if twice := duplicate_name(sources):
        raise UserError(f"sources: two are called {twice!r}; give each a name")
    shards: list[ChatShard] = []
    for source in sources:
        listing = list_files(source)
        if listing.num_others:
            ctx.note(f"{source.label}: {listing.num_others} files of other kinds left alone")
        groups: list[list[SourceFile]] = [[]]
        size = 0
        undivided = source.max_rows is not None or source.hub is not None
        pieces = listing.files
        if not undivided:
            pieces = [piece for file in pieces for piece in file.cut(source.kind, _SHARD_BYTES)]
        for file in pieces:
            full = groups[-1] and (size + file.size > _SHARD_BYTES or len(groups[-1]) >= _SHARD_FILES)
            if full and not undivided:
                groups.append([])
                size = 0
            groups[-1].append(file)
            size += file.size
        for number, group in enumerate(groups):
            unusable = tuple(listing.unusable) if number == 0 else ()
            folder = ctx.scratch / f"shard-{len(shards):05d}"
            shards.append(ChatShard(folder, source, tuple(group), unusable, clean, redact))
    return shards


@dataclass
class Counts:
    """The counts of a shard, which its `counts.json` holds, or of several shards.

    numbers: rows read, kept and repaired, characters, files; stopped: shards that reached max_rows; broken: files that
        were not read to their end, of which first_broken has the first messages.
    dropped: rows by reason. by: kept rows by languages, domains and shapes, and redacted values by kind.
    """

    numbers: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    by: dict[str, Counter[str]] = field(default_factory=lambda: {name: Counter() for name in _BY})
    first_broken: list[str] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> Self:
        """The counts of a shard."""
        stored = json.loads(file.read_text(encoding="utf-8"))
        counters = {"numbers": Counter(stored["numbers"]), "dropped": Counter(stored["dropped"])}
        return cls(**{**stored, **counters, "by": {name: Counter(stored["by"][name]) for name in _BY}})

    def add(self, other: Counts) -> None:
        """Add the counts of a shard; its parts are its own."""
        self.numbers.update(other.numbers)
        self.dropped.update(other.dropped)
        self.first_broken += other.first_broken
        for name in _BY:
            self.by[name].update(other.by[name])


def _source_facts(counts: Counts, preset: ChatPreset | None) -> JsonObject:
    """The counts of a source under their names in the artifact's info."""
    facts: JsonObject = {name: counts.numbers[name] for name in ("read", "kept", "characters")}
    facts |= {
        "dropped": most_first(counts.dropped),
        "files": counts.numbers["files"],
        "broken": counts.numbers["broken"],
    }
    return facts | ({} if preset is None else {"licence": preset.licence})


def _report_source(name: str, counts: Counts, folder: Path | None, ctx: Context) -> None:
    """Log the outcome of a source; raises UserError where no row of it is usable. folder: a shard with dropped rows."""
    numbers = counts.numbers
    dropped = ", ".join(f"{number} {reason}" for reason, number in list(most_first(counts.dropped).items())[:5])
    if not numbers["kept"]:
        if folder is None:
            raise UserError(f"sources: {name}: there are no rows in it; remove it or fill it")
        first = next(read_dropped(folder))
        excerpt = " ".join(first["excerpt"].split())[:160]
        raise UserError(f"sources: {name}: no usable row in {numbers['read']} ({dropped}); {first['where']}: {excerpt}")
    if numbers["stopped"]:
        ctx.note(f"{name}: stopped after {numbers['read']} rows (max_rows)")
    if dropped:
        ctx.note(f"{name}: {numbers['kept']} of {numbers['read']} rows kept; dropped {dropped}; see dropped.parquet")
    if numbers["broken"]:
        first_broken = "; ".join(counts.first_broken[:5])
        ctx.note(f"{name}: {numbers['broken']} files could not be read, or not to their end: {first_broken}")


def _join_parts(
    ctx: Context, shards: Sequence[ChatShard], counts: Sequence[Counts], by_source: dict[str, Counts]
) -> dict[str, int]:
    """Move the parts of all shards into the output, and join their dropped rows; returns dropped rows by reason.

    This may be repeated after a kill: a part is either still in its shard or already in the output.
    """
    parts: list[str] = []
    with DroppedWriter(ctx.out) as dropped:
        for shard, counted in zip(shards, counts, strict=True):
            for part in counted.parts:
                parts.append(f"part-{len(parts):05d}.parquet")
                if (shard.folder / part).is_file():
                    os.replace(shard.folder / part, ctx.out / parts[-1])
            dropped.copy(shard.folder)
    rows_by_source = {name: counts.numbers["kept"] for name, counts in sorted(by_source.items())}
    write_manifest(ctx.out, {"parts": parts, "num_rows": sum(rows_by_source.values()), "by_source": rows_by_source})
    return most_first(dropped.counts)


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
        (beside / COUNTS).write_text(json.dumps(vars(counts), ensure_ascii=False), encoding="utf-8")
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
        self.counts = Counts()
        self.bytes_before, self.characters_here = 0, 0
        self.total = max(1, sum(file.size for file in shard.files))

    def run(self) -> Counts:
        """Read all files; returns the counts."""
        if self.shard.redact:
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
        self.counts.dropped, self.counts.parts = self.dropped.counts, self.chats.parts
        return self.counts

    def _collect_file(self, file: SourceFile) -> bool:
        """All rows of a file; False where max_rows is reached."""
        location = file.location if is_url(file.location) else Path(file.location)

        def set_aside(_: str, line: int, fault: BadRow, row: str) -> None:
            self._drop(fault.code, f"{file.name}:{line}", f"{fault}: {row}" if row else str(fault))

        source = self.source
        rows = read_rows(location, set_aside, kind=source.kind, documents=source.documents, span=file.span)
        try:
            return self._collect_rows(file.name, rows)
        except UserError as error:  # the file breaks off: rows read before are kept, the rest is reported
            message = str(error).removeprefix("source: ").removeprefix(file.location).lstrip(": ")
            self._drop(error.code if isinstance(error, BadFile) else "unreadable_file", file.name, message)
            self._record_broken(file.name, message)
            return True

    def _collect_rows(self, name: str, rows: Iterator[tuple[int, Any]]) -> bool:
        for line, row in rows:
            if self.source.max_rows is not None and self.counts.numbers["read"] >= self.source.max_rows:
                self.counts.numbers["stopped"] = 1
                return False
            try:
                self._collect_row(row, f"{name}:{line}")
            except BadRow as error:
                self._drop(error.code, f"{name}:{line}", f"{error}: {_excerpt(row)}")
            if self.counts.numbers["read"] % _ROWS_PER_PROGRESS == 0:
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
        self.counts.numbers.update(read=1, kept=1, characters=chat.num_chars)
        self.counts.by["languages"][chat.language] += 1
        self.counts.by["domains"][chat.domain] += 1
        self.counts.by["shapes"][content.shape] += 1

    def _drop(self, reason: str, location: str, excerpt: str) -> None:
        if self.shard.redact:
            excerpt, _ = redact(excerpt[: 2 * EXCERPT_CHARACTERS])  # also redact data that crosses the cut
        self.dropped.write(reason, self.name, location, excerpt)
        self.counts.numbers["read"] += 1

    def _record_broken(self, name: str, message: str) -> None:
        """Count a file that was not read to its end, and store the messages of the first few."""
        self.counts.numbers["broken"] += 1
        if len(self.counts.first_broken) < _BROKEN_SHOWN:
            self.counts.first_broken.append(f"{name}: {message}")

    def _language(self, chat: Chat) -> str:
        preset = self.source.chat_preset
        language = self.source.language or (preset.language if preset is not None else "")
        return language or (language_of_messages(chat.messages) if chat.messages else language_of(chat.text))

    def _domain(self, chat: Chat, row: Any) -> str:
        preset = self.source.chat_preset
        field = self.source.domain_field or (preset.domain_field if preset is not None else "")
        if field and isinstance(row, Mapping) and row.get(field):
            return valid_text(row[field], field)
        return self.source.domain or domain_of(chat.as_text())

    def _repaired(self, text: str, messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
        fields = ("content", "reasoning_content")
        repaired = repair(text), tuple(_with_changes(message, fields, repair) for message in messages)
        self.counts.numbers["repaired"] += repaired != (text, messages)
        return repaired

    def _redacted(self, text: str, messages: tuple[Message, ...]) -> tuple[str, tuple[Message, ...]]:
        def redact_text(text: str) -> str:
            clear, counts = redact(text)
            self.counts.by["redacted"].update(counts)
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
