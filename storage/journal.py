"""The journal of each run and the promotion log: append-only files, from which all other records can be made again.

`home/runs/RUN_ID.jsonl` gets a line for each step of a run, as it happens. MLflow, the history and the registry are
filled from it, so any of them can be down, deleted or rebuilt without losing anything. The file is locked while its run
lives: a journal without an end whose lock is free is that of a killed run.

    {"entry": "run", "run_id", "pipeline", "params", "how", "flow_run_id", "pipeline_digest", "git_commit", ..., "time"}
    {"entry": "step", "step", "uses", "kind", "key", "session", "status", "why", "seconds", "settings", "inputs", ...}
    {"entry": "end", "status", "reason", "time"}

Every line has a digest of its content: a line that was changed does not count, nor does one that a kill has cut short.
`home/promotions.jsonl` has one line for each move of an alias and each newer evidence of a version;
storage/artifacts/sync.py adds those of other machines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from components.contract import UserError
from components.files import digest_of_json, try_lock, wait_for_lock, write_whole
from components.outside_json import JsonObject
from components.source_code import code_state
from storage.history.records import PromotionRow, as_time, draftsmith_version

Entry = JsonObject
"""One entry of a journal: a JSON object with the fields of its kind (`entry`), listed above."""
_LOOKED_AT = 50  # journals in which a new run looks for runs that died; `resync` looks at all


class Journal:
    """The open journal of a running pipeline. Every entry is on disk before the call returns."""

    def __init__(self, home: Path, run_id: str) -> None:
        self.path = home / "runs" / f"{run_id}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.entries: list[Entry] = []
        self._file: IO[str] = self.path.open("a", encoding="utf-8")
        if not try_lock(self._file):
            raise BlockingIOError(f"{self.path}: another process writes this journal")

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
        keys: Sequence[str] = (),
        trial: bool = False,
    ) -> Journal:
        """The journal of a new run. Its id starts with the time, so that names sort by age.

        keys: of all artifacts that it may make or use, which `draftsmith gc` leaves alone.
        """
        run_id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:8]}"
        journal = cls(home, run_id)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(journal.close)
            journal.add(
                "run",
                run_id=run_id,
                pipeline=pipeline,
                params=dict(params),
                how=how,
                flow_run_id=flow_run_id,
                pipeline_digest=pipeline_digest,
                may_promote=may_promote,
                keys=list(keys),
                trial=trial,
                git_commit=code_state().commit,
                draftsmith_version=draftsmith_version(),
            )
            on_failure.pop_all()
        return journal

    def add(self, entry: str, **facts: Any) -> Entry:
        """Append one entry."""
        since = self.entries[-1]["time"] if self.entries else 0.0
        line = {"entry": entry, **facts, "time": max(time.time(), since)}  # a clock may be put back in the middle
        _append_line(self._file, line)
        self.entries.append(json.loads(json.dumps(line, default=str)))
        return line

    def close(self) -> None:
        """Close the journal and release its lock. Without an "end" entry the run counts as killed."""
        self._file.close()


def first(entries: list[Entry], entry: str) -> Entry | None:
    """The first entry of a kind."""
    return next((line for line in entries if line["entry"] == entry), None)


def is_trial(entries: list[Entry]) -> bool:
    """Whether the releases of a run stay out of the registry."""
    return bool((first(entries, "run") or {}).get("trial", False))


def note_fate(home: Path, pipeline: str, reason: str, *, to: str = "") -> list[Entry]:
    """Note that a pipeline was deleted, or renamed `to` another name, as a last run of its own; returns its journal."""
    with contextlib.closing(
        Journal.start(home, pipeline, {"to": to} if to else {}, "rename" if to else "delete")
    ) as log:
        log.add("end", status="completed", reason=reason)
    return log.entries


def is_fate(entries: list[Entry]) -> bool:
    """Whether this is no run but the note that its pipeline was deleted or renamed."""
    return (first(entries, "run") or {}).get("how") in ("delete", "rename")


def former_pipelines(runs: Iterable[list[Entry]]) -> dict[str, str]:
    """The pipelines that were deleted, and not run since, as NAME -> "", and those renamed as NAME -> present name.

    runs: the entries of all journals.
    """
    fates: dict[str, str] = {}
    for start in sorted((first(entries, "run") or {} for entries in runs), key=lambda e: e.get("time", 0.0)):
        if start.get("how") in ("delete", "rename"):
            fates[start["pipeline"]] = str(start["params"].get("to", ""))
            fates.pop(fates[start["pipeline"]], None)
        elif start:
            fates.pop(start["pipeline"], None)
    for name in fates:
        while fates[name] in fates:  # renamed again; it ends, since a name that is taken again is no former one
            fates[name] = fates[fates[name]]
    return fates


def all_runs(home: Path) -> Iterator[list[Entry]]:
    """The journals of all ended runs, oldest first; those of killed runs are given their end."""
    for path in journals(home):
        entries = read(path)
        if first(entries, "run") is None:
            continue  # killed before its first line was whole: nothing ran
        if first(entries, "end") is None and not end_if_dead(path):
            continue  # it is running
        yield read(path)


def newly_dead_runs(home: Path) -> Iterator[list[Entry]]:
    """The journals of killed runs that had no end yet, which they are given; only the newest are looked at."""
    for path in journals(home)[-_LOOKED_AT:]:
        entries = read(path)
        if first(entries, "run") is not None and first(entries, "end") is None and end_if_dead(path):
            yield read(path)


def journals(home: Path) -> list[Path]:
    """The journals of all runs, oldest first."""
    return [path for path in sorted((home / "runs").glob("*.jsonl")) if path.is_file()]


def end_if_dead(path: Path) -> bool:
    """Write the end of a run that was killed; False when it is still alive."""
    with path.open("a", encoding="utf-8") as file:
        if not try_lock(file):
            return False
        entries = read(path)
        if first(entries, "end") is None:
            last = max((line["time"] for line in entries), default=time.time())
            start = first(entries, "run")
            reason = "the process ended without a word" + (goes_on(start["pipeline"]) if start else "")
            file.write("\n")  # its last line may have been cut short
            _append_line(file, {"entry": "end", "status": "killed", "reason": reason, "time": last})
        return True


def goes_on(pipeline: str) -> str:
    """What to do after a run that was killed or cancelled, to end its reason with."""
    return f"; `draftsmith run {pipeline}` goes on from what is finished"


def read(path: Path) -> list[Entry]:
    """The entries of a journal, without its damaged lines (`damaged_lines`)."""
    return [entry for entry in _read_entries(path) if entry is not None]


def damaged_lines(path: Path) -> list[int]:
    """The numbers, from 1, of lines that are not as they were written; a line that a kill cut short does not count."""
    entries = _read_entries(path)
    damaged = [number for number, entry in enumerate(entries, start=1) if entry is None]
    readable = [entry for entry in entries if entry is not None]
    was_killed = not readable or readable[-1]["entry"] != "end" or readable[-1]["status"] == "killed"
    cut_short = len(entries) - (
        bool(readable) and readable[-1]["entry"] == "end"
    )  # the last line that the run itself wrote
    return [number for number in damaged if not (was_killed and number == cut_short)]


def write_anew(path: Path, entries: Iterable[Entry]) -> None:
    """Replace a journal by one of these entries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(f"{json.dumps(_with_digest(entry))}\n" for entry in entries), durable=True)


