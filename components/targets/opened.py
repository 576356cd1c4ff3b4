"""Keeps one target open in a process, so that consecutive shards do not load it again.

It has the "plain" kernel: a timed choice of kernels would change the last bits of shards that any process may write.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from components.targets.load import open_target
from components.targets.model import AbstractTarget


@functools.lru_cache(maxsize=1)
def cached_target(folder: Path, device: str, dtype: Literal["float32", "bfloat16", "auto"] = "auto") -> AbstractTarget:
    """The target in this artifact directory, opened at the first call. Raises as `open_target`."""
    return open_target(folder, device=device, dtype=dtype, kernel="plain")
