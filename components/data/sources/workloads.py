"""The sources of workload rows: a benchmark preset's repository, a local copy of its files, or the user's own rows.

Rows are read one by one (files.py, hub.py), so that a bad one is set aside alone. CSV, also inside a zip, is
read too, because CMMLU and C-Eval are distributed so.
"""

from __future__ import annotations

import fnmatch
import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import huggingface_hub

from components.contract import UserError
from components.data.settings import WorkloadSource
from components.data.sources.addresses import PREFIX, HubSource, parse_hub_source, source_files
from components.data.sources.bad_rows import Row, SetAside
from components.data.sources.files import read_rows, stem_of
from components.data.sources.hub import hub_rows
from components.data.sources.listing import find_files, folder_of_pattern, require_usable
from components.data.sources.presets import WorkloadPreset
from components.data.sources.streams import bounded_stream
from components.data.sources.tables import csv_rows
from components.text import message_of

_TABLES: Final = (".csv", ".zip")
_ZIP_ERRORS: Final = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, RuntimeError, ValueError, OverflowError),
)
"""Errors that a damaged zip, or one with a password, raises where it is opened or read."""

Table = tuple[str, str, Iterator[tuple[int, Any]]]
"""(location, name, rows with their lines)."""


def local_files(source: WorkloadSource) -> list[Path]:
    """The local files of a source, sorted; none for a source on the hub."""
    if not source.path:
        return []
    if source.path.startswith(PREFIX):
        return source_files(parse_hub_source(source.path))
    return _tabular_files(source.path) or find_files(source.path)


def tables(source: WorkloadSource, set_aside: SetAside) -> Iterator[Table]:
    """Every table of a source; raises UserError where one cannot be read."""
    preset = source.resolved_preset
    if not source.path:
        assert preset is not None, source
        yield from _preset_tables(preset, source.revision, set_aside)
        return
    if source.path.startswith(PREFIX):
        hub_source = parse_hub_source(source.path)
        yield source.path, hub_source.label, hub_rows(hub_source)
        return
    members = preset.members if preset is not None else ""
    for file in local_files(source):
        yield from _file_tables(file, members, preset.split if preset is not None else "", set_aside)


def _preset_tables(preset: WorkloadPreset, revision: str, set_aside: SetAside) -> Iterator[Table]:
    for name in preset.files:
        yield from _file_tables(_download(preset, name, revision), preset.members, preset.split, set_aside)
    for config in preset.configs or (None,) * (not preset.files):
        location = f"{PREFIX}{preset.repository}" + (f"/{config}" if config else "") + f":{preset.split}"
        source = HubSource(location, None, preset.repository, config, revision or None, preset.split)
        yield location, config or preset.name, hub_rows(source)


def _download(preset: WorkloadPreset, name: str, revision: str) -> Path:
    """A file of the preset's repository, from the hub's cache where it has been downloaded before."""
    try:
        return Path(
            huggingface_hub.hf_hub_download(preset.repository, name, repo_type="dataset", revision=revision or None)
        )
    except Exception as error:  # every kind of network and hub failure ends here, as one line
        location = f"sources: {preset.name}: {preset.repository}/{name}"
        if huggingface_hub.is_offline_mode():
            remedy = "steps may not reach the hub; allow it with `draftsmith run --online`, or give `path:` to a copy"
            raise UserError(f"{location}: {remedy}") from error
        reason = message_of(error)
        raise UserError(f"{location}: the hub did not give it ({reason}); give `path:` to a copy") from error


def _tabular_files(path: str) -> list[Path]:
    """The CSV or zip files that a path or pattern names; none when it names something else."""
    try:
        place = Path(path).expanduser()
        if place.is_dir():
            root, candidates = place, list(place.glob("*.csv"))
        elif not path.endswith(_TABLES):
            return []
        elif place.is_file():
            require_usable(place, place.stat().st_size, None)
            return [place]
        else:
            root = folder_of_pattern(path)
            candidates = list(Path(place.anchor or ".").glob(str(place.relative_to(place.anchor))))
        files = sorted(file for file in candidates if file.is_file())
        for file in files:
            require_usable(file, file.stat().st_size, root)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {path[:200]}: not a usable path ({error}); give one that can be read") from error
    return files


def _file_tables(file: Path, members: str, split: str, set_aside: SetAside) -> Iterator[Table]:
    if file.name.endswith(".csv"):
        yield str(file), _category(stem_of(file), split), read_rows(file, set_aside)
    elif file.name.endswith(".zip"):
        yield from _zip_tables(file, members or "*.csv", split, set_aside)
    else:
        yield str(file), stem_of(file), read_rows(file, set_aside)


def _zip_tables(file: Path, members: str, split: str, set_aside: SetAside) -> Iterator[Table]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in sorted(archive.namelist()) if fnmatch.fnmatch(name, members)]
            if not names:
                raise UserError(f"source: {file}: holds no {members}; give the archive as it was handed out")
            for name in names:
                location = f"{file}!{name}"
                yield location, _category(stem_of(Path(name)), split), _member_rows(archive, name, location, set_aside)
    except _ZIP_ERRORS as error:
        raise UserError(f"source: {file}: not a readable zip ({message_of(error, 200)}); fetch it again") from error


def _member_rows(archive: zipfile.ZipFile, name: str, location: str, set_aside: SetAside) -> Iterator[tuple[int, Row]]:
    """The rows of a file inside a zip, streamed, because it may expand to any size."""
    try:
        num_stored = archive.getinfo(name).compress_size
        with archive.open(name) as packed:
            read_some = cast(zipfile.ZipExtFile, packed).read1
            yield from csv_rows(location, bounded_stream(read_some, lambda: num_stored), set_aside)
    except _ZIP_ERRORS as error:
        raise UserError(
            f"source: {location}: cannot be read to its end ({message_of(error, 200)}); fetch it again"
        ) from error


def _category(stem: str, split: str) -> str:
    """The category in a file's name: C-Eval names a subject's file SUBJECT_val.csv."""
    return stem.removesuffix(f"_{split}") if split else stem
