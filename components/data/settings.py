"""The settings of the steps of this room that are more than a number or a text: sources, cleaning rules, choices.

The file imports nothing heavy, because `check` and `plan` read the settings of every step. Faults that no type can
express are found by `<step>_settings` functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from components.contract import UserError
from components.data.sources.addresses import PREFIX, HubSource, is_url, parse_hub_source
from components.data.sources.presets import (
    CHAT_PRESETS,
    WORKLOAD_PRESETS,
    ChatPreset,
    ChatPresetName,
    WorkloadPreset,
    WorkloadPresetName,
)
from components.outside_json import JsonObject
from components.targets.shape import tap_layers_fault
from components.text import as_utf8, did_you_mean

Share = Annotated[float, Field(ge=0.0, le=1.0)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[int, Field(ge=1)]
FEWEST_TO_LEARN_FROM = 8
"""Fewest answers that a drafter is trained on: fewer say nothing about what a target does."""
FEWEST_HELD_OUT = 2
"""Fewest answers that its checkpoints are chosen by."""
Weight = Annotated[float, Field(ge=0.0)]
Positive = Annotated[float, Field(gt=0.0)]
Name = Annotated[str, Field(min_length=1)]
SettingFault = tuple[tuple[str | int, ...], str]
"""(the setting's place, what is wrong with it)."""

Format = Literal["auto", "jsonl", "json", "parquet", "arrow", "csv", "tsv", "text"]
Documents = Literal["file", "line", "paragraph"]
"""What one document of a text file is: the whole file, a line, or the text between empty lines."""
FieldName = Literal["messages", "prompt", "response", "system", "tools", "text"]
"""Standard names of fields that the setting `fields` may map to a row's own names."""
_SUFFIXES: Final = {"auto": "", "text": ".txt"}
"""Format -> the suffix that it is read as; every other format is its own suffix."""

CorpusSource = Literal["python-stdlib"]
Strata = Literal["source", "language", "domain"]
Unit = Literal["tokens", "rows"]
TooSmall = Literal["shrink", "fill", "repeat", "refuse"]
Order = Literal["random", "short_first", "easy_first", "by_source", "by_domain"]
Thinking = Literal["keep", "drop", "last"]
Turns = Literal["all", "last"]


def _ascending(layers: list[int]) -> list[int]:
    if fault := tap_layers_fault(layers):
        raise ValueError(fault)
    return layers


Taps = Annotated[list[int], AfterValidator(_ascending)]
"""Tapped layers of any target; the step compares them with the target's own."""


class ChatSource(BaseModel):
    """One source of conversations or documents.

    preset: one of the collections in sources/presets.py, which names its repository, language and shape.
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
    fields: dict[FieldName, str] = {}
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
                hint = did_you_mean(value, CHAT_PRESETS, most_named=100)
                raise ValueError(f"{value!r:.80} is no preset{hint}, and no path")
            value = {"preset": value} if value in CHAT_PRESETS else {"path": value}
        if isinstance(value, Mapping):
            for name in value:
                if name not in cls.model_fields:
                    hint = did_you_mean(name, cls.model_fields, most_named=100)
                    raise ValueError(f"unknown field {name!r:.80} of a source{hint}")
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
        return as_utf8(last.split(".")[0]) or last

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
        return _SUFFIXES.get(self.format, f".{self.format}")


def duplicate_name(sources: Sequence[ChatSource]) -> str:
    """A name that two sources share; "" where all names differ."""
    names = [source.label for source in sources]
    return next((name for name in names if names.count(name) > 1), "")


class WorkloadSource(BaseModel):
    """One source of prompts: a preset, local files of a preset, or rows of one's own.

    preset: a benchmark in sources/presets.py, which defines its fields, template and workloads.
    path: a file, folder or pattern (JSONL, JSON, Parquet, CSV, a zip of CSV), or hf:OWNER/NAME[/CONFIG]:SPLIT; with a
        preset, a copy of its files.
    revision: of the preset's hub repository; pin it, since the step's key holds only the repository's name.
    workload: the label of rows without a preset, or of all rows of a preset; results are grouped by it.
    workload_field: a field of the rows that holds the label instead.
    language: the code of the language of the answers (en, zh); a preset defines its own.
    template: the question, with the row's fields in braces, lower case; empty recognises the common formats.
    reference: the field with a person's answer, used with a template.
    num_prompts: prompts of each workload of this source, at most; null is the step's num_prompts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    preset: WorkloadPresetName | None = None
    path: str = ""
    revision: str = ""
    workload: str = ""
    workload_field: str = ""
    language: str = ""
    template: str = ""
    reference: str = ""
    num_prompts: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _names_rows(self) -> Self:
        if self.preset is None and not self.path:
            raise ValueError("name a preset or a path")
        if self.revision and self.path:
            raise ValueError("revision is of a preset's repository, and a path is read as it lies; leave one out")
        if self.preset is None and not (self.workload or self.workload_field):
            raise ValueError("rows of one's own need a workload, or a workload_field")
        if self.preset is None and not self.language:
            raise ValueError("rows of one's own need a language, such as en or zh")
        return self

    @property
    def resolved_preset(self) -> WorkloadPreset | None:
        """The named preset, None without one."""
        return None if self.preset is None else WORKLOAD_PRESETS[self.preset]

    @property
    def label(self) -> str:
        """The source that its prompts name."""
        return self.preset or self.path.rstrip("/").rsplit("/", 1)[-1]


def workload_source(setting: str | JsonObject | WorkloadSource) -> WorkloadSource:
    """The source of a setting, which may be just the name of a preset; raises UserError for an unknown one."""
    if not isinstance(setting, str):
        return WorkloadSource.model_validate(setting)
    if setting not in WORKLOAD_PRESETS:
        raise UserError(f"sources: {setting}: no such preset; known: {', '.join(WORKLOAD_PRESETS)}; or give a path")
    return WorkloadSource.model_validate({"preset": setting})


def _rule(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class Cleaning(BaseModel):
    """Settings of the rules that drop a row: false switches a rule off, a larger number widens a limit."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role_order: bool = _rule(True, "Drop chats whose roles do not take turns, or that begin with an answer.")
    min_question_characters: Count = _rule(2, "Drop chats whose first question is shorter. Characters.")
    min_answer_characters: Count = _rule(1, "Drop chats with a shorter answer. Characters.")
    min_text_characters: Count = _rule(32, "Drop shorter plain texts. Characters.")
    max_characters: Amount = _rule(65_536, "Drop longer rows. Characters in all.")
    max_turns: Amount = _rule(128, "Drop chats with more messages.")
    replacement_characters: bool = _rule(True, "Drop rows that hold U+FFFD: what stood there is lost.")
    control_characters: bool = _rule(True, "Drop rows with control characters.")
    mojibake: bool = _rule(True, "Drop rows that were decoded with the wrong encoding.")
    repair: bool = _rule(
        False, "Mend mojibake and control characters first and count it; only what stays wrong is dropped."
    )
    template_marks: bool = _rule(True, "Drop rows that hold special tokens of chat templates as text.")
    max_html_share: Share = _rule(
        0.2, "Drop answers with a larger share of characters in tags (code set apart); 1 keeps all."
    )
    url_only: bool = _rule(True, "Drop questions or answers that are nothing but addresses.")
    refusals: bool = _rule(True, "Drop chats with an answer that refuses (English and Chinese).")
    boilerplate: bool = _rule(True, "Drop answers that speak of themselves as a model, and page leftovers.")
    also_refusals: tuple[str, ...] = _rule((), "Further regular expressions for beginnings of refusals.")
    also_boilerplate: tuple[str, ...] = _rule((), "Further regular expressions for boilerplate.")
    max_repeated_share: Share = _rule(
        0.5,
        "Drop a turn or text of which a larger share stood in it before, by 16 characters or by lines; 1 keeps all.",
    )
    repeated_turns: bool = _rule(True, "Drop chats in which the assistant says the same thing twice.")


def collect_chats_settings(settings: JsonObject) -> tuple[JsonObject, list[SettingFault]]:
    """The settings, and faults that no type can express; called when a pipeline is checked."""
    clean = pattern_faults(settings["clean"])
    faults: list[SettingFault] = [(("clean",), f"setting 'clean': {fault}") for fault in clean]
    if twice := duplicate_name([ChatSource.model_validate(source) for source in settings["sources"]]):
        faults.append((("sources",), f"setting 'sources': two are called {twice!r}; give each a name"))
    return settings, faults


def pattern_faults(cleaning: JsonObject) -> list[str]:
    """Faults of the regular expressions in a `clean:` setting, a line each."""
    faults = []
    for name in ("also_refusals", "also_boilerplate"):
        for expression in cleaning.get(name, ()):
            try:
                re.compile(f"x|(?:{expression})")  # as the rules put it among the others: (?s) must come first
            except re.error as error:
                faults.append(f"{name}: {expression!r} is not a regular expression ({error}); mend or remove it")
    return faults


def mix_chats_settings(settings: JsonObject) -> tuple[JsonObject, list[SettingFault]]:
    """The settings, and faults that no type can express; called when a pipeline is checked."""
    faults: list[SettingFault] = []
    if settings["weights"] and settings["temperature"] != 1.0:
        message = "it makes shares out of sizes, and 'weights' give the shares; keep one of the two"
        faults.append((("temperature",), f"setting 'temperature': {message}"))
    for name in ("weights", "evaluation_weights"):
        if settings[name] and not any(settings[name].values()):
            faults.append(((name,), f"setting '{name}': one at least must be above 0"))
    name, other = f"limit_{settings['by']}", "limit_rows" if settings["by"] == "tokens" else "limit_tokens"
    if settings[other] is not None:
        faults.append(((other,), f"setting '{other}': shares are by {settings['by']} ('by'), so give '{name}'"))
    elif settings["too_small"] in ("repeat", "refuse") and settings[name] is None:
        faults.append(
            (("too_small",), f"setting 'too_small': {settings['too_small']} needs a limit to reach; give '{name}'")
        )
    needed = settings["num_validation"] + settings["num_test"] + settings["num_warm_up"]
    if needed and not settings["evaluation_percent"]:
        message = f"with 0 there is nothing for {needed} prompts to judge by; give 1 or more"
        faults.append((("evaluation_percent",), f"setting 'evaluation_percent': {message}"))
    return settings, faults
