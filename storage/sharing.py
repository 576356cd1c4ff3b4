"""What all users know: runs, promotions and measured rows go to the shared store and come from there.

`send` puts there what this home has and the shared store lacks; a run ends with it. `catch_up` brings what others have
put there: journals of their runs, moves in the promotion log, and of their artifacts the rows only, which become
Parquet files of this home's history like its own. Nothing is said twice: every file is named by what it says. A shared
store that does not answer is one line in its `problems`, never a failure.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from components.contract import UserError
from components.rows import TABLES
from storage import journal
from storage.artifacts import RECORD_FILE, Store
from storage.history import history_dir, is_known
from storage.records import PromotionRow
from storage.remote_store import RemoteStore, shared_store
from storage.whole_files import replace_file

SECONDS_BETWEEN_LOOKS = 5.0  # a program that asks many questions looks for news once
_looked: dict[Path, float] = {}


def send(home: Path, *, everything: bool = False) -> None:
    """Put into the shared store what it lacks: artifacts that could not be sent, journals of ended runs, promotions.

    everything: all artifacts of this home, also those made before it had a shared store.
    """
    remote = shared_store()
    if remote is None:
        return
    store = Store(home)
    for key in store.keys() if everything else _left_over(home):
        with store.lock(key, wait=False) as held:
            if held:  # else somebody is at it
                _share(store, remote, key)
    there = remote.names("runs")
    for path in sorted((home / "runs").glob("*.jsonl")) if there is not None else []:
        if path.name not in (there or ()) and journal.first(journal.read(path), "end") is not None:
            remote.write_text(f"runs/{path.name}", path.read_text(encoding="utf-8"))
    there = remote.names("promotions")
    for row in journal.promotions(home) if there is not None else []:
        if f"{row.promotion_id}.json" not in (there or ()):
            send_promotion(row)


def send_promotion(row: PromotionRow) -> None:
    """Tell other machines of a move at once, so that they do not take it for one made by hand."""
    remote = shared_store()
    if remote is not None:
        remote.write_text(f"promotions/{row.promotion_id}.json", journal.as_line(row))


def catch_up(home: Path) -> None:
    """Bring what other machines have put into the shared store since the last look into the history of this home."""
    remote = shared_store()
    if remote is None or time.monotonic() - _looked.get(home, float("-inf")) < SECONDS_BETWEEN_LOOKS:
        return
    _bring_promotions(home, remote)
    _bring_runs(home, remote)
    _bring_rows(home, remote)
    _looked[home] = time.monotonic()


def catch_up_promotions(home: Path) -> None:
    """Bring the promotions made on other machines: a champion that was moved there was not moved by hand."""
    remote = shared_store()
    if remote is not None:
        _bring_promotions(home, remote)


def _share(store: Store, remote: RemoteStore, key: str) -> None:
    try:
        store.share(key)
    except (OSError, ValueError) as error:  # its artifact.json was cut short: the next run that needs it makes it anew
        said = " ".join(str(error).split())
        remote.problems.append(f"{key[:12]} is not sent to {remote.url}, it cannot be read: {said}")


def _left_over(home: Path) -> list[str]:
    folder = home / "to_share"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _bring_promotions(home: Path, remote: RemoteStore) -> None:
    from storage.results import remember_promotion

    known = {f"{row.promotion_id}.json" for row in journal.promotions(home)}
    new = sorted((remote.names("promotions") or set()) - known)
    lines = [text for name in new if (text := remote.read_text(f"promotions/{name}")) is not None]
    rows = [journal.from_line(line) for line in lines]
    if rows:
        journal.add_promotions(home, rows)
    for row in rows:
        remember_promotion(home, row)


def _bring_runs(home: Path, remote: RemoteStore) -> None:
    from storage.results import remember_run

    folder = home / "runs"
    known = {path.name for path in folder.glob("*.jsonl")}
    for name in sorted((remote.names("runs") or set()) - known):
        text = remote.read_text(f"runs/{name}")
        if text is not None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / name, text)
            remember_run(home, journal.read(folder / name))


def _bring_rows(home: Path, remote: RemoteStore) -> None:
    """The rows of artifacts that are new there, or were made anew there, and of what these were before."""
    marks, seen = remote.keys() or {}, _seen(home)
    earlier = {name.removesuffix(".json"): "" for name in remote.names("earlier") or ()}
    remade = {name.partition(".")[0] for name in earlier}
    changed = {name: mark for name, mark in {**marks, **earlier}.items() if seen.get(name) != mark}
    news = {
        name: mark
        for name, mark in changed.items()
        if (name not in seen and name not in remade and is_known(home, "artifact", name))  # it was made here
        or _remember_rows(home, remote, name)
    }
    if news:
        replace_file(_seen_file(home), json.dumps({**seen, **news}))


def _remember_rows(home: Path, remote: RemoteStore, key: str) -> bool:
    """Bring the rows of one artifact (KEY, or KEY.SESSION); False when there is reason to try again."""
    from storage.results import remember_artifact

    folder = Path(tempfile.mkdtemp(prefix="draftsmith-rows-"))
    try:
        content = remote.download(key, folder / key, only=lambda name: name in {f"{table}.jsonl" for table in TABLES})
        if content is None:
            return False
        (folder / key / RECORD_FILE).write_text(json.dumps(content), encoding="utf-8")
        remember_artifact(home, folder / key)
    except UserError as error:  # made by another version of Draftsmith, with other columns
        remote.problems.append(f"rows of {key[:12]} in {remote.url} are left out: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True


def _seen(home: Path) -> dict[str, str]:
    try:
        return dict(json.loads(_seen_file(home).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # it goes with the history when that is rebuilt, and everything is brought again


def _seen_file(home: Path) -> Path:
    folder = history_dir(home)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "_shared.json"
