"""One shard of collecting: files of one source become unified rows, and what is left out gets a reason and a place.

A shard depends on its files and settings alone and appears whole or not at all, so it may run in any process, on any
machine, and a killed step goes on after its finished shards. kept + dropped = read, file by file.
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

from components.contract import Tell, UserError
from components.data.chat_shapes import read_content
from components.data.chat_source_files import FoundFile, Unusable
from components.data.chat_sources import ChatSource
from components.data.chat_turns import BadRow, checked
from components.data.chats import EXCERPT_CHARACTERS, Chat, ChatWriter, DroppedWriter
from components.data.cleaning import Cleaning, why_dropped
from components.data.hub_rows import hub_rows
from components.data.row_files import read_rows
from components.data.row_streams import is_url

COUNTS: Final = "counts.json"
_ROWS_BETWEEN_TELLING: Final = 2000
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
"""How the readers of row_files.py begin to say what is wrong -> the reason it is counted under."""


@dataclass(frozen=True)
class ChatShard:
    """Everything that one shard depends on, and the folder it becomes.

    files: read in this order; none for a source that `datasets` streams. unusable: what its listing could not read.
    """

    folder: Path
    source: ChatSource
    files: tuple[FoundFile, ...]
    unusable: tuple[Unusable, ...]
    clean: Cleaning
    redact: bool

    @property
    def file(self) -> Path:
        """What was counted; the folder appears with it and everything else in place."""
        return self.folder / COUNTS


def collect_shard(shard: ChatShard, tell: Tell) -> None:
    """Write the shard's parts, `dropped.parquet` and `counts.json` under its folder."""
    beside = shard.folder.with_name(f".{shard.folder.name}.{uuid.uuid4().hex}.tmp")
    beside.mkdir(parents=True)
    try:
        counts = _Collecting(shard, beside, tell).run()
        (beside / COUNTS).write_text(json.dumps(counts, ensure_ascii=False), encoding="utf-8")
        try:
            os.replace(beside, shard.folder)
        except OSError:
            if not shard.file.is_file():  # else another worker was first, with the same bytes
                raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _Collecting:
    """The state of one shard while it is read."""

    def __init__(self, shard: ChatShard, folder: Path, tell: Tell) -> None:
        self.shard, self.folder, self.tell = shard, folder, tell
        self.source = shard.source
        self.name = shard.source.label
        self.counts: Counter[str] = Counter()
        self.by: dict[str, Counter[str]] = {name: Counter() for name in ("languages", "domains", "shapes", "redacted")}
        self.bytes_before, self.characters_here = 0, 0
        self.total = max(1, sum(file.size for file in shard.files))
        self.broken: list[str] = []

    def run(self) -> dict[str, Any]:
        """Read everything; gives the counts."""
        if self.shard.redact:
            from components.data.redaction import require_redaction

            require_redaction()
        with ChatWriter(self.folder) as self.chats, DroppedWriter(self.folder) as self.dropped:
            for unusable in self.shard.unusable:
                self._drop(unusable.reason, unusable.where, unusable.said)
                self._broken(unusable.where, unusable.said)
            if self.source.hub is not None:
                self._take(self.name, hub_rows(self.source.hub))
            for file in self.shard.files if self.source.hub is None else ():
                if not self._take_file(file):
                    break
                self.bytes_before, self.characters_here = self.bytes_before + file.size, 0
        return {
            **{name: self.counts[name] for name in ("read", "kept", "characters", "repaired", "stopped", "broken")},
            "dropped": dict(self.dropped.counts),
            "parts": self.chats.parts,
            "first_broken": self.broken,
            **{name: dict(counter) for name, counter in self.by.items()},
        }

    def _take_file(self, file: FoundFile) -> bool:
        """All rows of a file; False where max_rows is reached."""
        place = file.place if is_url(file.place) else Path(file.place)

        def set_aside(where: str, line: int, why: str, row: str) -> None:
            self._drop(_reason_of(why), f"{file.where}:{line}", f"{why}: {row}" if row else why)

        source = self.source
        rows = read_rows(place, set_aside, kind=source.kind, documents=source.documents, span=file.span)
        try:
            return self._take(file.where, rows)
        except UserError as error:  # the file breaks off or is none: what was read before stays, the rest is told
            said = str(error).removeprefix("source: ").removeprefix(file.place).lstrip(": ")
            self._drop("unreadable_file" if _reason_of(said) == "unreadable" else _reason_of(said), file.where, said)
            self._broken(file.where, said)
            return True

    def _take(self, where: str, rows: Iterator[tuple[int, Any]]) -> bool:
        for line, row in rows:
            if self.source.max_rows is not None and self.counts["read"] >= self.source.max_rows:
                self.counts["stopped"] = 1
                return False
            try:
                self._keep(row, f"{where}:{line}")
            except BadRow as error:
                self._drop(error.reason, f"{where}:{line}", f"{error}: {_excerpt(row)}")
            if self.counts["read"] % _ROWS_BETWEEN_TELLING == 0:
                self.tell(min(0.99, (self.bytes_before + self.characters_here) / self.total))
        return True

    def _keep(self, row: Any, where: str) -> None:
        """Put a row where it belongs; raises BadRow for one that says nothing."""
        if self.source.known is not None:
            _require_any(row, self.source.known.fields)
        content = read_content(row, self.source.fields)
        text, messages = content.text, content.messages
        if self.shard.clean.repair:
            text, messages = self._mended(text, messages)
        if self.shard.redact:
            text, messages = self._redacted(text, messages)
        if not (text or messages):  # nothing is left of a text that was only what repair takes out
            raise BadRow("text is empty", "empty_text")
        chat = Chat.of(source=self.name, where=where, text=text, messages=messages, tools=content.tools)
        self.characters_here += chat.num_chars
        if (reason := why_dropped(chat, self.shard.clean)) is not None:
            self._drop(reason, where, chat.as_text())
            return
        chat = dataclasses.replace(chat, language=self._language(chat), domain=self._domain(chat, row))
        self.chats.write(chat)
        self.counts.update(read=1, kept=1, characters=chat.num_chars)
        self.by["languages"][chat.language] += 1
        self.by["domains"][chat.domain] += 1
        self.by["shapes"][content.shape] += 1

    def _drop(self, reason: str, where: str, excerpt: str) -> None:
        if self.shard.redact:
            from components.data.redaction import redact

            excerpt, _ = redact(excerpt[: 2 * EXCERPT_CHARACTERS])  # what crosses the cut is seen whole
        self.dropped.write(reason, self.name, where, excerpt)
        self.counts["read"] += 1

    def _broken(self, where: str, said: str) -> None:
        """Remember a file that was not read to its end, a few of them in words."""
        self.counts["broken"] += 1
        if len(self.broken) < _BROKEN_SHOWN:
            self.broken.append(f"{where}: {said}")

    def _language(self, chat: Chat) -> str:
        from components.data.language import language_of, language_of_messages

        known = self.source.language or (self.source.known.language if self.source.known is not None else "")
        return known or (language_of_messages(chat.messages) if chat.messages else language_of(chat.text))

    def _domain(self, chat: Chat, row: Any) -> str:
        from components.data.language import domain_of

        field = self.source.domain_field or (self.source.known.domain_field if self.source.known is not None else "")
        if field and isinstance(row, Mapping) and row.get(field):
            return checked(row[field], field)
        return self.source.domain or domain_of(chat.as_text())

    def _mended(self, text: str, messages: tuple[dict[str, Any], ...]) -> tuple[str, tuple[dict[str, Any], ...]]:
        from components.data.cleaning_encoding import repair

        mended = repair(text), tuple(_mapped(message, ("content", "reasoning_content"), repair) for message in messages)
        self.counts["repaired"] += mended != (text, messages)
        return mended

    def _redacted(self, text: str, messages: tuple[dict[str, Any], ...]) -> tuple[str, tuple[dict[str, Any], ...]]:
        from components.data.redaction import redact

        def without(said: str) -> str:
            clear, found = redact(said)
            self.by["redacted"].update(found)
            return clear

        fields = ("content", "reasoning_content", "tool_calls")
        return without(text), tuple(_mapped(message, fields, without) for message in messages)


