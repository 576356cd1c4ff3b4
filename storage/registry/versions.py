"""Versions of registered models: the facts of a release that a version carries, its look-up, its page for people.

The facts (content, numbers, lineage) are read from files of the store and the journal of the run that made the release,
so that a version registered late (`resync`) bears the same tags as one registered at once. The lineage is followed as
far as the store still holds it. A version is logged in a child process (storage/registry/log_version.py), which keeps
torch out of this one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from components.outside_json import JsonObject
from components.source_code import code_state
from components.text import in_markdown
from storage import journal
from storage.artifacts.records import ArtifactRecord, FileFacts
from storage.artifacts.sessions import read_record, session_of
from storage.artifacts.store import RECORD_FILE, Store
from storage.registry.aliases import GONE, aliases_of
from storage.registry.fact_tags import SESSION_TAG, as_tags, tags_of
from storage.registry.promotion_gate import Decision
from storage.registry.tracking import KEY_TAG, MlflowClient, mlflow_error

ROOT = Path(__file__).resolve().parents[2]
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
    """The facts of a Release for the registry. may_promote: False where its pipeline wants an approval.

    tags: all of them by name, as storage/registry/fact_tags.py gives them to a version.
    """

    release_key: str
    session: str
    name: str
    target: str
    worth_using: bool  # the verdict is not "do not speculate"
    gate_passed: bool
    may_promote: bool
    tags: dict[str, str]


def facts_of(home: Path, release: Path) -> ReleaseFacts:
    """The facts of a release; publish/release/export.py puts the numbers into its info.

    release: its directory, in the store of this home or among its earlier sessions.
    """
    content = json.loads((release / RECORD_FILE).read_text(encoding="utf-8"))
    info, record = content["info"], content["record"]
    target = str(info["target"]) or f"target of {record.get('pipeline') or 'no pipeline'}"  # made by a step: no name
    tags = {
        KEY_TAG: content["key"],
        SESSION_TAG: session_of(content),
        "draftsmith.pipeline": record.get("pipeline"),
        "draftsmith.git_commit": record.get("git_commit") or code_state().commit,
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
        name=model_name(target),
        target=target,
        worth_using=info["verdict"] in ("use", "undecided"),
        gate_passed=bool(info["gate_passed"]),
        may_promote=bool(_run_entry(home, record).get("may_promote", True)),
        tags={name: str(value) for name, value in tags.items() if value not in (None, "")},
    )


def _facts_from_files(release: Path, content: ArtifactRecord) -> dict[str, object]:
    """Size and digests of what is published; the depth for each workload."""
    files = content["files"]
    weights = files.get("draftsmith/model.safetensors")
    tags: dict[str, object] = {"draftsmith.sha256": _digest(_sums(files))}
    if weights is not None:
        tags |= {"draftsmith.drafter_bytes": weights["size"], "draftsmith.drafter_sha256": weights["sha256"]}
    if (release / "draftsmith" / "serve.json").is_file():
        serve = json.loads((release / "draftsmith" / "serve.json").read_text(encoding="utf-8"))
        tags["draftsmith.depth_by_workload"] = json.dumps(serve.get("depth_by_workload", {}), sort_keys=True)
    return tags


def _facts_from_lineage(store: Store, content: ArtifactRecord) -> dict[str, object]:
    """Depth policy, revision of the target, digest of the training data, and the machine that was measured on."""
    inputs: JsonObject = content["record"].get("inputs", {})
    tags: dict[str, object] = {"draftsmith.depth_policy": inputs.get("policy")}
    target_key = str(content["info"]["target_key"])
    loaded = store.path_of(target_key) / "target.json"
    if loaded.is_file():
        manifest = json.loads(loaded.read_text(encoding="utf-8"))
        _, _, pinned = str(manifest.get("model", "")).partition("@")
        tags["draftsmith.target_revision"] = (
            f"{pinned} " if pinned else ""
        ) + f"sha256:{_digest(_sums(manifest['files']))}"
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
            f"sha256:{_digest({ancestor['key']: _tensors_digest(ancestor) for ancestor in data})}"
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


def _facts_from_run(home: Path, record: JsonObject) -> dict[str, object]:
    """The run that made the release: its id, the Prefect flow run behind it, the pipeline as it was written."""
    start = _run_entry(home, record)
    return {
        "draftsmith.run_id": record.get("run_id"),
        "draftsmith.flow_run_id": start.get("flow_run_id"),
        "draftsmith.pipeline_digest": start.get("pipeline_digest"),
    }


def _run_entry(home: Path, record: JsonObject) -> journal.Entry:
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
    return _digest({name: sha256 for name, sha256 in _sums(content["files"]).items() if name.endswith(".safetensors")})


def _sums(files: Mapping[str, FileFacts]) -> dict[str, str]:
    """Name -> sha256."""
    return {name: facts["sha256"] for name, facts in files.items()}


def _digest(sums: Mapping[str, str]) -> str:
    """One sha256 for many contents. sums: name -> sha256 of each."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(sums.items()))
    return hashlib.sha256(lines.encode("utf-8")).hexdigest()


