"""Whether files and folders that settings name are there yet; nothing is read.

What is not there may still come, as another program writes it: `check` tells it and refuses nothing, a plan that needs
it does, and says what else is wrong with them.
"""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from components.data.settings import ChatSource, workload_source
from components.data.sources.addresses import PREFIX, is_url
from components.data.sources.python_stdlib import STDLIB
from components.pipeline_checks.step_view import StepView
from components.targets.source import BUILTIN, is_hub_id
from components.text import shorten

_OF_SOURCES: Final = {
    "targets.load_target": "model",
    "data.collect_chats": "sources",
    "data.collect_workloads": "sources",
    "data.collect_prompts": "source",
}
"""Step -> the setting that names files."""


def files_not_there(steps: Sequence[StepView]) -> Iterator[str]:
    """A line for every source of data and every target that names a place on this disk where nothing is."""
    for step in steps:
        setting = _OF_SOURCES.get(step.address, "")
        value = step.settings.get(setting, [])
        for source in value if isinstance(value, list) else [value]:
            place = _place(step.address, source)
            if place and not _is_there(place):
                yield f"{step.line}: step '{step.base}': {setting}: {shorten(place)}: there is no such file or folder"


def _place(address: str, source: Any) -> str:
    """The path of a source on this disk; "" for one that is elsewhere or has none."""
    if address == "targets.load_target":
        name = str(source)
        return "" if name == BUILTIN or is_hub_id(name) else name
    if address == "data.collect_chats":
        path = ChatSource.model_validate(source).path
    elif address == "data.collect_workloads":
        path = workload_source(source).path
    else:
        path = "" if source == STDLIB else str(source)
    return "" if path.startswith(PREFIX) or is_url(path) else path


def _is_there(place: str) -> bool:
    try:
        path = Path(place).expanduser()
        return path.exists() or next(glob.iglob(str(path), recursive=True), None) is not None
    except (OSError, ValueError, RuntimeError):  # no path at all: a plan says what is wrong with it
        return False
