"""What takes room in a home (`draftsmith du`) and what of it may go (`draftsmith gc`).

Kept is what somebody may still ask for: all that the newest runs of each pipeline and every running one made or use,
and behind each version that the registry keeps its release, drafter, target and data. Features are the bulk and can be
made again, so behind a version they are not kept; of the newest runs they go when asked for, once the drafters trained
on them are there. Measurements and decisions are evidence and always stay. Of what goes the record stays, so history
and lineage lose nothing, and a plan makes it anew only where something that runs needs it (flows/planning/plan.py).
With the release of a version that is not kept go the files that MLflow serves it from; the version itself stays. A key
that somebody works on is locked and left alone. Of a shared store only this machine's copies go.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from components.files import locked
from components.rows import grouped
from storage import journal
from storage.artifacts.records import ArtifactRecord
from storage.artifacts.sessions import read_record
from storage.artifacts.store import RECORD_FILE, DamagedRecord, Store
from storage.registry.leftovers import LeftoverModel, delete_leftovers, kept_releases, leftover_models

EVIDENCE: Final = ("Measurements", "DepthPolicy")
UNFINISHED, IN_MLFLOW, OF_VERSION = "unfinished step", "model in MLflow", "files of a version in MLflow"
_FIRST = ("Features", UNFINISHED)  # the largest, and the cheapest to miss
_PLACES = {
    "partial": "unfinished steps and their checkpoints",
    "broken": "set aside by repairs",
    "mlflow": "MLflow",
    "prefect": "Prefect",
    "history": "history",
    "to_share": "journals, logs and the like",
}


@dataclass(frozen=True)
class Item:
    """Something that may go. kind: of an artifact, or one of the above; key: of artifact, model or version."""

    kind: str
    key: str
    pipeline: str
    num_bytes: int
    model: LeftoverModel | None = None


@dataclass(frozen=True)
class Use:
    """A file of a home. what: the kind of its artifact, or its place; pipeline, key: "" where it is no artifact's."""

    what: str
    pipeline: str
    key: str
    num_bytes: int


def usage(home: Path) -> list[Use]:
    """Every file of a home; one that has several names counts once."""
    records: dict[Path, ArtifactRecord | None] = {}
    visited, uses = set[tuple[int, int]](), []
    for top, _, names in os.walk(home):
        parts = Path(top).relative_to(home).parts
        for name in names:
            stat = (Path(top) / name).lstat()
            if (stat.st_dev, stat.st_ino) in visited:
                continue
            visited.add((stat.st_dev, stat.st_ino))
            depth = {"store": 2, "records": 2, "earlier": 3}.get(parts[0] if parts else "", 99)
            place = home.joinpath(*parts[:depth])
            if len(parts) >= depth and place not in records:
                records[place] = read_record(place)
            record = records.get(place)
            if record is not None:
                what = record["kind"] + (" (earlier sessions)" if depth == 3 else "")
                uses.append(Use(what, str(record["record"].get("pipeline", "")), record["key"], stat.st_size))
            elif parts[:2] == ("mlflow", "artifacts") and parts[3:4] == ("models",):
                uses.append(Use(IN_MLFLOW, "", "".join(parts[4:5]), stat.st_size))
            else:
                uses.append(Use(_PLACES.get(parts[0] if parts else "", _PLACES["to_share"]), "", "", stat.st_size))
    return uses


def find_items(home: Path, store: Store, *, runs: int, versions: int, features: bool = False) -> list[Item]:
    """What may go, in the order in which it goes: features and checkpoints first, then the largest.

    runs: of each pipeline, the newest of which all is kept. versions: of each model, the newest that are kept besides
    those with an alias. features: those of the newest runs may go too, where what was trained on them is there.
    """
    running, recent = _runs(home, runs)
    busy = set[str]().union(*map(_keys_of, running))
    kept = busy.union(*map(_keys_of, recent)) | _behind(store, kept_releases(home, versions))
    if features:
        unfinished = [entries for entries in recent if entries[-1].get("status") != "completed"]
        kept -= _trained_on(store, recent) - busy.union(*map(_keys_of, unfinished))
    facts: list[tuple[str, str, str, LeftoverModel | None]] = []
    places: list[list[Path]] = []
    for key in store.keys():  # noqa: SIM118 (a store is no mapping)
        record = _record(store, key)
        if record is None or key in kept or record["kind"] in EVIDENCE or (home / "to_share" / key).exists():
            continue
        facts.append((record["kind"], key, str(record["record"].get("pipeline", "")), None))
        places.append([store.path_of(key)])
    partial = {path.name.removesuffix(".scratch") for path in (home / "partial").glob("*")}
    for key in sorted(partial - kept):
        facts.append((UNFINISHED, key, "", None))
        places.append([home / "partial" / name for name in (key, f"{key}.scratch")])
    for one in leftover_models(home, versions, kept):
        title = one.model_id if one.version is None else f"{one.version[0]} version {one.version[1]}"
        facts.append((IN_MLFLOW if one.version is None else OF_VERSION, title, "", one))
        places.append([one.folder])
    sizes = _freed_bytes(places)
    items = [Item(kind, key, by, size, model) for (kind, key, by, model), size in zip(facts, sizes, strict=True)]
    return sorted(items, key=lambda item: (item.kind not in _FIRST, -item.num_bytes))


