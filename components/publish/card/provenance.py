"""provenance.json: where a release comes from, as a CycloneDX 1.6 bill of materials with the drafter as its subject.

  metadata       the release, and Draftsmith as the tool, with version, commit and whether files differed from it
  components     every artifact of the lineage by its key (model, data), and the packages that touched the weights
  dependencies   key of an artifact -> keys of those that it was made from
  compositions   incomplete for artifacts without a record on this machine

It holds no time, host or folder, so that the same lineage released by the same code gives the same bytes. Commit and
versions are part of no key: another commit causes no rerun, and another provenance.json when the release is made again.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path

from components.contract import UserError
from components.outside_json import JsonObject
from components.publish.card.lineage import ArtifactRecord, DataSource, Lineage, sources_of
from components.publish.names import public_value
from components.release_record import ReleaseRecord
from components.source_code import CodeState

FILE = "provenance.json"
SPEC = "1.6"
NOT_ON_WEIGHTS = frozenset({"prefect", "mlflow", "duckdb"})
"""Packages that only run and record steps; all others read or wrote weights or training data."""
MACHINE = ("device", "device_name", "cpu_model", "num_cores", "ram_gib", "machine_id")
FACTS = (str, int, float, bool)
_PYTHON = "python"


def provenance(record: ReleaseRecord, lineage: Lineage, target_files: Mapping[str, str], code: CodeState) -> JsonObject:
    """The bill of materials. record: release.json so far. target_files: file of the target -> sha256."""
    key = str(record["keys"]["release"])
    roots = [record["serve"]["target_key"], *(one["draft_key"] for one in record["formats"].values())]
    roots += [record["serve"]["draft_key"], record["keys"]["policy"], *record["keys"]["acceptance"]]
    direct = list(dict.fromkeys([*roots, record["keys"]["end_to_end"]]))
    artifacts = [_component(artifact, record, target_files) for artifact in lineage.values()]
    unknown = [artifact.key for artifact in lineage.values() if not artifact.has_record]
    tool: JsonObject = {"type": "application", "name": "draftsmith", "version": record["versions"]["draftsmith"]}
    if code.commit:
        tool["pedigree"] = {"commits": [{"uid": code.commit}]}
    tool["properties"] = _properties({"files changed since the commit": _yes_or_no(code.changed)})
    subject: JsonObject = {
        "type": "machine-learning-model",
        "bom-ref": key,
        "name": f"{record['serve']['method']} drafter for {record['target']['model'] or 'a target'}",
        "version": key[:12],
        "licenses": [{"license": {"name": record["license"]}}],
        "properties": _properties({"depth to serve with": record["serve"]["depth_k"]}),
    }
    recorded = [artifact.key for artifact in lineage.values() if artifact.has_record]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, key)}",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": subject},
        "components": [*artifacts, *_package_components(lineage.values(), record["versions"])],
        "dependencies": [
            {"ref": key, "dependsOn": direct},
            *(
                {
                    "ref": artifact.key,
                    "dependsOn": list(dict.fromkeys(k for keys in artifact.inputs.values() for k in keys)),
                }
                for artifact in lineage.values()
            ),
        ],
        "compositions": [
            {"aggregate": "complete", "assemblies": recorded},
            *([{"aggregate": "incomplete", "assemblies": unknown}] if unknown else []),
        ],
    }


def write_provenance(folder: Path, content: JsonObject) -> None:
    """Write provenance.json into a release."""
    (folder / FILE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def check_provenance(content: JsonObject, record: ReleaseRecord, location: str) -> tuple[int, int]:
    """(number of artifacts, of packages). Raises UserError, one line, where it does not belong to that release.json."""
    label = f"{location}/{FILE}"
    try:
        kind = (content["bomFormat"], content["specVersion"])
        subject = content["metadata"]["component"]["bom-ref"]
        refs = [str(one["bom-ref"]) for one in content["components"]]
        named = {str(one["ref"]): [str(ref) for ref in one["dependsOn"]] for one in content["dependencies"]}
        keys = record["keys"]
        required = [keys["policy"], keys["end_to_end"], *keys["acceptance"], record["serve"]["target_key"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{label}: not the provenance of a release ({error!r:.80}); export it again") from error
    if kind != ("CycloneDX", SPEC):
        raise UserError(
            f"{label}: says it is {kind[0]!r:.40} {kind[1]!r:.10}, must be CycloneDX {SPEC}; export it again"
        )
    if subject != keys["release"]:
        raise UserError(f"{label}: of another release ({subject!s:.12}); copy the whole folder again")
    if len(set(refs)) != len(refs):
        raise UserError(f"{label}: names {next(ref for ref in refs if refs.count(ref) > 1):.80} twice; export it again")
    unnamed = {*named, *(one for ones in named.values() for one in ones)} - {*refs, subject}
    if missing := sorted({*required, record["serve"]["draft_key"], *unnamed} - set(refs)):
        raise UserError(f"{label}: says nothing of {missing[0]:.12}, which the release was made from; export it again")
    packages = sum(one.get("type") in ("library", "platform") for one in content["components"])
    return len(refs) - packages, packages


def _component(artifact: ArtifactRecord, record: ReleaseRecord, target_files: Mapping[str, str]) -> JsonObject:
    """One artifact of the lineage as a CycloneDX component."""
    is_target = artifact.key == record["serve"]["target_key"]
    is_model = is_target or artifact.kind in ("Target", "Draft") or artifact.key == record["serve"]["draft_key"]
    component: JsonObject = {
        "type": "machine-learning-model" if is_model else "data",
        "bom-ref": artifact.key,
        "name": _component_name(artifact, record),
        "version": artifact.key[:12],
    }
    if is_target or artifact.kind == "Draft":
        files = target_files if is_target else artifact.files
        component["components"] = [_file_component(name, files[name], artifact.key) for name in sorted(files)]
    facts: JsonObject = {"record": "on this machine when released" if artifact.has_record else "not on this machine"}
    if artifact.has_record:
        info = {name: value for name, value in artifact.info.items() if isinstance(value, FACTS) and name != "model"}
        facts |= {"kind": artifact.kind, "step": artifact.uses, "seed": artifact.seed}
        facts |= {"code of the step, sha256": artifact.code}
        facts |= {"commit": artifact.commit, "files changed since the commit": _yes_or_no(artifact.changed)}
        facts |= {f"machine {name}": artifact.machine.get(name) for name in MACHINE}
        settings = public_value(artifact.settings)
        if is_target and "model" in settings:
            settings["model"] = record["target"]["model"]  # its name in the release
        facts |= {"settings": json.dumps(settings, sort_keys=True, ensure_ascii=False)}
        facts |= {f"fact {name}": public_value(value) for name, value in info.items()}
    component["properties"] = _properties(facts)
    if sources := list(sources_of(artifact)):
        component["data"] = [_component_data(source) for source in sources]
        licences = dict.fromkeys(source.licence for source in sources if source.licence)
        if licences:
            component["licenses"] = [{"license": {"name": licence}} for licence in licences]
    return component


def _component_name(artifact: ArtifactRecord, record: ReleaseRecord) -> str:
    if artifact.key == record["serve"]["target_key"]:
        return str(record["target"]["model"] or "target")
    return f"{artifact.info['method']} drafter" if artifact.kind == "Draft" else (artifact.kind or "artifact")


def _file_component(name: str, digest: str, key: str) -> JsonObject:
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "file", "bom-ref": f"{key}/{name}", "name": name, "hashes": hashes}


def _component_data(source: DataSource) -> JsonObject:
    """A source of rows, as CycloneDX's componentData."""
    facts = {"rows read": source.rows_read, "rows kept": source.rows_kept, "licence": source.licence or "not stated"}
    facts |= {f"rows in {split}": count for split, count in source.rows_by_split.items()}
    return {"type": "dataset", "name": source.name or "unnamed", "contents": {"properties": _properties(facts)}}


