"""Streams the rows of a data set in Hugging Face format, on the hub or in a local folder, through `datasets`.

Only data that are read are downloaded, media columns are not decoded, and code that comes with a data set is never
run. `datasets` reads JSON in blocks and stops at the first malformed line; the same file given by its path loses only
that line.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pyarrow
from huggingface_hub import is_offline_mode

from components.contract import UserError
from components.data.sources.addresses import HubSource, source_files
from components.data.sources.tables import arrow_batches
from components.text import message_of


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
        reason = message_of(error)
        raise UserError(f"source: {source.source}: {_remedy(source, number, reason)}") from error


def _open_rows(source: HubSource) -> Any:
    import datasets  # it takes a second, and few sources are data sets of the hub
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
    for file in source_files(source):
        if file.suffix != ".arrow" or not file.stat().st_size:
            continue
        try:
            with pyarrow.memory_map(str(file)) as mapped:
                for batch in arrow_batches(mapped):
                    batch.validate(full=True)
        except (pyarrow.ArrowException, OSError, MemoryError) as error:
            raise ValueError(f"{file.name}: {error or type(error).__name__}") from error


def _remedy(source: HubSource, number: int, reason: str) -> str:
    if number:
        return f"reading stopped after row {number} ({reason}); mend that file, or give its path as source"
    if source.folder is not None:
        return f"`datasets` cannot read it ({reason}); mend it, or give the path of its files as source"
    if is_offline_mode():
        return "steps may not reach the hub; allow it with `draftsmith run --online`, or name a local folder"
    return f"the hub did not give it ({reason}); check the name and the connection, or name a local folder"