def model_name(target: str) -> str:
    """The registered model of a target: a target in a folder is named by the folder, one from a hub by its id."""
    name = Path(target).name if Path(target).is_absolute() or target.startswith(".") else target
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "target"


MODEL_CODE = ROOT / "components" / "publish" / "release" / "mlflow_model.py"
RELEASE_FIRST = "run the pipeline that releases it first, such as `draftsmith run quickstart`"
REQUIREMENTS = ("torch", "transformers", "safetensors", "tokenizers", "mlflow")
# (fact of a version, what people call it)
_FACT_LABELS = (
    ("verdict", "verdict"),
    ("depth_k", "depth to serve with"),
    ("depth_by_workload", "depth by workload"),
    ("target", "target"),
    ("target_revision", "target revision"),
    ("data_digest", "training data"),
    ("machine_name", "measured on"),
    ("machine", "machine"),
    ("depth_policy", "depth policy"),
    ("sha256", "artifact sha256"),
    ("drafter_bytes", "drafter, bytes"),
    ("pipeline", "pipeline"),
    ("pipeline_digest", "pipeline as written"),
    ("run_id", "run"),
    ("flow_run_id", "Prefect flow run"),
    ("git_commit", "git commit"),
)


def versions_of_release(client: MlflowClient, name: str, release_key: str) -> list[int]:
    """The versions that were registered from this release, oldest first."""
    assert "'" not in name + release_key, "both are made by us"
    versions = client.search_model_versions(f"name = '{name}' AND tags.`{KEY_TAG}` = '{release_key}'")
    return sorted(int(version.version) for version in versions)


def resolve(client: MlflowClient, name: str, version: int | str) -> int:
    """The number of a version, given by number or alias.

    Raises:
        UserError: there is no such model, version or alias.
    """
    require_model(client, name)
    if not str(version).isdecimal():
        aliases = aliases_of(client, name)
        if version not in aliases:
            listed = ", ".join(f"{alias}: {number}" for alias, number in sorted(aliases.items())) or "it has none"
            raise UserError(f"{name}: no version has the alias '{version}' ({listed})")
        return aliases[str(version)]
    try:
        return int(client.get_model_version(name, str(version)).version)
    except mlflow_error() as error:
        if error.error_code != GONE:
            raise
        numbers = sorted(int(latest.version) for latest in client.get_registered_model(name).latest_versions)
        raise UserError(f"{name}: there is no version {version} (the newest is {max(numbers, default=0)})") from error


def require_model(client: MlflowClient, name: str) -> None:
    """Raise UserError, with the names there are, for a name that no registered model has."""
    try:
        client.get_registered_model(name)
    except mlflow_error() as error:
        if error.error_code not in (GONE, "INVALID_PARAMETER_VALUE"):
            raise
        names = ", ".join(model.name for model in client.search_registered_models()) or "none yet"
        raise UserError(f"there is no registered model '{name}' (known: {names}); {RELEASE_FIRST}") from error


def describe(client: MlflowClient, name: str, version: int, decision: Decision | None) -> None:
    """Write a version's description: its facts, its evidence and the decision of the promotion gate."""
    text = description(tags_of(client, name, version), decision)
    client.update_model_version(name, str(version), description=text)


