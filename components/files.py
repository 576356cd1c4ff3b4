"""Files of shards, written whole or not at all: two workers may hold the same shard after one was given up.

Each writer has a temporary name of its own, renamed when the file is complete. Both would write the same bytes, so it
does not matter who comes last. What a killed writer leaves under its temporary name is swept up when the step ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

SAFETENSORS_PARTIAL = ".tmp??????"
"""Pattern of the temporary name under which safetensors writes a file, in the folder of that file."""


class Shard(Protocol):
    """A piece of a wide step's work: plain small values (paths, ids, settings; no tensors) and the file it becomes."""

    @property
    def file(self) -> Path:
        """The file of the shard, which exists once the shard is finished and not before."""


AnyShard = TypeVar("AnyShard", bound=Shard)


def unfinished(shards: Sequence[AnyShard]) -> list[AnyShard]:
    """The shards whose file does not exist yet."""
    return [shard for shard in shards if not shard.file.is_file()]


@contextmanager
def written_whole(file: Path) -> Iterator[Path]:
    """A path to write to; it becomes `file` if the block ends well, and is gone otherwise."""
    beside = file.with_name(f".{file.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield beside
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove what killed writers of shards have left in `folder`."""
    for pattern in (".*.tmp", SAFETENSORS_PARTIAL):
        for beside in folder.glob(pattern):
            beside.unlink(missing_ok=True)
