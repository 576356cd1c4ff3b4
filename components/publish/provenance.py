"""provenance.json: where a release comes from, as a CycloneDX 1.6 bill of materials with the drafter as its subject.

  metadata       the release, and Draftsmith as the tool, with version, commit and whether files differed from it
  components     every artifact of the lineage by its key (model, data), and the packages that touched the weights
  dependencies   what was made from what: key -> keys
  compositions   incomplete for what the lineage names and this machine has no record of

Nothing in it tells when, on which host or in which folder, so the same lineage released by the same code gives the same
bytes. Commit and versions enter no key: another commit makes another provenance.json when the release is made again,
and no rerun.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.publish.code_state import CodeState
from components.publish.lineage import Lineage, Made
from components.publish.public_names import public_value
from components.publish.training_data import DataSource, sources_of

FILE = "provenance.json"
SPEC = "1.6"
NOT_ON_WEIGHTS = frozenset({"prefect", "mlflow", "duckdb"})
"""Packages that run and record steps; the others read, trained or wrote weights or what they were trained on."""
MACHINE = ("device", "device_name", "cpu_model", "num_cores", "ram_gib", "machine_id")
FACTS = (str, int, float, bool)
_PYTHON = "python"
Json = dict[str, Any]


def provenance(record: Mapping[str, Any], lineage: Lineage, target_files: Mapping[str, str], code: CodeState) -> Json:
    """The bill of materials. record: release.json so far. target_files: file of the target -> sha256."""
    key = str(record["keys"]["release"])
    roots = [record["serve"]["target_key"], *(one["draft_key"] for one in record["formats"].values())]
    roots += [record["serve"]["draft_key"], record["keys"]["policy"], *record["keys"]["acceptance"]]
    direct = list(dict.fromkeys([*roots, record["keys"]["end_to_end"]]))
    artifacts = [_artifact(made, record, target_files) for made in lineage.values()]
    unknown = [made.key for made in lineage.values() if not made.known]
    tool: Json = {"type": "application", "name": "draftsmith", "version": record["versions"]["draftsmith"]}
    if code.commit:
        tool["pedigree"] = {"commits": [{"uid": code.commit}]}
    tool["properties"] = _properties({"files changed since the commit": _yes(code.changed)})
    subject: Json = {
        "type": "machine-learning-model",
        "bom-ref": key,
        "name": f"{record['serve']['method']} drafter for {record['target']['model'] or 'a target'}",
        "version": key[:12],
        "licenses": [{"license": {"name": record["license"]}}],
        "properties": _properties({"depth to serve with": record["serve"]["depth_k"]}),
    }
    known = [made.key for made in lineage.values() if made.known]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC,
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, key)}",
        "version": 1,
        "metadata": {"tools": {"components": [tool]}, "component": subject},
        "components": [*artifacts, *_packages(lineage.values(), record["versions"])],
        "dependencies": [
            {"ref": key, "dependsOn": direct},
            *(
                {"ref": made.key, "dependsOn": list(dict.fromkeys(k for keys in made.inputs.values() for k in keys))}
                for made in lineage.values()
            ),
        ],
        "compositions": [
            {"aggregate": "complete", "assemblies": known},
            *([{"aggregate": "incomplete", "assemblies": unknown}] if unknown else []),
        ],
    }


def write_provenance(folder: Path, content: Json) -> None:
    """Write provenance.json into a release."""
    (folder / FILE).write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def check_provenance(content: Mapping[str, Any], record: Mapping[str, Any], where: str) -> tuple[int, int]:
    """(artifacts, packages) named; raises UserError, one line, unless this is the provenance of that release.json."""
    at = f"{where}/{FILE}"
    try:
        kind = (content["bomFormat"], content["specVersion"])
        subject = content["metadata"]["component"]["bom-ref"]
        refs = [str(one["bom-ref"]) for one in content["components"]]
        named = {str(one["ref"]): [str(ref) for ref in one["dependsOn"]] for one in content["dependencies"]}
        keys = record["keys"]
        asked = [keys["policy"], keys["end_to_end"], *keys["acceptance"], record["serve"]["target_key"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{at}: not the provenance of a release ({error!r:.80}); export it again") from error
    if kind != ("CycloneDX", SPEC):
        raise UserError(f"{at}: says it is {kind[0]!r:.40} {kind[1]!r:.10}, must be CycloneDX {SPEC}; export it again")
    if subject != keys["release"]:
        raise UserError(f"{at}: of another release ({subject!s:.12}); copy the whole folder again")
    if len(set(refs)) != len(refs):
        raise UserError(f"{at}: names {next(ref for ref in refs if refs.count(ref) > 1):.80} twice; export it again")
    strange = {*named, *(one for ones in named.values() for one in ones)} - {*refs, subject}
    if missing := sorted({*asked, record["serve"]["draft_key"], *strange} - set(refs)):
        raise UserError(f"{at}: says nothing of {missing[0]:.12}, which the release was made from; export it again")
    packages = sum(one.get("type") in ("library", "platform") for one in content["components"])
    return len(refs) - packages, packages


def _artifact(made: Made, record: Mapping[str, Any], target_files: Mapping[str, str]) -> Json:
    """One artifact of the lineage."""
    is_model = made.kind in ("Target", "Draft") or made.key in (
        record["serve"]["target_key"],
        record["serve"]["draft_key"],
    )
    found: Json = {
        "type": "machine-learning-model" if is_model else "data",
        "bom-ref": made.key,
        "name": _name_of(made, record),
        "version": made.key[:12],
    }
    if made.key == record["serve"]["target_key"]:
        found["components"] = [_file(name, digest, made.key) for name, digest in sorted(target_files.items())]
    elif made.kind == "Draft":
        found["components"] = [_file(name, digest, made.key) for name, digest in sorted(made.files.items())]
    facts: dict[str, Any] = {"record": "on this machine when released" if made.known else "not on this machine"}
    if made.known:
        info = {name: value for name, value in made.info.items() if isinstance(value, FACTS) and name != "model"}
        facts |= {"kind": made.kind, "step": made.uses, "seed": made.seed, "code of the step, sha256": made.code}
        facts |= {"commit": made.commit, "files changed since the commit": _yes(made.changed)}
        facts |= {f"machine {name}": made.machine.get(name) for name in MACHINE}
        settings = public_value(made.settings)
        if made.key == record["serve"]["target_key"] and "model" in settings:
            settings["model"] = record["target"]["model"]  # the name it was released under
        facts |= {"settings": json.dumps(settings, sort_keys=True, ensure_ascii=False)}
        facts |= {f"fact {name}": public_value(value) for name, value in info.items()}
    found["properties"] = _properties(facts)
    if sources := list(sources_of(made)):
        found["data"] = [_source(source) for source in sources]
        licences = dict.fromkeys(source.licence for source in sources if source.licence)
        if licences:
            found["licenses"] = [{"license": {"name": licence}} for licence in licences]
    return found


def _name_of(made: Made, record: Mapping[str, Any]) -> str:
    if made.key == record["serve"]["target_key"]:
        return str(record["target"]["model"] or "target")
    return f"{made.info['method']} drafter" if made.kind == "Draft" else (made.kind or "artifact")


def _file(name: str, digest: str, key: str) -> Json:
    hashes = [{"alg": "SHA-256", "content": digest}]
    return {"type": "file", "bom-ref": f"{key}/{name}", "name": name, "hashes": hashes}


def _source(source: DataSource) -> Json:
    """A source of rows, as CycloneDX's componentData."""
    facts = {"rows read": source.read, "rows kept": source.kept, "licence": source.licence or "not stated"}
    facts |= {f"rows in {split}": count for split, count in source.used.items()}
    return {"type": "dataset", "name": source.name or "unnamed", "contents": {"properties": _properties(facts)}}