def _read_entries(path: Path) -> list[Entry | None]:
    """The entry of each line, None for a damaged line. In a journal from before there were digests no line has one."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    entries = [_parse_object(line) for line in lines if line.strip()]
    is_signed = any(entry is not None and "digest" in entry for entry in entries)
    return [
        {name: value for name, value in entry.items() if name != "digest"}
        if entry is not None and "entry" in entry and (not is_signed or entry.get("digest") == _digest_of(entry))
        else None
        for entry in entries
    ]


def _parse_object(line: str) -> Entry | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _digest_of(line: Entry) -> str:
    """The first 32 hex digits of the sha256 of a line's content without its digest."""
    return digest_of_json({name: value for name, value in line.items() if name != "digest"})[:32]


def _with_digest(line: Entry) -> Entry:
    content = json.loads(json.dumps(line, default=str))
    return {**content, "digest": _digest_of(content)}


def log_promotion(home: Path, row: PromotionRow) -> None:
    """Append one line to the promotion log."""
    add_promotions(home, [row])


def add_promotions(home: Path, rows: Iterable[PromotionRow]) -> None:
    """Append the moves that the promotion log does not have yet."""
    home.mkdir(parents=True, exist_ok=True)
    with _locked_promotions(home) as file:
        logged_ids = {row.promotion_id for row in promotions(home)}
        new = [row for row in rows if row.promotion_id not in logged_ids]
        if new and not _ends_whole(promotions_file(home)):
            file.write("\n")  # its last line was cut short: the next one does not go on in it
        for row in new:
            _append_line(file, json.loads(as_line(row)))


