"""The facts of a release that its registered version carries as tags: its content, its numbers and its lineage.

Everything is read from files of the store and the journal of the run that made it, so that a version registered late
(`resync`) bears the same tags as one registered at once. The lineage is followed as far as the store still holds it.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage import journal
from storage.artifact_records import ArtifactRecord
from storage.artifacts import RECORD_FILE, Store
from storage.records import git_commit
from storage.sessions import read_record, session_of
from storage.tracking import KEY_TAG

ROOT = Path(__file__).resolve().parents[1]
SESSION_TAG = "draftsmith.session"  # when the release was measured; older versions have none
_INFO_FACTS = (
    "target_key",
    "draft_key",
    "method",
    "depth_k",
    "verdict",
    "al",
    "al_lo",
    "al_hi",
    "al_meas",
    "al_replayed",
    "speedup_pred",
    "speedup_meas",
    "meas_lo",
    "meas_hi",
    "pred_error",
)


@dataclass(frozen=True)
class ReleaseFacts:
    """The facts of a Release for the registry. may_promote: False where its pipeline wants an approval."""

    release_key: str
    session: str
    name: str
    target: str
    worth_using: bool  # the verdict is not "do not speculate"
    gate_passed: bool
    may_promote: bool
    tags: dict[str, str]


def facts_of(home: Path, release: Path) -> ReleaseFacts:
    """The facts of a release; publish/export.py puts the numbers into its info.

    release: its directory, in the store of this home or among its earlier sessions.
    """
    content = json.loads((release / RECORD_FILE).read_text(encoding="utf-8"))
    info, record = content["info"], content["record"]
    target = str(info["target"]) or f"target of {record.get('pipeline') or 'no pipeline'}"  # made by a step: no name
    tags = {
        KEY_TAG: content["key"],
        SESSION_TAG: session_of(content),
        "draftsmith.pipeline": record.get("pipeline"),
        "draftsmith.git_commit": record.get("git_commit") or git_commit(),
        "gate.status": "passed" if info["gate_passed"] else "failed",
        "gate.checks": json.dumps(info["gate_checks"]),
    }
    tags |= {f"draftsmith.{name}": info.get(name) for name in _INFO_FACTS} | {"draftsmith.target": target}
    tags |= (
        _facts_from_files(release, content) | _facts_from_lineage(Store(home), content) | _facts_from_run(home, record)
    )
    return ReleaseFacts(
        release_key=content["key"],
        session=session_of(content),
        name=_model_name(target, str(info["method"])),
        target=target,
        worth_using=info["verdict"] in ("use", "undecided"),
        gate_passed=bool(info["gate_passed"]),
        may_promote=bool(_run_entry(home, record).get("may_promote", True)),
        tags={name: str(value) for name, value in tags.items() if value not in (None, "")},
    )


def _facts_from_files(release: Path, content: ArtifactRecord) -> dict[str, Any]:
    """Size and digests of what is published; the depth for each workload."""
    files = content["files"]
    weights = files.get("draftsmith/model.safetensors")
    tags: dict[str, Any] = {"draftsmith.sha256": _digest(files)}
    if weights is not None:
        tags |= {"draftsmith.drafter_bytes": weights["size"], "draftsmith.drafter_sha256": weights["sha256"]}
    if (release / "draftsmith" / "serve.json").is_file():
        serve = json.loads((release / "draftsmith" / "serve.json").read_text(encoding="utf-8"))
        tags["draftsmith.depth_by_workload"] = json.dumps(serve.get("depth_by_workload", {}), sort_keys=True)
    return tags


def _facts_from_lineage(store: Store, content: ArtifactRecord) -> dict[str, Any]:
    """Depth policy, revision of the target, digest of the training data, and the machine that was measured on."""
    inputs: Mapping[str, Any] = content["record"].get("inputs", {})
    tags: dict[str, Any] = {"draftsmith.depth_policy": inputs.get("policy")}
    target_key = str(content["info"]["target_key"])
    loaded = store.path_of(target_key) / "target.json"
    if loaded.is_file():
        manifest = json.loads(loaded.read_text(encoding="utf-8"))
        _, _, pinned = str(manifest.get("model", "")).partition("@")
        tags["draftsmith.target_revision"] = (f"{pinned} " if pinned else "") + f"sha256:{_digest(manifest['files'])}"
    elif record := _read_record(store, target_key):  # by a step of its own
        tags["draftsmith.target_revision"] = f"sha256:{_tensors_digest(record)}"
    data = [
        ancestor
        for ancestor in _ancestors(store, str(content["info"]["draft_key"]))
        if ancestor["kind"] == "Conversations"
    ]
    if data:
        tags["draftsmith.data"] = ", ".join(sorted(ancestor["key"] for ancestor in data))
        tags["draftsmith.data_digest"] = (
            f"sha256:{_digest({ancestor['key']: {'sha256': _tensors_digest(ancestor)} for ancestor in data})}"
        )
    measured = None
    if end_to_end := str(inputs.get("end_to_end") or ""):
        session = content["record"].get("input_sessions", {}).get(end_to_end, "")
        measured = read_record(store.path_of_session(end_to_end, session)) or _read_record(store, end_to_end)
    machine = measured["record"].get("machine") if measured else None
    if machine:
        tags["draftsmith.machine"] = machine.get("machine_id")
        tags["draftsmith.machine_name"] = machine.get("device_name") or machine.get("cpu_model")
    return tags


def _facts_from_run(home: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """The run that made the release: its id, the Prefect flow run behind it, the pipeline as it was written."""
    start = _run_entry(home, record)
    return {
        "draftsmith.run_id": record.get("run_id"),
        "draftsmith.flow_run_id": start.get("flow_run_id"),
        "draftsmith.pipeline_digest": start.get("pipeline_digest"),
    }


def _run_entry(home: Path, record: Mapping[str, Any]) -> journal.Entry:
    """The first entry of the journal of the run that made an artifact; {} where there is none."""
    file = home / "runs" / f"{record.get('run_id')}.jsonl"
    return (journal.first(journal.read(file), "run") or {}) if file.is_file() else {}


def _ancestors(store: Store, key: str) -> Iterator[ArtifactRecord]:
    """The records of an artifact and of everything it was made from, as far as the store has them."""
    waiting, visited = [key], set[str]()
    while waiting:
        current = waiting.pop()
        record = _read_record(store, current) if current not in visited else None
        visited.add(current)
        if record is not None:
            yield record
            for value in record["record"].get("inputs", {}).values():
                waiting += value if isinstance(value, list) else [value]


def _read_record(store: Store, key: str) -> ArtifactRecord | None:
    try:
        return store.record_of(key) if key else None
    except FileNotFoundError:
        return None


def _tensors_digest(content: ArtifactRecord) -> str:
    """The digest of an artifact's tensors alone: logs of the making are no part of the data."""
    return _digest({name: facts for name, facts in content["files"].items() if name.endswith(".safetensors")})


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    """One sha256 for many files, by name and content."""
    lines = "".join(f"{facts['sha256']}  {name}\n" for name, facts in sorted(files.items()))
    return hashlib.sha256(lines.encode("utf-8")).hexdigest()


def _model_name(target: str, method: str) -> str:
    """`<target name>-<method>`; a target in a folder is named by the folder, one from a hub by its id."""
    name = Path(target).name if Path(target).is_absolute() or target.startswith(".") else target
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", f"{name}-{method}").strip("-.")


def copy_of_components(scratch: Path, with_builtin: bool) -> Path:
    """The code that the model needs, so that it loads where Draftsmith is not installed; weights if it serves them."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        if with_builtin and Path(folder).name == "builtin":
            return set()
        return {name for name in names if "." in name and not name.endswith((".py", ".json"))} | {"__pycache__"}

    place = scratch / "components"
    shutil.copytree(ROOT / "components", place, ignore=ignored)
    return place
