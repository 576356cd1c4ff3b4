"""Addresses of sources: files on this disk, URLs that fsspec opens, and splits of data sets in Hugging Face format.

hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT     on the hub; steps reach it only under `draftsmith run --online`
hf:FOLDER[/CONFIG]:SPLIT                    a local copy of such a repository, or what `save_to_disk` wrote
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from components.contract import UserError

Place = Path | str
"""A file on this disk, or the URL of a file."""
PREFIX: Final = "hf:"
_FORM: Final = "hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT or hf:FOLDER:SPLIT"
_HUB_ID: Final = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[^@:]+))?")
_URL: Final = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(place: Place) -> bool:
    """Whether a place is a URL: s3://bucket/name, gs://..., memory://..."""
    return isinstance(place, str) and _URL.match(place) is not None


@dataclass(frozen=True)
class HubSource:
    """A split of a data set. Exactly one of `folder` and `name` is set."""

    source: str  # as the user wrote it
    folder: Path | None
    name: str | None  # owner/name
    config: str | None
    revision: str | None
    split: str

    @property
    def label(self) -> str:
        """The label of its rows: the last part of its name."""
        return self.folder.resolve().name if self.folder is not None else str(self.name).split("/")[1]


def parse_hub_source(source: str) -> HubSource:
    """Parse a source that begins with "hf:"; raises UserError for another form or a missing folder."""
    place, colon, split = source.removeprefix(PREFIX).rpartition(":")
    if not colon or not place or not re.fullmatch(r"\w[\w.-]*", split):
        raise UserError(f"source: {source}: names no split; expected {_FORM}, such as hf:openai/gsm8k/main:train")
    try:
        path = Path(place).expanduser()
        explicit = place.startswith((".", "/", "~"))
        if path.is_dir():
            return HubSource(source, path, None, None, None, split)
        if (explicit or place.count("/") > 1) and path.parent.is_dir():
            return HubSource(source, path.parent, None, path.name, None, split)
    except (OSError, ValueError, RuntimeError) as error:  # no path at all: too long, a null byte, an unknown ~user
        raise UserError(f"source: {source[:200]}: not a usable path ({error}); expected {_FORM}") from error
    match = _HUB_ID.fullmatch(place)
    if explicit or match is None:
        raise UserError(f"source: {source}: no such folder, and not a hub id; expected {_FORM}")
    return HubSource(source, None, match["name"], match["config"], match["revision"], split)


def source_files(source: HubSource) -> list[Path]:
    """The files of a local source, sorted and without hidden ones; [] for a hub id."""
    if source.folder is None:
        return []
    files = [file for file in source.folder.rglob("*") if file.is_file()]
    return sorted(file for file in files if not any(part[0] == "." for part in file.relative_to(source.folder).parts))
