"""What is damaged in a home, and how it is mended: from sealed artifacts, journals and the promotion log.

Nothing is thrown away: an artifact that is not whole goes to `broken/`, where an earlier version of the history and
unreadable lines of the promotion log go too. What has to be made anew is made by the next run that needs it.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from components.contract import UserError
from storage import journal
from storage.artifacts import Store
from storage.history import files_of, history_dir
from storage.results import damaged_files, rebuild
from storage.schema import all_tables


@dataclass(frozen=True)
class Damage:
    """Something that cannot be read. where: "artifact", "history" or "promotions". name: a key, file or line."""

    where: str
    name: str
    why: str


def damages(home: Path, store: Store) -> Iterator[Damage]:
    """Everything that is damaged; every file of every artifact is read, and nothing is changed."""
    for key in store.keys():  # noqa: SIM118 (a method of the store)
        found = store.look(key, anew=True)
        if found.artifact is None and found.why != "absent":
            yield Damage("artifact", key, found.why)
    for line in journal.damaged_promotions(home):
        yield Damage("promotions", f"line {line} of {journal.promotions_file(home).name}", "cannot be read")
    if history_dir(home).is_dir():
        yield from _of_history(home)


def repair(home: Path, store: Store) -> list[str]:
    """Mend what `damages` finds; what was done, a line each."""
    found = list(damages(home, store))
    said = []
    for damage in found:
        if damage.where == "artifact":
            with store.lock(damage.name):
                said.append(f"{damage.name[:12]} ({damage.why}) is set aside in {store.set_aside(damage.name)}")
    if any(damage.where == "promotions" for damage in found):
        aside = _place(home, "promotions.jsonl")
        number = journal.set_damaged_aside(home, aside)
        said.append(f"{number} unreadable lines of the promotion log are set aside in {aside}")
    if any(damage.where == "history" for damage in found):
        kept = _place(home, "history")
        shutil.copytree(history_dir(home), kept)
        counts = rebuild(home, store)
        made = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        said.append(f"the history is made anew ({made or 'nothing to put into it'}); what it was is in {kept}")
    return said


def _of_history(home: Path) -> Iterator[Damage]:
    try:
        for table in all_tables():
            if (history_dir(home) / table).is_dir():
                files_of(home, table)
    except UserError as error:
        yield Damage("history", table, str(error).partition(";")[0])
        return
    for file in damaged_files(home):
        yield Damage("history", str(file.relative_to(history_dir(home))), "is torn or has changed")


def _place(home: Path, name: str) -> Path:
    (home / "broken").mkdir(parents=True, exist_ok=True)
    return home / "broken" / f"{name}.{time.time_ns()}.{os.getpid()}"
