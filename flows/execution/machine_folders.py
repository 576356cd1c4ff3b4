"""Folders of this machine that all homes of this user share: for locks, and for sockets, whose paths must be short.

The folder for locks is in the temporary folder, as tmux and Ray do it, and not where $XDG_RUNTIME_DIR points: a nightly
run from cron has no such variable, and it has to find the same lock as a run from a terminal.
"""

from __future__ import annotations

import os
import platform
import stat
import tempfile
from pathlib import Path

from components.contract import UserError


def runtime_folder() -> Path:
    """This user's folder for locks on this machine, made with mode 0700 when it is not there yet.

    Where somebody else has taken its name in the temporary folder, it is in the user's own cache folder.

    Raises:
        UserError: neither can be made.
    """
    places = (
        Path(tempfile.gettempdir()) / f"draftsmith-{os.getuid()}",
        Path.home() / ".cache" / "draftsmith" / platform.node(),  # a home may be shared between machines
    )
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        facts = os.lstat(place)  # not what a link points to
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return place
    raise UserError(f"neither {places[0]} nor {places[1]} can be made for locks: set TMPDIR to a folder of your own")


def open_machine_lock() -> int:
    """A descriptor of the one lock file by which steps that measure have this machine to themselves."""
    return os.open(runtime_folder() / "machine.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def place_for_sockets(longest: int) -> str:
    """The temporary folder, or /tmp where its path has more than `longest` bytes: a socket's path holds only 107."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= longest else "/tmp"
