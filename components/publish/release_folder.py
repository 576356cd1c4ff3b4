"""The parts of a release beside its formats: the folder draftsmith/, the documents and the checksums.

MLflow serves from draftsmith/ (mlflow_model.py). The documents are the model card, the depth policy, provenance.json
and release.json; SHA256SUMS covers every file.
"""

from __future__ import annotations

import fnmatch
import json
import platform
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contract import DepthPolicy, Draft, Target
from components.outside_json import read_object

if TYPE_CHECKING:
    from components.publish.card import Evidence

POLICY_FILES = ("policy.json", "policy.md")


def write_draftsmith_folder(folder: Path, target: Target, draft: Draft, policy: dict[str, Any]) -> dict[str, Any]:
    """Write `draftsmith/`, from which mlflow_model.py serves, and return the content of its serve.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (draft.path / "draft.json", draft.path / "model.safetensors"):
        if source.is_file():  # a method without training has no weights
            shutil.copyfile(source, folder / source.name)
    _write_target_record(target, folder / "target.json")
    winner = policy["winner"] if policy["verdict"] in ("use", "undecided") else None
    serve = {
        "method": str(draft.info["method"]),
        "draft_key": draft.key,
        "target_key": target.key,
        "depth_k": int(winner["depth_k"]) if winner else 0,
        "depth_by_workload": _depth_by_workload(policy["choices"], draft.key, drafting=winner is not None),
        "verdict": policy["verdict"],
    }
    (folder / "serve.json").write_text(json.dumps(serve, indent=1) + "\n", encoding="utf-8")
    return serve


def _depth_by_workload(choices: list[dict[str, Any]], draft_key: str, *, drafting: bool) -> dict[str, int]:
    """Workload -> the depth to serve one drafter with, at the smallest batch size.

    It is 0 for a workload that measured slower, and for all workloads unless `drafting`.
    """
    of_drafter = [c for c in choices if c["draft_key"] == draft_key]
    smallest = min(c["batch_size"] for c in of_drafter)
    refused = ("do_not_speculate", "invalid")
    return {
        c["workload"]: c["depth_k"] if drafting and c["verdict"] not in refused else 0
        for c in of_drafter
        if c["batch_size"] == smallest
    }


def _write_target_record(target: Target, file: Path) -> None:
    """Write target.json: where the target and its tokenizer are, with the size and sha256 of every file."""
    from components.targets.file_digests import sha256_of
    from components.targets.source import list_files

    if (target.path / "target.json").is_file():
        shutil.copyfile(target.path / "target.json", file)
        return
    files = list_files(target.path, target.key[:12])  # a target that was trained here: the artifact is the model
    facts = {one.name: {"size": one.stat().st_size, "sha256": sha256_of(one)} for one in files}
    record = {"model": str(target.path), "folder": str(target.path), "trust_remote_code": False, "dtype": None}
    file.write_text(json.dumps({**record, "files": facts}, indent=1) + "\n", encoding="utf-8")


def _target_files(folder: Path) -> dict[str, str]:
    """File of the target -> sha256, from target.json."""
    files = read_object(folder / "target.json")["files"]
    return {str(name): str(facts["sha256"]) for name, facts in files.items()}


def _is_tokenizer_file(name: str) -> bool:
    from components.publish.formats import TOKENIZER

    return any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER)


def write_documents(folder: Path, record: dict[str, Any], evidence: Evidence, policy: DepthPolicy) -> None:
    """Write policy, model card, provenance.json and release.json; SHA256SUMS last, over everything else."""
    from components.publish.card import launch_commands, write_card
    from components.publish.checksums import file_records, files_of, write_sums
    from components.publish.code_state import code_state
    from components.publish.provenance import provenance, write_provenance

    for name in POLICY_FILES:
        if (policy.path / name).is_file():
            shutil.copyfile(policy.path / name, folder / name)
    target_files = _target_files(folder / "draftsmith")
    record["tokenizer"] = {name: digest for name, digest in target_files.items() if _is_tokenizer_file(name)}
    record["launch"] = launch_commands(record)
    code = code_state()
    record["code"] = {"commit": code.commit, "changed": code.changed}
    write_card(folder / "README.md", record, evidence)
    write_provenance(folder, provenance(record, evidence.lineage, target_files, code))
    record["files"] = file_records(folder, files_of(folder))
    (folder / "release.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_sums(folder)


def versions() -> dict[str, str]:
    """Package -> version of the software that writes the release."""
    from importlib.metadata import PackageNotFoundError, version

    by_package = {"python": platform.python_version()}
    for name in ("draftsmith", "torch", "transformers", "safetensors", "tokenizers"):
        try:
            by_package[name] = version(name)
        except PackageNotFoundError:
            by_package[name] = "not installed as a package"
    return by_package


def read_licence(folder: Path | None) -> str:
    """The licence of a model by its README's front matter, else its LICENSE file; "" where it has neither."""
    import yaml

    from components.targets.source import BUILTIN, local_folder

    if folder is None:
        return ""
    if folder == local_folder(BUILTIN):
        return "Apache-2.0, as Draftsmith; its corpus PSF-2.0"
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    match = re.match(r"---\n(.*?)\n---\s*\n", text, re.DOTALL)
    try:
        front_matter = yaml.safe_load(match[1]) if match else None
    except yaml.YAMLError:
        front_matter = None
    named = front_matter.get("license") if isinstance(front_matter, dict) else None
    if isinstance(named, str) and named:
        return named
    return "as its LICENSE file says" if (folder / "LICENSE").is_file() else ""
