"""What the engine and the process of a step say to each other, as JSON, and how a failure is said.

An event is an object with a field "event". Of the step itself, sent by its process: progress {done, total, what},
metrics, note {message}, set_aside {source, line, why}. Of its life, from the engine: start {attempt, log},
waiting {message}, retry {message}, reused {seconds, key}, done {seconds, key}, nothing_new {message},
failed {message}.
"""

from __future__ import annotations

import errno
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from components.outside_json import JsonObject

Event = Mapping[str, Any]
"""A step may send fields that nobody here knows."""
OnJson = Callable[[Event], None]


class ArtifactHandle(TypedDict):
    """An artifact that a step takes in, for its process to make the object of; see components/contract.py."""

    kind: str
    key: str
    path: str
    info: JsonObject


class RunConnection(TypedDict):
    """How a step's process reaches the Prefect run around it."""

    flow_run_id: str
    environment: dict[str, str]


class ClusterOrder(RunConnection):
    """The cluster that carries a step's shards (see RunsOn), and models whose own code may run on its workers."""

    step: str
    cluster: str
    workers: int | None
    address: str | None
    gpus_per_shard: float | None
    remote_code: list[str]


class StepOrder(TypedDict):
    """Everything that the process of a step needs to run it. cluster: None where the process works on shards itself."""

    address: str
    packages: list[str]
    settings: JsonObject
    inputs: dict[str, ArtifactHandle | list[ArtifactHandle]]
    key: str
    out: str
    scratch: str
    device: str
    seed: int
    num_threads: int
    machine: JsonObject
    log: str
    lock: str
    cluster: ClusterOrder | None
    remote_code: list[str]
    rehearsed: bool


class StepFailed(Exception):
    """A step failed for a reason that is not the user's input. `log`: where its output and traceback are."""

    def __init__(self, step: str, message: str, log: Path) -> None:
        super().__init__(f"step '{step}' failed: {message}")
        self.step, self.message, self.log = step, message, log


def disk_fault(error: BaseException | None, place: Path) -> str:
    """What cannot be written where, when a disk that is full or read-only is at the bottom of a failure, or ''.

    place: named where the error names no file.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return _unwritten(f"{error.filename or place}", error.errno)
        if isinstance(error, sqlite3.OperationalError):
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL:  # its low byte is the kind
                return _unwritten(f"a database in {place}", errno.ENOSPC)
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN):
                return f"a database in {place}: cannot be written ({error})"
        error = error.__cause__ or error.__context__
    return ""


def _unwritten(what: str, number: int) -> str:
    mend = "" if number == errno.EROFS else ": `draftsmith du` shows what takes room, `draftsmith gc` frees some"
    return f"{what}: cannot be written ({os.strerror(number)}){mend}"
