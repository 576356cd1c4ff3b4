"""Streams rows of a data set in the Hugging Face format, on the hub or in a local folder, through `datasets`.

    hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT     on the hub; steps reach it only under `draftsmith run --online`
    hf:FOLDER[/CONFIG]:SPLIT                    a local copy of such a repository, or what `save_to_disk` wrote

Only data that are read are downloaded, media columns are not decoded, and code that comes with a data set is never
run. `datasets` reads JSON in blocks and stops at the first malformed line; the same file given by its path loses only
that line.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from components.contract import UserError

PREFIX: Final = "hf:"
_FORM: Final = "hf:OWNER/NAME[/CONFIG][@REVISION]:SPLIT or hf:FOLDER:SPLIT"
_HUB_ID: Final = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.-]+))?(@(?P<revision>[^@:]+))?")


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


def hub_rows(source: HubSource) -> Iterator[tuple[int, Any]]:
    """(number, row) for each row of the split, from 1; raises UserError in one line when it cannot be read."""
    number = 0
    try:
        for row in _open_rows(source):
            number += 1
            yield number, row
    except UserError:
        raise
    except Exception as error:  # every network, hub and format failure becomes one line
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise UserError(f"source: {source.source}: {_remedy(source, number, reason)}") from error


def _open_rows(source: HubSource) -> Any:
    import datasets
    from datasets.utils import tqdm

    datasets.disable_progress_bars()  # a run shows its own
    tqdm.set_lock(threading.RLock())  # the default is shared between processes and outlives a step's process

    _check_arrow_files(source)
    if source.folder is not None and any(
        (source.folder / name).is_file() for name in ("state.json", "dataset_dict.json")
    ):
        saved = datasets.load_from_disk(str(source.folder))  # Arrow files, mapped into memory
        splits = dict(saved) if isinstance(saved, datasets.DatasetDict) else {str(saved.split or "train"): saved}
        if source.split not in splits:
            raise ValueError(f"no split {source.split}; it has {', '.join(sorted(splits))}")
        return splits[source.split].to_iterable_dataset().decode(False)
    place = str(source.folder.resolve()) if source.folder is not None else source.name
    rows = datasets.load_dataset(
        place, name=source.config, revision=source.revision, split=source.split, streaming=True
    )
    return rows.decode(False)


def _check_arrow_files(source: HubSource) -> None:
    """Raise ValueError for a local Arrow file whose offsets point outside its buffers.

    `datasets` maps such files into memory and follows the offsets, which ends the process.
    """
    import pyarrow

    for file in source_files(source):
        if file.suffix != ".arrow" or not file.stat().st_size:
            continue
        try:
            with pyarrow.memory_map(str(file)) as mapped:
                is_file = mapped.read(6) == b"ARROW1"
                mapped.seek(0)
                if is_file:
                    reader = pyarrow.ipc.open_file(mapped)
                    batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
                else:
                    batches = iter(pyarrow.ipc.open_stream(mapped))
                for batch in batches:
                    batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"{file.name}: {error or type(error).__name__}") from error


def _remedy(source: HubSource, number: int, reason: str) -> str:
    from huggingface_hub import is_offline_mode

    if number:
        return f"reading stopped after row {number} ({reason}); mend that file, or give its path as source"
    if source.folder is not None:
        return f"`datasets` cannot read it ({reason}); mend it, or give the path of its files as source"
    if is_offline_mode():
        return "steps may not reach the hub; allow it with `draftsmith run --online`, or name a local folder"
    return f"the hub did not give it ({reason}); check the name and the connection, or name a local folder"