def _packages(lineage: Iterable[Made], now: Mapping[str, str]) -> Iterator[Json]:
    """Python and the packages that touched the weights, each version once, with the kinds of artifacts it made."""
    # A package that is there and not installed as one has a sentence for a version, which is none.
    known = {name: one for name, one in now.items() if " " not in one}
    used: dict[tuple[str, str], set[str]] = {(name, one): {"Release"} for name, one in known.items()}
    for made in lineage:
        for name, one in made.versions.items():
            if name not in NOT_ON_WEIGHTS:
                used.setdefault((name, one), set()).add(made.kind)
    for (name, one), kinds in sorted(used.items()):
        if name == "draftsmith":
            continue
        found: Json = {"type": "platform" if name == _PYTHON else "library", "name": name, "version": one}
        found["bom-ref"] = f"{name}@{one}"
        if name != _PYTHON:
            found["purl"] = f"pkg:pypi/{name}@{one.replace('+', '%2B')}"
            if licence := _licence_of(name, one):
                found["licenses"] = [licence]
        found["properties"] = _properties({"made": ", ".join(sorted(kinds))})
        yield found


def _licence_of(name: str, wanted: str) -> Json | None:
    """What an installed package says of its licence; None where it says nothing short, or is of another version."""
    try:
        if version(name) != wanted:
            return None
        said = metadata(name)
    except PackageNotFoundError:
        return None
    if "License-Expression" in said:
        return {"expression": said["License-Expression"]}
    named = said["License"].strip() if "License" in said else ""
    return {"license": {"name": named}} if re.fullmatch(r"[\w .,()+/-]{2,60}", named) else None


def _properties(facts: Mapping[str, Any]) -> list[Json]:
    """Facts as CycloneDX's name and value; what is not known is left out."""
    return [
        {"name": f"draftsmith:{name}", "value": str(value).lower() if isinstance(value, bool) else str(value)}
        for name, value in facts.items()
        if value not in (None, "")
    ]


def _yes(flag: bool | None) -> str:
    return "not known" if flag is None else "yes" if flag else "no"
