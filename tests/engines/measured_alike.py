"""What every engine is measured with, so that their numbers can be compared."""

from __future__ import annotations

from pathlib import Path

from components.contract import Context

DEPTH = 3
MAX_NEW_TOKENS = 48


def make_context(folder: Path) -> Context:
    """A context with directories of its own; one thread, since an engine computes beside it."""
    folder.mkdir(parents=True)
    return Context(key=(folder.name.encode().hex() + "0" * 64)[:64], out=folder, scratch=folder, num_threads=1)