def _package_components(lineage: Iterable[ArtifactRecord], now: Mapping[str, str]) -> Iterator[JsonObject]:
    """Python and the packages that touched the weights, each version once, with the kinds of artifacts that it made."""
    # A package that is importable but not installed has a sentence in place of its version.
    current = {name: one for name, one in now.items() if " " not in one}
    used: dict[tuple[str, str], set[str]] = {(name, one): {"Release"} for name, one in current.items()}
    for artifact in lineage:
        for name, one in artifact.versions.items():
            if name not in NOT_ON_WEIGHTS:
                used.setdefault((name, one), set()).add(artifact.kind)
    for (name, one), kinds in sorted(used.items()):
        if name == "draftsmith":
            continue
        component: JsonObject = {"type": "platform" if name == _PYTHON else "library", "name": name, "version": one}
        component["bom-ref"] = f"{name}@{one}"
        if name != _PYTHON:
            component["purl"] = f"pkg:pypi/{name}@{one.replace('+', '%2B')}"
            if licence := _package_licence(name, one):
                component["licenses"] = [licence]
        component["properties"] = _properties({"made": ", ".join(sorted(kinds))})
        yield component


def _package_licence(name: str, used_version: str) -> JsonObject | None:
    """The licence of an installed package; None where it has no short one, or another version is installed."""
    try:
        if version(name) != used_version:
            return None
        package = metadata(name)
    except PackageNotFoundError:
        return None
    if "License-Expression" in package:
        return {"expression": package["License-Expression"]}
    named = package["License"].strip() if "License" in package else ""
    return {"license": {"name": named}} if re.fullmatch(r"[\w .,()+/-]{2,60}", named) else None


def _properties(facts: JsonObject) -> list[JsonObject]:
    """Facts as CycloneDX properties; unknown ones (None or "") are left out."""
    return [
        {"name": f"draftsmith:{name}", "value": str(value).lower() if isinstance(value, bool) else str(value)}
        for name, value in facts.items()
        if value not in (None, "")
    ]


def _yes_or_no(flag: bool | None) -> str:
    return "not known" if flag is None else "yes" if flag else "no"
