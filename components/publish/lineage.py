"""What an artifact was made from, back to its sources: read from the `artifact.json` that the store keeps beside files.

A step is given its inputs only, but a release has to say where everything came from. Beside each artifact lie those it
was made from, under their keys; what is no longer there is named by its key and said to be unknown, never guessed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.contract import Artifact

RECORD = "artifact.json"


@dataclass(frozen=True)
class Made:
    """How one artifact came to be. known: False where its record is not on this machine; all but key is empty then.

    inputs: parameter -> keys. versions: library -> version. code: sha256 over all code that its step reaches, "" where
    the record is too old to say. commit: of Draftsmith, "" outside a clone; changed: whether files differed from it.
    files: name -> sha256.
    """

    key: str
    known: bool = False
    kind: str = ""
    uses: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    code: str = ""
    commit: str = ""
    changed: bool | None = None
    files: Mapping[str, str] = field(default_factory=dict)


Lineage = Mapping[str, Made]
"""key -> how it came to be."""


def lineage_of(artifacts: Iterable[Artifact]) -> dict[str, Made]:
    """These artifacts and all that they were made from, each once, those that were made from others first."""
    found: dict[str, Made] = {}
    waiting = [(artifact.key, artifact.path) for artifact in artifacts]
    while waiting:
        key, folder = waiting.pop(0)
        if key in found and found[key].known:
            continue
        made = found[key] = _read(key, folder)
        waiting += [(one, folder.parent / one) for keys in made.inputs.values() for one in keys]
    return found


def ancestors(lineage: Lineage, key: str, *, without: Collection[str] = ()) -> list[Made]:
    """An artifact and what it was made from, not going through these parameters (`target`), sources last."""
    found: dict[str, Made] = {}
    waiting = [key]
    while waiting:
        one = waiting.pop(0)
        if one in found or one not in lineage:
            continue
        made = found[one] = lineage[one]
        waiting += [each for name, keys in made.inputs.items() if name not in without for each in keys]
    return list(found.values())


def _read(key: str, folder: Path) -> Made:
    file = folder / RECORD
    if not file.is_file():
        return Made(key)
    content = json.loads(file.read_text(encoding="utf-8"))
    record = content["record"]
    code = (record.get("parts") or {}).get("code") or {}
    inputs = {name: tuple(value) if isinstance(value, list) else (value,) for name, value in record["inputs"].items()}
    return Made(
        key=key,
        known=True,
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
