"""Locks: empty files under flock, which ends with its process."""

from __future__ import annotations

from pathlib import Path
from typing import IO

from components.contract import UserError


def open_lock(path: Path, mode: str = "a") -> IO[str]:
    """The file of a lock, made when it is not there yet. mode: "r" for one that is there, on a read-only disk too.

    Raises:
        UserError: a folder stands in its place.
    """
    try:
        return path.open(mode)
    except IsADirectoryError as error:
        raise UserError(
            f"{path}: is a folder where a lock belongs; `draftsmith doctor --repair` sets it aside"
        ) from error