def set_damaged_aside(home: Path, aside: Path) -> int:
    """Move the unreadable lines of the promotion log to the file `aside`; returns their number."""
    with _locked_promotions(home):
        damaged = set(damaged_promotions(home))
        lines = list(enumerate(_promotion_lines(home), start=1))
        aside.write_text("".join(f"{line}\n" for number, line in lines if number in damaged), encoding="utf-8")
        readable = "".join(f"{line}\n" for number, line in lines if number not in damaged and line.strip())
        write_whole(promotions_file(home), readable, durable=True)
    return len(damaged)


def change_mark(home: Path, name: str, before: str, now: str) -> None:
    """Replace a mark (the fact `name`) in the entries of the promotion log that bear it: this home is a copy."""
    if not promotions_file(home).is_file():
        return
    with _locked_promotions(home):
        lines = []
        for line in _promotion_lines(home):
            row = _move_of(line)
            numbers = json.loads(row.numbers) if row is not None else {}
            if row is None or numbers.get(name) != before:
                lines.append(line)
            else:
                lines.append(as_line(dataclasses.replace(row, numbers=json.dumps({**numbers, name: now}))))
        write_whole(promotions_file(home), "\n".join(lines), durable=True)


@contextmanager
def _locked_promotions(home: Path) -> Iterator[IO[str]]:
    """The promotion log, opened for appending and locked."""
    while True:
        with promotions_file(home).open("a+", encoding="utf-8") as file:
            wait_for_lock(file)
            if os.fstat(file.fileno()).st_ino == promotions_file(home).stat().st_ino:  # else it was replaced meanwhile
                yield file
                return


def promotions_file(home: Path) -> Path:
    """The promotion log."""
    return home / "promotions.jsonl"


def promotions(home: Path) -> list[PromotionRow]:
    """The promotion log, oldest first, without the lines that cannot be read (`damaged_promotions`)."""
    return _read_promotions(home)[0]


def damaged_promotions(home: Path) -> list[int]:
    """The numbers of the promotion log's lines, from 1, that a crash or somebody's hand has left unreadable."""
    return _read_promotions(home)[1]


def _read_promotions(home: Path) -> tuple[list[PromotionRow], list[int]]:
    rows, damaged = list[PromotionRow](), list[int]()
    for number, line in enumerate(_promotion_lines(home), start=1):
        row = _move_of(line)
        if row is not None:
            rows.append(row)
        elif line.strip():
            damaged.append(number)
    return sorted(rows, key=lambda row: row.promoted_at), damaged  # moves made elsewhere arrive late


def _move_of(line: str) -> PromotionRow | None:
    """The move in a line of the promotion log; None where it cannot be read."""
    try:
        return from_line(line)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _promotion_lines(home: Path) -> list[str]:
    try:
        return promotions_file(home).read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        return []
    except IsADirectoryError as error:
        raise UserError(
            f"{promotions_file(home)}: is a folder; `draftsmith doctor --repair` sets it aside and makes the log anew"
        ) from error


def _ends_whole(path: Path) -> bool:
    """Whether the file is empty or its last line has an end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) in (b"", b"\n")


def as_line(row: PromotionRow) -> str:
    """A move as one line of JSON."""
    return json.dumps(_with_digest({**dataclasses.asdict(row), "promoted_at": row.promoted_at.isoformat()}))


def from_line(line: str) -> PromotionRow:
    """The move that `as_line` has written; ValueError, TypeError, KeyError or AttributeError say that it is none."""
    row = json.loads(line)
    if row.pop("digest", None) not in (None, digest := _digest_of(row)):
        raise ValueError(f"it has changed since it was written: its digest is {digest}")
    return PromotionRow(**{**row, "promoted_at": as_time(row["promoted_at"])})


def _append_line(file: IO[str], line: Entry) -> None:
    file.write(json.dumps(_with_digest(line)) + "\n")
    file.flush()
    os.fsync(file.fileno())
