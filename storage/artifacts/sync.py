"""Exchanges runs, promotions and measured rows with the shared store.

`send` uploads what the shared store lacks; a run ends with it. `catch_up` downloads what other machines have uploaded:
journals of their runs, moves in the promotion log, and the measured rows of their artifacts, which become Parquet files
of this home's history like its own. Nothing is recorded twice, since every file is named by its content. A shared store
that does not answer is one line in its `problems`, never a failure.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from components.contract import UserError
from components.files import write_whole
from components.rows import TABLES
from components.text import message_of
from storage import journal
from storage.artifacts.remote import RemoteStore, shared_store
from storage.artifacts.store import RECORD_FILE, Store
from storage.history.files import history_dir, is_known
from storage.history.records import PromotionRow
from storage.history.write import record_artifact, record_promotion, record_run

CATCH_UP_EVERY_S = 5.0  # a program that runs many queries catches up once
_last_catch_up: dict[Path, float] = {}


def send(home: Path, *, everything: bool = False) -> None:
    """Upload what the shared store lacks: artifacts that could not be sent, journals of ended runs, promotions.

    everything: all artifacts of this home, also those made before it had a shared store.
    """
    remote = shared_store()
    if remote is None:
        return
    store = Store(home)
    for key in store.keys() if everything else _unsent_keys(home):
        with store.lock(key, wait=False) as is_locked:
            if is_locked:  # else another process does it
                _upload(store, remote, key)
    present = remote.names("runs")
    for path in sorted((home / "runs").glob("*.jsonl")) if present is not None else []:
        if path.name not in (present or ()) and journal.first(journal.read(path), "end") is not None:
            remote.write_text(f"runs/{path.name}", path.read_text(encoding="utf-8"))
    present = remote.names("promotions")
    for row in journal.promotions(home) if present is not None else []:
        if f"{row.promotion_id}.json" not in (present or ()):
            send_promotion(row)


def send_promotion(row: PromotionRow) -> None:
    """Upload a move at once, so that other machines do not take it for one made by hand."""
    remote = shared_store()
    if remote is not None:
        remote.write_text(f"promotions/{row.promotion_id}.json", journal.as_line(row))


def catch_up(home: Path) -> None:
    """Download what other machines have uploaded since the last call into the history of this home."""
    remote = shared_store()
    if remote is None or time.monotonic() - _last_catch_up.get(home, float("-inf")) < CATCH_UP_EVERY_S:
        return
    _fetch_promotions(home, remote)
    _fetch_runs(home, remote)
    _fetch_rows(home, remote)
    _last_catch_up[home] = time.monotonic()


def catch_up_promotions(home: Path) -> None:
    """Download the promotions made on other machines: a champion that was moved there was not moved by hand."""
    remote = shared_store()
    if remote is not None:
        _fetch_promotions(home, remote)


def _upload(store: Store, remote: RemoteStore, key: str) -> None:
    try:
        store.share(key)
    except (OSError, ValueError) as error:  # its artifact.json was cut short: the next run that needs it makes it anew
        remote.problems.append(f"{key[:12]} is not sent to {remote.url}, it cannot be read: {message_of(error)}")


def _unsent_keys(home: Path) -> list[str]:
    folder = home / "to_share"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _fetch_promotions(home: Path, remote: RemoteStore) -> None:
    logged = {f"{row.promotion_id}.json" for row in journal.promotions(home)}
    new = sorted((remote.names("promotions") or set()) - logged)
    lines = [text for name in new if (text := remote.read_text(f"promotions/{name}")) is not None]
    rows = [journal.from_line(line) for line in lines]
    if rows:
        journal.add_promotions(home, rows)
    for row in rows:
        record_promotion(home, row)


def _fetch_runs(home: Path, remote: RemoteStore) -> None:
    folder = home / "runs"
    present = {path.name for path in folder.glob("*.jsonl")}
    for name in sorted((remote.names("runs") or set()) - present):
        text = remote.read_text(f"runs/{name}")
        if text is not None:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, text)
            record_run(home, journal.read(folder / name))


def _fetch_rows(home: Path, remote: RemoteStore) -> None:
    """Record the rows of artifacts that are new or made anew in the shared store, and of their earlier sessions."""
    marks, processed = remote.keys() or {}, _processed_marks(home)
    earlier = {name.removesuffix(".json"): "" for name in remote.names("earlier") or ()}
    remade = {name.partition(".")[0] for name in earlier}
    changed = {name: mark for name, mark in {**marks, **earlier}.items() if processed.get(name) != mark}
    new_marks = {
        name: mark
        for name, mark in changed.items()
        if (name not in processed and name not in remade and is_known(home, "artifact", name))  # it was made here
        or _record_rows(home, remote, name)
    }
    if new_marks:
        write_whole(_marks_file(home), json.dumps({**processed, **new_marks}))


def _record_rows(home: Path, remote: RemoteStore, key: str) -> bool:
    """Record the rows of one artifact (KEY, or KEY.SESSION); False when it should be tried again later."""
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-rows-"))
    try:
        content = remote.download(key, folder / key, only=lambda name: name in {f"{table}.jsonl" for table in TABLES})
        if content is None:
            return False
        (folder / key / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")
        record_artifact(home, folder / key)
    except UserError as error:  # made by another version of Draftsmith, with other columns
        remote.problems.append(f"rows of {key[:12]} in {remote.url} are left out: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _processed_marks(home: Path) -> dict[str, str]:
    try:
        return dict(json.loads(_marks_file(home).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # a rebuild of the history deletes it, and everything is downloaded again


def _marks_file(home: Path) -> Path:
    folder = history_dir(home)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "_shared.json"
