"""Reads from the journals which artifact key every name of a past run stood for."""

from __future__ import annotations

from components.contract import UserError
from storage import journal
from storage.artifacts import Store


def keys_of_run(store: Store, run_id: str) -> dict[str, str]:
    """Name of a step or an outside input -> key, in one run; what it took over from earlier runs is looked up in those.

    Raises:
        UserError: the run has no journal here.
    """
    keys: dict[str, str] = {}
    pipeline = None
    waiting, visited = [run_id], set[str]()
    while waiting:
        current = waiting.pop(0)
        file = store.home / "runs" / f"{current}.jsonl"
        if current in visited or not file.is_file():
            continue
        visited.add(current)
        entries = journal.read(file)
        start = journal.first(entries, "run") or {}
        pipeline = pipeline or start.get("pipeline")
        if start.get("pipeline") != pipeline:
            continue
        for step in (entry for entry in entries if entry["entry"] == "step" and entry["key"]):
            keys.setdefault(step["step"], step["key"])
            for pairs in step["inputs"].values():
                for name, key in pairs:
                    keys.setdefault(name, key)
            made_in = _run_that_made(store, step["key"]) if step["status"] == "reused" else None
            waiting += [made_in] if made_in else []
    if not keys:
        raise UserError(
            f"{store.home / 'runs' / run_id}.jsonl is gone: what that run was made of is not known any more"
        )
    return keys


def _run_that_made(store: Store, key: str) -> str | None:
    """The run that has made an artifact, as far as the store knows."""
    try:
        return str(store.record_of(key)["record"].get("run_id", "")) or None
    except (OSError, ValueError):
        return None
