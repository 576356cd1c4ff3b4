"""The setting that declares a source of chats: a preset, files of any kind, or a split of a data set on a hub.

In YAML a source is a mapping, or a single text: a preset's name or a path.

Presets for the collections of conversations that drafters are usually trained on: repository, licence, fields.

A preset holds no rows. It names a split of a hub repository, which is streamed under `draftsmith run --online`; with a
`path:` the same preset reads a copy of its files. Row counts are those stated by the publisher.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from components.data.sources import shapes as chat_shapes
from components.data.sources.hub import PREFIX, HubSource, parse_hub_source
from components.data.sources.streams import is_url
from components.data.sources.tables import Documents

Format = Literal["auto", "jsonl", "json", "parquet", "arrow", "csv", "tsv", "text"]
KINDS: Final = {"auto": "", "text": ".txt"}
"""Format -> the suffix that it is read as; every other format is its own suffix."""


class ChatSource(BaseModel):
    """One source of conversations or documents.

    preset: one of the collections in chats.py, which names its repository, language and shape.
    path: a file, a folder (with all below it), a pattern, a URL that fsspec opens (s3://, gs://,
        hf://datasets/OWNER/NAME/FILES), or hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT; with a preset, a copy of its files.
    name: the `source` of its rows, which weights and caps of data.mix_chats refer to.
    revision: of the preset's repository; pin it, since data on the hub or in an object store count by their name alone.
        For a URL any text: change it when the objects have changed.
    format: how files are read, where their names do not tell. In a folder `auto` ignores text files.
    documents: what one document of a text file is: the file, a line, or a paragraph.
    fields: the rows' names of messages, prompt, response, system, tools or text: {messages: dialog}.
    language: the language of all rows, ISO 639-1 (en, zh); empty detects it for each row.
    domain: the domain of all rows; empty detects it for each row.
    domain_field: the row's field that names its domain.
    max_rows: the most rows to read, in the order of the files; such a source is read by one worker.
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
    def _from_text(cls, value: Any) -> Any:
        """Read a text as a preset's name or a path; file:///x is another spelling of /x."""
        if isinstance(value, str):
            if value not in CHAT_PRESETS and "/" not in value and "." not in value:
                raise ValueError(f"{value!r:.80} is no preset{_suggestion(value, CHAT_PRESETS)}, and no path")
            value = {"preset": value} if value in CHAT_PRESETS else {"path": value}
        if isinstance(value, Mapping):
            for name in value:
                if name not in cls.model_fields:
                    raise ValueError(f"unknown field {name!r:.80} of a source{_suggestion(name, cls.model_fields)}")
            if isinstance(path := value.get("path"), str):
                value = {**value, "path": re.sub(r"^file://", "", path, flags=re.IGNORECASE)}
        return value

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
    def chat_preset(self) -> ChatPreset | None:
        """The preset, where one is named."""
        return None if self.preset is None else CHAT_PRESETS[self.preset]

    @property
    def label(self) -> str:
        """The `source` of its rows: its name, its preset's name, or the last plain part of its path."""
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
        if self.path or self.chat_preset is None:
            return None
        name, split = self.chat_preset.repository, self.chat_preset.split
        return HubSource(f"{PREFIX}{name}:{split}", None, name, None, self.revision or None, split)

    @property
    def kind(self) -> str:
        """The suffix that its files are read as; "" means by their names."""
        return KINDS.get(self.format, f".{self.format}")


def duplicate_name(sources: Sequence[ChatSource]) -> str:
    """A name that two sources share; "" where all names differ."""
    names = [source.label for source in sources]
    return next((name for name in names if names.count(name) > 1), "")


def _suggestion(word: object, choices: Iterable[str]) -> str:
    matches = difflib.get_close_matches(str(word), list(choices), n=1)
    return f" (did you mean {matches[0]!r}?)" if matches else f" (known: {', '.join(choices)})"


ChatPresetName = Literal["eaglechat", "sharegpt", "ultrachat", "smoltalk-chinese", "perfectblend", "magpie"]


class ChatPreset(BaseModel):
    """One collection of conversations.

    repository: hub id. split: the split to read.
    fields: the possible fields of the turns; a row with none of them comes from another file and is refused.
    language: the language of all rows, "" for several. domain_field: the row's field that names its domain.
    licence: as stated by the publisher.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: ChatPresetName
    about: str
    repository: str
    split: str
    fields: tuple[str, ...]
    licence: str
    language: str = ""
    domain_field: str = ""


CHAT_PRESETS: Final[dict[str, ChatPreset]] = {
    preset.name: preset
    for preset in (
        ChatPreset(
            name="eaglechat",
            about="Bilingual: ShareGPT (120,675), UltraChat (207,865), smoltalk-chinese (710,564), cleaned, mixed.",
            repository="zhaode/EagleChat",
            split="train",
            fields=("conversations",),
            licence="of its parts: Apache-2.0 (ShareGPT as uploaded, smoltalk-chinese), MIT (UltraChat)",
        ),
        ChatPreset(
            name="sharegpt",
            about="120,675 conversations with ChatGPT that people shared, mostly English, unfiltered; many turns.",
            repository="Aeala/ShareGPT_Vicuna_unfiltered",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0 as uploaded; the conversations are their users'",
        ),
        ChatPreset(
            name="ultrachat",
            about="207,865 synthetic English conversations of several turns: the world, writing, given material.",
            repository="HuggingFaceH4/ultrachat_200k",
            split="train_sft",
            fields=("messages", "data"),
            licence="MIT",
            language="en",
        ),
        ChatPreset(
            name="smoltalk-chinese",
            about="710,564 synthetic Chinese conversations of one to three turns: knowledge, planning, code.",
            repository="opencsg/smoltalk-chinese",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0",
            language="zh",
        ),
        ChatPreset(
            name="perfectblend",
            about="Open reproduction of the PerfectBlend mix, 1.4 million rows: chat, mathematics, code; English.",
            repository="mlabonne/open-perfectblend",
            split="train",
            fields=("conversations",),
            licence="Apache-2.0",
        ),
        ChatPreset(
            name="magpie",
            about="300,000 instructions that Llama 3.1 70B wrote to itself, and its answers; English, one turn.",
            repository="Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered",
            split="train",
            fields=("conversations", "instruction"),
            licence="Llama 3.1 Community License",
            language="en",
            domain_field="task_category",
        ),
    )
}
