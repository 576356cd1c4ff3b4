"""One target stays open in a process, so that shards which follow each other do not load it again.

Always with the "plain" kernel: which kernel is faster is measured, and a measurement must not decide what is written
into shards that any process may write.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from components.targets.load import open_target
from components.targets.model import AbstractTarget


@functools.lru_cache(maxsize=1)
def opened_target(folder: Path, device: str, dtype: Literal["float32", "bfloat16", "auto"] = "auto") -> AbstractTarget:
    """The target in this directory of an artifact, opened at the first call; `open_target` says what can go wrong."""
    return open_target(folder, device=device, dtype=dtype, kernel="plain")