def description(tags: Mapping[str, str], decision: Decision | None) -> str:
    """The facts of a version as Markdown, in which no fact can become markup. tags: the facts by their names."""
    facts = {name.removeprefix("draftsmith."): value for name, value in tags.items()}
    lines = [
        f"**{in_markdown(facts['method'])}** drafter for **{in_markdown(facts['target'])}**",
        "",
        *_table_head("evidence", "value", "95 % interval"),
        _table_row("measured speedup", _format_number(facts, "speedup_meas"), _format_interval(facts, "meas")),
        _table_row("predicted speedup", _format_number(facts, "speedup_pred"), ""),
        _table_row("acceptance length", _format_number(facts, "al"), _format_interval(facts, "al")),
        _table_row("acceptance length while decoding", _format_number(facts, "al_meas"), ""),
        _table_row("the same, replayed for those prompts", _format_number(facts, "al_replayed"), ""),
        *(_table_row(label, facts[fact], "") for fact, label in _FACT_LABELS if fact in facts),
        "",
        *_table_head("own gate", "value", "asked", "passed"),
    ]
    for check in json.loads(facts["gate.checks"]):
        value = "" if check["value"] is None else f"{check['value']:.4g}"
        lines.append(_table_row(check["name"], value, check["limit"], _yes_no(check["passed"])))
    if decision is not None and decision.against is not None:
        lines += ["", *_table_head(f"against version {decision.against}", "value", "asked", "passed")]
        lines += [
            _table_row(check.name, check.measured(), check.asked, _yes_no(check.passed)) for check in decision.checks
        ]
    return "\n".join(lines)


def _yes_no(passed: bool) -> str:
    return "yes" if passed else "NO"


def _format_interval(facts: Mapping[str, str], name: str) -> str:
    return (
        f"[{_format_number(facts, f'{name}_lo')}, {_format_number(facts, f'{name}_hi')}]"
        if f"{name}_lo" in facts
        else ""
    )


def _format_number(tags: Mapping[str, str], fact: str) -> str:
    return f"{float(tags[fact]):.2f}" if fact in tags else "-"


def _table_head(*header: str) -> list[str]:
    return [_table_row(*header), "|" + " --- |" * len(header)]


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(map(in_markdown, cells)) + " |"


def missing_files(client: MlflowClient, home: Path, name: str, version: int) -> Path | None:
    """The folder below this home where a version's files should be, if they are not; None where nothing is missing."""
    address = urlsplit(client.get_model_version_download_uri(name, str(version)))
    folder = Path(url2pathname(address.path))
    is_ours = address.scheme in ("", "file") and folder.is_relative_to((home / "mlflow" / "artifacts").absolute())
    return folder if is_ours and not (folder / "MLmodel").is_file() else None


class VersionRequest(TypedDict):
    """What the child process is told. code: the model file; with_builtin: copy the built-in target's weights too.

    restore_to: the folder of a version whose files are lost, to make them again; None registers a new version.
    """

    home: str
    release: str
    name: str
    tags: dict[str, str]
    source_run: str | None
    code: str
    with_builtin: bool
    requirements: list[str]
    restore_to: str | None


def log_version(
    home: Path, release: Path, facts: ReleaseFacts, source_run: str | None, code: Path, restore_to: Path | None = None
) -> int:
    """Log and register a version in a child process; its memory is returned and torch stays out of this one.

    restore_to: only make the lost files of a version again, in this folder.
    """
    request: VersionRequest = {
        "home": str(home),
        "release": str(release),
        "name": facts.name,
        "tags": as_tags(facts.tags),
        "source_run": source_run,
        "code": str(code),
        "with_builtin": facts.target == "builtin",
        "requirements": [f"{package}=={installed_version(package).split('+')[0]}" for package in REQUIREMENTS],
        "restore_to": str(restore_to) if restore_to is not None else None,
    }
    paths = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH", "")) if part)
    done = subprocess.run(
        [sys.executable, "-m", "storage.registry.log_version"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or ["the child process said nothing"])[-1])
    return int(done.stdout.strip().splitlines()[-1])