def _mapped(value: Any, fields: tuple[str, ...], change: Any) -> Any:
    """A message with the texts in these fields changed, those inside calls of tools too."""
    return {name: _texts(inner, change) if name in fields else inner for name, inner in value.items()}


def _texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_texts(inner, change) for inner in value]
    if isinstance(value, Mapping):
        return {name: _texts(inner, change) for name, inner in value.items()}
    return value


def _require_any(row: Any, fields: tuple[str, ...]) -> None:
    if isinstance(row, Mapping) and not any(row.get(field) is not None for field in fields):
        has = ", ".join(sorted(map(str, row))[:8])[:200] or "none"
        raise BadRow(f"no field {' or '.join(fields)}, which this preset's rows have (has: {has})", "unknown_shape")


def _reason_of(why: str) -> str:
    return next((reason for part, reason in _REASONS if part in why[:300]), "unreadable")


def _excerpt(row: Any) -> str:
    """The beginning of a row as JSON; not much more is written than is shown, so that redaction sees past the cut."""
    shown = ""
    try:
        for piece in json.JSONEncoder(ensure_ascii=False, default=str).iterencode(row):
            shown += piece[: 2 * EXCERPT_CHARACTERS]
            if len(shown) >= 2 * EXCERPT_CHARACTERS:
                break
    except (RecursionError, ValueError, TypeError):  # too deep, or keys that are no text: what came before is enough
        pass
    return shown
