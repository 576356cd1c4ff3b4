"""The journal of each run and the promotion log: append-only files, from which everything else can be told again.

`home/runs/RUN_ID.jsonl` says what ran, step by step, as it happens. MLflow, the history and the registry are fed from
what it says, so any of them can be down, deleted or rebuilt without losing anything. The file is locked while its run
lives: a journal without an end that nobody holds is that of a killed run.

    {"entry": "run", "run_id", "pipeline", "params", "how", "flow_run_id", "pipeline_digest", "git_commit", ..., "time"}
    {"entry": "step", "step", "uses", "kind", "key", "session", "status", "why", "seconds", "settings", "inputs", ...}
    {"entry": "end", "status", "reason", "time"}

Every line has the digest of what it says, so that one that was changed does not count, as one that a kill has cut short
does not. `home/promotions.jsonl` is one line for each move of an alias and each newer evidence of a version;
storage/sharing.py brings those of other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from components.contract import UserError
from storage.records import PromotionRow, as_time, draftsmith_version, git_commit
from storage.whole_files import digest_of_json, replace_file


class Journal:
    """The open journal of a running pipeline. Every entry is on disk before the call returns."""

    def __init__(self, home: Path, run_id: str) -> None:
        self.path = home / "runs" / f"{run_id}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.entries: list[dict[str, Any]] = []
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @classmethod
    def start(
        cls,
        home: Path,
        pipeline: str,
        params: Mapping[str, Any],
        how: str,
        *,
        flow_run_id: str = "",
        pipeline_digest: str = "",
        may_promote: bool = True,
    ) -> Journal:
        """The journal of a new run. Its id starts with the time, so that names sort by age."""
        run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        journal = cls(home, run_id)
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(journal.close)
            journal.add(
                "run",
                run_id=run_id,
                pipeline=pipeline,
                params=dict(params),
                how=how,
                flow_run_id=flow_run_id,
                pipeline_digest=pipeline_digest,
                may_promote=may_promote,
                git_commit=git_commit(),
                draftsmith_version=draftsmith_version(),
            )
            unless_begun.pop_all()
        return journal

    def add(self, entry: str, **facts: Any) -> dict[str, Any]:
        """Append one entry."""
        since = self.entries[-1]["time"] if self.entries else 0.0
        line = {"entry": entry, **facts, "time": max(time.time(), since)}  # a clock may be put back in the middle
        _append(self._file, line)
        self.entries.append(json.loads(json.dumps(line, default=str)))
        return line

    def close(self) -> None:
        """Let go of the journal. Without an "end" entry the run counts as killed."""
        self._file.close()


def first(entries: list[dict[str, Any]], entry: str) -> dict[str, Any] | None:
    """The first entry of a kind."""
    return next((line for line in entries if line["entry"] == entry), None)


def all_runs(home: Path) -> Iterator[list[dict[str, Any]]]:
    """The journals of all ended runs, oldest first; those of killed runs are given their end."""
    for path in journals(home):
        entries = read(path)
        if first(entries, "run") is None:
            continue  # killed before its first line was whole: nothing ran
        if first(entries, "end") is None and not end_if_dead(path):
            continue  # it is running
        yield read(path)


def journals(home: Path) -> list[Path]:
    """The journals of all runs, oldest first."""
    return [path for path in sorted((home / "runs").glob("*.jsonl")) if path.is_file()]


def end_if_dead(path: Path) -> bool:
    """Write the end of a run that was killed; False when it is still alive."""
    with path.open("a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if first(read(path), "end") is None:
            last = max((line["time"] for line in read(path)), default=time.time())
            file.write("\n")  # its last line may have been cut short
            _append(
                file, {"entry": "end", "status": "killed", "reason": "the process ended without a word", "time": last}
            )
        return True


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal, without the lines that say something else than was written (`damaged_lines`)."""
    return [entry for entry in _read(path) if entry is not None]


def damaged_lines(path: Path) -> list[int]:
    """The numbers of a journal's lines, from 1, that are not as they were written; what a kill cut short is none."""
    entries = _read(path)
    damaged = [number for number, entry in enumerate(entries, start=1) if entry is None]
    kept = [entry for entry in entries if entry is not None]
    was_killed = not kept or kept[-1]["entry"] != "end" or kept[-1]["status"] == "killed"
    cut_short = len(entries) - (bool(kept) and kept[-1]["entry"] == "end")  # the last line that the run itself wrote
    return [number for number in damaged if not (was_killed and number == cut_short)]


