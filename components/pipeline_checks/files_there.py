"""Whether files that settings name are there yet; their content is not read.

What is not there may still come, as another program writes it: `check` tells it and refuses nothing, a plan that needs
it does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from components.contract import UserError
from components.data.settings import ChatSource, workload_source
from components.data.sources.addresses import PREFIX, is_url
from components.data.sources.listing import find_files, list_files, local_files
from components.data.sources.python_stdlib import STDLIB
from components.pipeline_checks.step_view import StepView
from components.targets.source import local_folder
from components.text import shorten


def files_not_there(steps: Sequence[StepView]) -> Iterator[str]:
    """A line for every source of data and every target that names files on this disk and has none."""
    for step in steps:
        setting = _OF_SOURCES.get(step.address, "")
        value = step.settings.get(setting, [])
        for source in value if isinstance(value, list) else [value]:
            try:
                _find_source(step.address, source)
            except UserError as error:
                yield f"{step.line}: step '{step.base}': {shorten(error)}"


_OF_SOURCES: Final = {
    "targets.load_target": "model",
    "data.collect_chats": "sources",
    "data.collect_workloads": "sources",
    "data.collect_prompts": "source",
}
"""Step -> the setting that names files."""


def _find_source(address: str, source: object) -> None:
    """Find the files of one source, without reading them; raises UserError where a source here has none."""
    if address == "data.collect_chats":
        chats = ChatSource.model_validate(source)
        if chats.hub is None and chats.path and not is_url(chats.path):
            list_files(chats)
    elif address == "data.collect_workloads":
        workloads = workload_source(source)  # type: ignore[arg-type]  # its settings were checked
        if workloads.path and not workloads.path.startswith(PREFIX):
            local_files(workloads)
    elif address == "data.collect_prompts" and source != STDLIB and not str(source).startswith(PREFIX):
        find_files(str(source))
    elif address == "targets.load_target" and local_folder(str(source)) is None:
        name = str(source)
        if name.startswith((".", "/", "~")) or name.count("/") != 1:  # else a hub id
            raise UserError(f"model: {name}: no such folder here yet")