def collect(home: Path, store: Store, items: Iterable[Item]) -> list[Item]:
    """Let these things go; returns those that have gone. What a run has begun to use meanwhile stays."""
    began, done = time.time() - 1.0, list[Item]()
    models = [item for item in items if item.model is not None]
    for item in items:
        if item.model is not None:
            continue
        with store.lock(item.key, wait=False) as is_locked:
            if not is_locked or item.key in _begun_since(home, began):
                continue
            if item.kind == UNFINISHED:
                store.discard_staging(item.key)
            elif store.path_of(item.key).is_dir():  # else another gc was quicker
                store.collect(item.key)
            else:
                continue
            done.append(item)
    deleted = delete_leftovers(home, [item.model for item in models if item.model is not None]) if models else set()
    return done + [item for item in models if item.model in deleted]


def _runs(home: Path, newest: int) -> tuple[list[list[journal.Entry]], list[list[journal.Entry]]]:
    """The journals of running runs, and of the newest ended ones of each pipeline."""
    running, ended = list[list[journal.Entry]](), list[list[journal.Entry]]()
    journals = [(path, journal.read(path)) for path in journal.journals(home)]
    for path, entries in journals:
        if journal.first(entries, "run") is not None and not journal.is_fate(entries):
            (running if _is_running(path, entries) else ended).append(entries)
    ended.sort(key=lambda entries: float(entries[0]["time"]))  # ids of the same second do not sort by age
    fates = journal.former_pipelines(entries for _, entries in journals)
    by_pipeline = grouped(ended, lambda entries: fates.get(entries[0]["pipeline"], str(entries[0]["pipeline"])))
    by_pipeline.pop("", None)  # of pipelines that were deleted
    return running, [entries for runs in by_pipeline.values() for entries in runs[-newest:] if newest]


def _is_running(path: Path, entries: list[journal.Entry]) -> bool:
    if journal.first(entries, "end") is not None:
        return False
    with locked(path, shared=True, wait=False, mode="r") as is_free:
        return not is_free


def _begun_since(home: Path, since: float) -> set[str]:
    """The keys of runs whose journal was written after a moment (seconds since 1970)."""
    paths = [path for path in journal.journals(home) if path.stat().st_mtime >= since]
    return set[str]().union(*(_keys_of(journal.read(path)) for path in paths))


def _keys_of(entries: list[journal.Entry]) -> set[str]:
    """The keys of all artifacts that a run may make, has made or uses."""
    keys = set[str]()
    for entry in entries:
        keys.update(entry.get("keys", ()) if entry["entry"] == "run" else ())
        if entry["entry"] == "step":
            keys.update([entry["key"]], (key for pairs in entry["inputs"].values() for _, key in pairs))
    return {key.partition(".")[0] for key in keys}


def _trained_on(store: Store, runs: Iterable[list[journal.Entry]]) -> set[str]:
    """The features in some runs whose users are all in the store."""
    users: dict[str, list[str]] = {}
    for entry in (entry for entries in runs for entry in entries if entry["entry"] == "step"):
        for key in (key for pairs in entry["inputs"].values() for _, key in pairs):
            users.setdefault(key, []).append(entry["key"])
    return {
        key
        for key, its_users in users.items()
        if (record := _record(store, key)) is not None
        and record["kind"] == "Features"
        and all(user and store.path_of(user).is_dir() for user in its_users)
    }


def _behind(store: Store, releases: Iterable[str]) -> set[str]:
    """What the versions of these releases need: everything behind each but features, and drafters it went on from."""
    kept, waiting, visited = set[str](), [key for key in releases if key], set[str]()
    while waiting:
        key = waiting.pop().partition(".")[0]
        record = _record(store, key) if key not in visited else None
        visited.add(key)
        if record is None:
            continue
        if record["kind"] != "Features":
            kept.add(key)
        inputs = [str(record["info"].get(name) or "") for name in ("draft_key", "target_key")]
        for value in record["record"].get("inputs", {}).values():
            inputs += value if isinstance(value, list) else [value]
        is_earlier = [record["kind"] == "Draft" and _kind(store, one) == "Draft" for one in inputs]
        waiting += [one for one, earlier in zip(inputs, is_earlier, strict=True) if one and not earlier]
    return kept


def _kind(store: Store, key: str) -> str:
    record = _record(store, key.partition(".")[0])
    return record["kind"] if record is not None else ""


def _record(store: Store, key: str) -> ArtifactRecord | None:
    """The record of an artifact, here or collected; None where it is gone or damaged."""
    try:
        return store.record_of(key) if key else None
    except (FileNotFoundError, DamagedRecord):
        return None


def _freed_bytes(groups: Sequence[Sequence[Path]]) -> list[int]:
    """Bytes that each of these groups of folders frees when all of them go.

    A record stays, and so does a file that has another name elsewhere; one with several names here counts once.
    """
    stats = [
        [
            (Path(top) / name).lstat()
            for folder in group
            for top, _, names in os.walk(folder)
            for name in names
            if name != RECORD_FILE
        ]
        for group in groups
    ]
    names_here = Counter((stat.st_dev, stat.st_ino) for group in stats for stat in group)
    sizes = []
    for group in stats:
        freed = {
            (stat.st_dev, stat.st_ino): stat for stat in group if names_here[stat.st_dev, stat.st_ino] >= stat.st_nlink
        }
        sizes.append(sum(stat.st_size for stat in freed.values()))
        for name in freed:
            names_here[name] = 0
    return sizes


def totals(pairs: Iterable[tuple[str, str, int]]) -> list[tuple[str, int, int]]:
    """(name, how many keys, bytes), the largest first. pairs: (name, key, bytes)."""
    groups: Mapping[str, list[tuple[str, str, int]]] = grouped(list(pairs), lambda pair: pair[0])
    rows = [
        (name, len({key for _, key, _ in group} - {""}), sum(size for *_, size in group))
        for name, group in groups.items()
    ]
    return sorted(rows, key=lambda row: -row[2])
