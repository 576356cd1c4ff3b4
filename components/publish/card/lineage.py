"""The lineage of an artifact: everything that it was made from, read from the store's `artifact.json` files.

A step gets only its inputs, but a release has to state where everything came from. The artifacts of a store lie side by
side under their keys; one that is no longer there is listed by its key, without facts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from components.contract import Artifact
from components.outside_json import JsonObject

RECORD = "artifact.json"


@dataclass(frozen=True)
class ArtifactRecord:
    """How one artifact was made. has_record: False where its record is not on this machine; then only key is set.

    inputs: parameter -> keys. versions: library -> version. code: sha256 of all code that its step reaches, "" in old
    records. commit: of Draftsmith, "" outside a clone. changed: whether files differed from it. files: name -> sha256.
    """

    key: str
    has_record: bool = False
    kind: str = ""
    uses: str = ""
    info: JsonObject = field(default_factory=dict)
    settings: JsonObject = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: JsonObject = field(default_factory=dict)
    seed: int | None = None
    code: str = ""
    commit: str = ""
    changed: bool | None = None
    files: Mapping[str, str] = field(default_factory=dict)


Lineage = Mapping[str, ArtifactRecord]
"""Key -> the record of that artifact."""


def lineage_of(artifacts: Iterable[Artifact]) -> dict[str, ArtifactRecord]:
    """The records of these artifacts and of everything that they were made from, each once, sources last."""
    records: dict[str, ArtifactRecord] = {}
    waiting = [(artifact.key, artifact.path) for artifact in artifacts]
    while waiting:
        key, folder = waiting.pop(0)
        if key in records and records[key].has_record:
            continue
        record = records[key] = _read_record(key, folder)
        waiting += [(one, folder.parent / one) for keys in record.inputs.values() for one in keys]
    return records


def ancestors(lineage: Lineage, key: str, *, without: Collection[str] = ()) -> list[ArtifactRecord]:
    """The records of an artifact and of what it was made from, sources last. without: parameters not to follow."""
    records: dict[str, ArtifactRecord] = {}
    waiting = [key]
    while waiting:
        one = waiting.pop(0)
        if one in records or one not in lineage:
            continue
        record = records[one] = lineage[one]
        waiting += [each for name, keys in record.inputs.items() if name not in without for each in keys]
    return list(records.values())


def _read_record(key: str, folder: Path) -> ArtifactRecord:
    file = folder / RECORD
    if not file.is_file():
        return ArtifactRecord(key)
    content = json.loads(file.read_text(encoding="utf-8"))
    record = content["record"]
    code = (record.get("parts") or {}).get("code") or {}
    inputs = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in record["inputs"].items()}
    return ArtifactRecord(
        key=key,
        has_record=True,
        kind=str(content["kind"]),
        uses=str(record.get("uses", "")),
        info=content["info"],
        settings=record.get("settings", {}),
        inputs=inputs,
        versions=record.get("versions", {}),
        machine=record.get("machine", {}),
        seed=record.get("seed"),
        code=hashlib.sha256(json.dumps(code, sort_keys=True).encode()).hexdigest() if code else "",
        commit=str(record.get("git_commit") or ""),
        changed=record.get("git_changed"),
        files={name: str(facts["sha256"]) for name, facts in content.get("files", {}).items()},
    )
