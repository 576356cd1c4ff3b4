"""A disk of a few megabytes that fills up, turns read-only, and grows again: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ENOUGH, ROOMY = 512 << 20, 8 << 30  # bytes; no more memory is taken than files hold


@cache
def can_mount() -> bool:
    """Whether this process may mount a disk: root outside of a closed container."""
    if os.getuid() != 0:
        return False
    with TemporaryDirectory() as folder:
        tried = subprocess.run(["mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False)
        if tried.returncode == 0:
            subprocess.run(["umount", folder], check=True)
        return tried.returncode == 0


@contextmanager
def small_disk(folder: Path, size: int = ENOUGH) -> Iterator[Path]:
    """A new disk of `size` bytes (in whole pages), mounted at `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def change(disk: Path, options: str) -> None:
    """Mount it anew with other options: "size=..." bytes, "ro" or "rw"."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)


def used_bytes(disk: Path) -> int:
    """How much of it is taken."""
    facts = os.statvfs(disk)
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize


def fill(disk: Path) -> Path:
    """Take all that is left with one file; remove it to make room again."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(1 << 16))
        except OSError:
            while True:
                try:
                    stream.write(bytes(512))
                except OSError:
                    return filler
