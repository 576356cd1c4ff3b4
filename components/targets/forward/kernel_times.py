"""Times of linear kernels on this machine, remembered in `kernels.json`, so that one opening in many has to time them.

An entry is of one machine (processor, cores, memory, torch's version), dtype, number of threads and shape of a weight.
It holds the times, not the choice: which kernels follow from them depends on how large the model is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Final, Literal

import torch

from components.machine import describe_machine
from components.targets.forward.compiled import compiled_functions
from components.targets.remembered import recall, remember

Kernel = Literal["plain", "transposed", "columns", "streamed", "prepacked", "convolved"]
Shape = tuple[int, int]
"""(out_features, in_features)."""
Times = Mapping[Kernel, list[float]]
"""Kernel -> microseconds of a call with 1, 2, ... PROBED_ROWS rows; without PACKED where oneDNN cannot pack,
and without "streamed" where it cannot be compiled."""

PROBED_ROWS: Final = 8
ALWAYS: Final = frozenset({"plain", "transposed", "columns"})
PACKED: Final[tuple[Kernel, ...]] = ("prepacked", "convolved")
"""Kernels on layouts of oneDNN, which not every build, device and dtype has."""
VERSION: Final = 7
"""Of the kernels: times of others are no times of these."""
FILE: Final = "kernels.json"


def recall_times(dtype: torch.dtype, shapes: Iterable[Shape]) -> dict[Shape, Times]:
    """The times of those shapes that this machine has timed in this dtype on this number of threads."""
    content = recall(FILE)
    entries = {shape: content.get(_name(dtype, shape)) for shape in shapes}
    return {shape: entry for shape, entry in entries.items() if _is_whole(entry)}  # type: ignore[misc]


def remember_times(dtype: torch.dtype, times: Mapping[Shape, Times]) -> None:
    """Keep what was timed with the current number of threads, in the place of what is known of these shapes."""
    if times:
        remember(FILE, {_name(dtype, shape): of_shape for shape, of_shape in times.items()})


def _name(dtype: torch.dtype, shape: Shape) -> str:
    threads = torch.get_num_threads()
    return f"{VERSION} {_machine_id()} {str(dtype).removeprefix('torch.')} {threads} {shape[0]}x{shape[1]}"


@functools.cache
def _machine_id() -> str:
    return describe_machine().machine_id


def _is_whole(entry: object) -> bool:
    """Whether an entry holds a time for every kernel and number of rows: the file may have been edited."""
    wanted = ALWAYS | {"streamed"} if compiled_functions() is not None else ALWAYS  # a compiler may have come, or gone
    if not isinstance(entry, dict) or entry.keys() - set(PACKED) != wanted:
        return False
    return all(
        isinstance(times, list)
        and len(times) == PROBED_ROWS
        and all(isinstance(time, float) and 0 < time < math.inf for time in times)
        for times in entry.values()
    )