def write_anew(path: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """Put a journal of these entries in the place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, "".join(f"{json.dumps(_signed(entry))}\n" for entry in entries), durable=True)


def _read(path: Path) -> list[dict[str, Any] | None]:
    """What each line says; None for one that is damaged. In a journal from before there were digests none has one."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    entries = [_object(line) for line in lines if line.strip()]
    is_signed = any(entry is not None and "digest" in entry for entry in entries)
    return [
        {name: value for name, value in entry.items() if name != "digest"}
        if entry is not None and "entry" in entry and (not is_signed or entry.get("digest") == _digest_of(entry))
        else None
        for entry in entries
    ]


def _object(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _digest_of(line: Mapping[str, Any]) -> str:
    """The start of the sha256 of what a line says, as it was read from JSON."""
    return digest_of_json({name: value for name, value in line.items() if name != "digest"})[:32]


def _signed(line: Mapping[str, Any]) -> dict[str, Any]:
    as_read = json.loads(json.dumps(line, default=str))
    return {**as_read, "digest": _digest_of(as_read)}


def log_promotion(home: Path, row: PromotionRow) -> None:
    """Append one line to the promotion log."""
    add_promotions(home, [row])


def add_promotions(home: Path, rows: Iterable[PromotionRow]) -> None:
    """Append the moves that the promotion log does not have yet."""
    home.mkdir(parents=True, exist_ok=True)
    with _locked_promotions(home) as file:
        known = {row.promotion_id for row in promotions(home)}
        new = [row for row in rows if row.promotion_id not in known]
        if new and not _ends_whole(promotions_file(home)):
            file.write("\n")  # its last line was cut short: the next one does not go on in it
        for row in new:
            _append(file, json.loads(as_line(row)))


def set_damaged_aside(home: Path, aside: Path) -> int:
    """Move the unreadable lines of the promotion log to a file of their own; how many they were."""
    with _locked_promotions(home):
        damaged = set(damaged_promotions(home))
        lines = list(enumerate(_lines(home), start=1))
        aside.write_text("".join(f"{line}\n" for number, line in lines if number in damaged), encoding="utf-8")
        kept = "".join(f"{line}\n" for number, line in lines if number not in damaged and line.strip())
        replace_file(promotions_file(home), kept, durable=True)
    return len(damaged)


@contextmanager
def _locked_promotions(home: Path) -> Iterator[IO[str]]:
    """The promotion log, open for appending, while nobody else writes it."""
    while True:
        with promotions_file(home).open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.fstat(file.fileno()).st_ino == promotions_file(home).stat().st_ino:  # else it was replaced meanwhile
                yield file
                return


def promotions_file(home: Path) -> Path:
    """The promotion log."""
    return home / "promotions.jsonl"


def promotions(home: Path) -> list[PromotionRow]:
    """The promotion log, oldest first, without the lines that cannot be read (`damaged_promotions`)."""
    return _promotions(home)[0]


def damaged_promotions(home: Path) -> list[int]:
    """The numbers of the promotion log's lines, from 1, that a crash or somebody's hand has left unreadable."""
    return _promotions(home)[1]


def _promotions(home: Path) -> tuple[list[PromotionRow], list[int]]:
    rows, damaged = list[PromotionRow](), list[int]()
    for number, line in enumerate(_lines(home), start=1):
        if line.strip():
            try:
                rows.append(from_line(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                damaged.append(number)
    return sorted(rows, key=lambda row: row.promoted_at), damaged  # moves made elsewhere arrive late


def _lines(home: Path) -> list[str]:
    try:
        return promotions_file(home).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except IsADirectoryError as error:
        raise UserError(
            f"{promotions_file(home)}: is a folder; `draftsmith doctor --repair` sets it aside and makes the log anew"
        ) from error


def _ends_whole(path: Path) -> bool:
    """The last line has its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def as_line(row: PromotionRow) -> str:
    """A move as one line of JSON."""
    return json.dumps(_signed({**dataclasses.asdict(row), "promoted_at": row.promoted_at.isoformat()}))


def from_line(line: str) -> PromotionRow:
    """The move that `as_line` has written; ValueError, TypeError, KeyError or AttributeError say that it is none."""
    row = json.loads(line)
    if row.pop("digest", None) not in (None, digest := _digest_of(row)):
        raise ValueError(f"it has changed since it was written: its digest is {digest}")
    return PromotionRow(**{**row, "promoted_at": as_time(row["promoted_at"])})


def _append(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(json.dumps(_signed(line)) + "\n")
    file.flush()
    os.fsync(file.fileno())
