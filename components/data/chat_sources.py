"""What a mix of chats is declared from: a preset, rows of one's own in files of any kind, or a split on a hub.

In YAML a source is a mapping, or a text alone: a preset's name or a path.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.data import chat_shapes
from components.data.chat_presets import CHAT_PRESETS, ChatPreset, ChatPresetName
from components.data.hub_rows import PREFIX, HubSource, parse_hub_source
from components.data.row_streams import is_url
from components.data.row_tables import Documents

Format = Literal["auto", "jsonl", "json", "parquet", "arrow", "csv", "tsv", "text"]
KINDS: Final = {"auto": "", "text": ".txt"}
"""Format -> the suffix that it is read as; the others are their own."""


class ChatSource(BaseModel):
    """One source of conversations or documents.

    preset: one of the collections in chat_presets.py; it knows its repository, its language and its shape.
    path: a file, a folder (with all below it), a pattern, a URL that fsspec opens (s3://, gs://,
        hf://datasets/OWNER/NAME/FILES), or hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT; with a preset, a copy of its files.
    name: what its rows name as their source; weights and caps of data.mix_chats go by it.
    revision: of the preset's repository; pin it, since what lies on the hub or in an object store counts by its name
        alone. For a URL any text: change it when the objects have changed.
    format: how files are read, where their names do not tell. In a folder `auto` leaves text files alone.
    documents: what one document of a text file is: the file, a line, or a paragraph.
    fields: one's own names for messages, prompt, response, system, tools or text: {messages: dialog}.
    language: of all its rows, ISO 639-1 (en, zh); empty looks at each row.
    domain: what all its rows are about; empty looks at each row.
    domain_field: the row's field that says so instead.
    max_rows: rows looked at, at most, in the order of the files; such a source is read by one worker.
    follow_links: whether links may lead out of the folder, as in a hub's own cache.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: ChatPresetName | None = None
    path: str = ""
    name: str = ""
    revision: str = ""
    format: Format = "auto"
    documents: Documents = "file"
    fields: dict[chat_shapes.Field, str] = {}
    language: str = ""
    domain: str = ""
    domain_field: str = ""
    max_rows: int | None = Field(default=None, ge=1)
    follow_links: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """A text is a preset's name or a path; file:///x is another spelling of /x."""
        if isinstance(given, str):
            if given not in CHAT_PRESETS and "/" not in given and "." not in given:
                raise ValueError(f"{given!r:.80} is no preset{_near(given, CHAT_PRESETS)}, and no path")
            given = {"preset": given} if given in CHAT_PRESETS else {"path": given}
        if isinstance(given, Mapping):
            for name in given:
                if name not in cls.model_fields:
                    raise ValueError(f"unknown field {name!r:.80} of a source{_near(name, cls.model_fields)}")
            if isinstance(path := given.get("path"), str):
                given = {**given, "path": re.sub(r"^file://", "", path, flags=re.IGNORECASE)}
        return given

    @model_validator(mode="after")
    def _names_rows(self) -> Self:
        if self.preset is None and not self.path:
            raise ValueError("name a preset or a path")
        if self.preset is not None and self.fields:
            raise ValueError("a preset knows its fields; leave out `fields`")
        if self.revision and self.path and not is_url(self.path):
            raise ValueError(
                "revision: files that lie here count by their content; leave it out (hf: ids: NAME@REVISION)"
            )
        if not re.fullmatch(r"([a-z]{2})?", self.language):
            raise ValueError(f"language {self.language!r:.40} is not of ISO 639-1; write two letters, such as en or zh")
        if self.domain and self.domain_field:
            raise ValueError("either domain or domain_field")
        if not self.label:
            raise ValueError(f"path {self.path!r} gives it no name; add `name`")
        return self

    @property
    def known(self) -> ChatPreset | None:
        """The preset, where one is named."""
        return None if self.preset is None else CHAT_PRESETS[self.preset]

    @property
    def label(self) -> str:
        """What its rows name as their source: its name, its preset's, or the last plain part of its path."""
        if self.name or self.preset:
            return self.name or str(self.preset)
        hub_id = self._hub_id
        path = hub_id.removeprefix(PREFIX).rsplit(":", 1)[0].split("@")[0] if hub_id else self.path
        parts = path.split("/")
        last = next((part for part in reversed(parts) if part and not re.search(r"[*?\[]", part)), "")
        return last.split(".")[0].encode("utf-8", "replace").decode() or last

    @property
    def _hub_id(self) -> str:
        """The path as hf:OWNER/NAME:SPLIT, which may be written hf://OWNER/NAME:SPLIT; "" for any other path."""
        if self.path.startswith("hf://"):
            return "" if self.path.startswith("hf://datasets/") else PREFIX + self.path.removeprefix("hf://")
        return self.path if self.path.startswith(PREFIX) else ""

    @property
    def hub(self) -> HubSource | None:
        """The split that `datasets` streams, on the hub or in a folder of its format; None for files and URLs."""
        if self._hub_id:
            return parse_hub_source(self._hub_id)
        if self.path or self.known is None:
            return None
        name, split = self.known.repository, self.known.split
        return HubSource(f"{PREFIX}{name}:{split}", None, name, None, self.revision or None, split)

    @property
    def kind(self) -> str:
        """The suffix that its files are read as, "" by their names."""
        return KINDS.get(self.format, f".{self.format}")


def named_twice(sources: Sequence[ChatSource]) -> str:
    """A name that two sources share, "" where each has its own."""
    names = [source.label for source in sources]
    return next((name for name in names if names.count(name) > 1), "")


def _near(word: object, known: Iterable[str]) -> str:
    found = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {found[0]!r}?)" if found else f" (known: {', '.join(known)})"
