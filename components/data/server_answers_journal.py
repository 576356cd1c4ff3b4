"""A journal of a server's answers, one JSON line each, so that a killed step asks for no prompt twice.

An answer is written in one piece as soon as it has come and synced to the disk with the next few. A kill can cost only
the last line; an incomplete line is cut off before another is appended. The first line (the header) names the model and
the prompts, because answers of another model must not mix with these.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from components.contract import UserError

SYNCED_LINES: Final = 32
SYNCED_SECONDS: Final = 1.0


class ServerAnswer(NamedTuple):
    """One answer. ended: by an end-of-text token. own_ids: the server sent the ids; else its text was tokenised."""

    ids: tuple[int, ...]
    ended: bool
    own_ids: bool


class Journal:
    """The answers so far and the file that more are appended to; a context manager."""

    def __init__(self, file: Path, header: Mapping[str, Any]) -> None:
        """header: JSON facts that hold for all answers; raises UserError where those in the file differ."""
        self.answers: dict[str, ServerAnswer] = {}
        self._file, self._header = file, dict(header)
        self._unsynced, self._synced_at = 0, time.monotonic()
        whole = self._read()
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.truncate(self._handle, whole)
        if whole == 0:
            self._write(self._header)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._handle)
        os.close(self._handle)

    def add(self, prompt_id: str, answer: ServerAnswer) -> None:
        """Append an answer."""
        assert prompt_id not in self.answers, f"{prompt_id} was asked twice"
        self._write({"id": prompt_id, **answer._asdict()})
        self.answers[prompt_id] = answer
        self._unsynced += 1
        if self._unsynced >= SYNCED_LINES or time.monotonic() - self._synced_at > SYNCED_SECONDS:
            os.fsync(self._handle)
            self._unsynced, self._synced_at = 0, time.monotonic()

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode("ascii")
        while data:
            data = data[os.write(self._handle, data) :]

    def _read(self) -> int:
        """Read the existing answers; returns the number of bytes of complete lines."""
        if not self._file.is_file():
            return 0
        whole = 0
        with self._file.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    row = json.loads(line) if line.endswith(b"\n") else None
                except ValueError:  # after a power cut: blocks of zeros
                    row = None
                if not isinstance(row, dict):
                    break
                if number == 0:
                    self._check(row)
                else:
                    self.answers[row["id"]] = ServerAnswer(tuple(row["ids"]), row["ended"], row["own_ids"])
                whole += len(line)
        return whole

    def _check(self, stored: Mapping[str, Any]) -> None:
        for name, value in self._header.items():
            if stored.get(name) != value:
                raise UserError(
                    f"{name}: an earlier attempt was answered with {stored.get(name)!r}, now it would be {value!r}; "
                    "let it answer as before, or run with --force"
                )
