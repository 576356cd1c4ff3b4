"""A store with the records of a whole lineage beside each other, as the engine leaves them: chats to a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from components.contract import KINDS, Artifact

KEYS = {name: name[0] * 8 + name.encode().hex().ljust(56, "0")[:56] for name in (
    "chats", "clean", "mix", "answers", "features", "test"
)}  # fmt: skip
VERSIONS = {"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6", "prefect": "3.8.8"}
MACHINE = {"machine_id": "m1", "cpu_model": "A", "num_cores": 2, "ram_gib": 8.0, "device": "cpu", "device_name": "A"}


def put(store: Path, key: str, kind: str, uses: str, info: dict[str, Any], **more: Any) -> Artifact:
    """One finished artifact in a store; more: settings, inputs, files."""
    folder = store / key
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "uses": uses,
        "settings": more.get("settings", {}),
        "inputs": more.get("inputs", {}),
        "seed": 0,
        "versions": VERSIONS,
        "machine": {**MACHINE, "os": "Linux on a host"},
        "git_commit": "c" * 40,
        "git_changed": False,
        "parts": {"code": {"components/x.py: f": "0" * 64}},
    }
    content = {"key": key, "kind": kind, "info": info, "record": record, "files": {}, "finished_at": 1.0}
    (folder / "artifact.json").write_text(json.dumps(content))
    return KINDS[kind](key=key, path=folder, info=info)


def put_training_data(store: Path, target_key: str) -> str:
    """Two sources, cleaned of what is benchmarked, mixed, answered, recorded; gives the key of the features."""
    k = KEYS
    by_source = {
        "english": {"read": 900, "kept": 850, "licence": "Apache-2.0"},
        "chinese": {"read": 800, "kept": 790},
    }
    sources = [{"path": str(store / "secret-project" / "en.jsonl"), "name": "english"}]
    put(store, k["chats"], "Chats", "data.collect_chats", {"by_source": by_source}, settings={"sources": sources})
    put(store, k["test"], "Prompts", "data.mix_chats", {"num_test": 24}, inputs={"chats": [k["chats"]]})
    dropped = {"contaminated": 133, "exact_duplicate": 21}
    settings = {"benchmark_ngram": 13, "benchmark_overlap": 0.3}
    inputs = {"chats": [k["chats"]], "keep_out": [k["test"]]}
    facts = {"dropped": dropped, "num_benchmark_texts": 264, "similarity": 0.8}
    put(store, k["clean"], "Chats", "data.deduplicate", facts, settings=settings, inputs=inputs)
    facts = {"num_train": 256, "num_validation": 48, "dropped": {"evaluation_side": 16}}
    put(store, k["mix"], "Prompts", "data.mix_chats", facts, inputs={"chats": [k["clean"]]})
    facts = {"num_rows": {"train": 256, "validation": 48}, "num_tokens": 22048, "num_answer_tokens": 12750}
    facts |= {"languages": {"en": 10539, "zh": 2211}}
    put(
        store,
        k["answers"],
        "Conversations",
        "data.write_answers",
        facts,
        inputs={"target": target_key, "prompts": k["mix"]},
    )
    given = {"target": target_key, "answers": k["answers"]}
    put(store, k["features"], "Features", "data.record_features", {"num_tokens": 22048}, inputs=given)
    return k["features"]
