"""What a server has answered, one line an answer, so that no prompt is asked twice whenever the step is killed.

An answer is written in one piece as soon as it is there and synced to the disk with the next few; a kill can cost the
last line only, and a line that is not whole is cut off before anything follows it. The first line says what was asked
of whom: answers of another model must not mix with these.
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


class Answered(NamedTuple):
    """One answer. ended: by an end-of-text token. own_ids: the server's own token ids, not those of its text."""

    ids: tuple[int, ...]
    ended: bool
    own_ids: bool


class Journal:
    """The answers so far, and the file that more are added to. Use it in a `with`."""

    def __init__(self, file: Path, asked: Mapping[str, Any]) -> None:
        """asked: JSON facts that must be the same for all answers; raises UserError where the file's are others."""
        self.answers: dict[str, Answered] = {}
        self._file, self._asked = file, dict(asked)
        self._unsynced, self._synced_at = 0, time.monotonic()
        whole = self._read()
        self._handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.truncate(self._handle, whole)
        if whole == 0:
            self._write(self._asked)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.fsync(self._handle)
        os.close(self._handle)

    def add(self, prompt_id: str, answered: Answered) -> None:
        """Keep an answer; from now on it is not asked for again."""
        assert prompt_id not in self.answers, f"{prompt_id} was asked twice"
        self._write({"id": prompt_id, **answered._asdict()})
        self.answers[prompt_id] = answered
        self._unsynced += 1
        if self._unsynced >= SYNCED_LINES or time.monotonic() - self._synced_at > SYNCED_SECONDS:
            os.fsync(self._handle)
            self._unsynced, self._synced_at = 0, time.monotonic()

    def _write(self, line: Mapping[str, Any]) -> None:
        data = (json.dumps(line) + "\n").encode("ascii")
        while data:
            data = data[os.write(self._handle, data) :]

    def _read(self) -> int:
        """Take over what is there; gives the bytes of its whole lines."""
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
                    self.answers[row["id"]] = Answered(tuple(row["ids"]), row["ended"], row["own_ids"])
                whole += len(line)
        return whole

    def _check(self, found: Mapping[str, Any]) -> None:
        for name, value in self._asked.items():
            if found.get(name) != value:
                raise UserError(
                    f"{name}: an earlier attempt was answered with {found.get(name)!r}, now it would be {value!r}; "
                    "let it answer as before, or run with --force"
                )
