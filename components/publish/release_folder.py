"""What stands in a release beside the formats: Draftsmith's own folder, and the papers, the checksums last.

draftsmith/ is what MLflow serves from (mlflow_model.py). The papers are the model card, the depth policy,
provenance.json and release.json; SHA256SUMS covers all of it.
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


def write_own_folder(folder: Path, target: Target, draft: Draft, policy: dict[str, Any]) -> dict[str, Any]:
    """`draftsmith/`: what mlflow_model.py serves from; byte copies and the chosen depth."""
    folder.mkdir(parents=True, exist_ok=True)
    for source in (draft.path / "draft.json", draft.path / "model.safetensors"):
        if source.is_file():  # what learns nothing has no weights
            shutil.copyfile(source, folder / source.name)
    _point_at_target(target, folder / "target.json")
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
    """The depths to serve one drafter with at the smallest batch size.

    0 where a workload measured slower, though a depth was chosen for it, and everywhere unless `drafting`.
    """
    mine = [c for c in choices if c["draft_key"] == draft_key]
    smallest = min(c["batch_size"] for c in mine)
    refused = ("do_not_speculate", "invalid")
    return {
        c["workload"]: c["depth_k"] if drafting and c["verdict"] not in refused else 0
        for c in mine
        if c["batch_size"] == smallest
    }


def _point_at_target(target: Target, file: Path) -> None:
    """target.json: where the target and its tokenizer are, with the size and sha256 of every file."""
    from components.targets.file_digests import sha256_of
    from components.targets.source import list_files

    if (target.path / "target.json").is_file():
        shutil.copyfile(target.path / "target.json", file)
        return
    there = list_files(target.path, target.key[:12])  # one that was trained here: the artifact is the model
    facts = {one.name: {"size": one.stat().st_size, "sha256": sha256_of(one)} for one in there}
    record = {"model": str(target.path), "folder": str(target.path), "trust_remote_code": False, "dtype": None}
    file.write_text(json.dumps({**record, "files": facts}, indent=1) + "\n", encoding="utf-8")


def _target_files(folder: Path) -> dict[str, str]:
    """file of the target -> sha256, as target.json says."""
    found = read_object(folder / "target.json")["files"]
    return {str(name): str(facts["sha256"]) for name, facts in found.items()}


def _of_tokenizer(name: str) -> bool:
    from components.publish.formats import TOKENIZER

    return any(fnmatch.fnmatch(name, pattern) for pattern in TOKENIZER)


def write_papers(folder: Path, record: dict[str, Any], evidence: Evidence, policy: DepthPolicy) -> None:
    """All that is said about a release, into its folder; SHA256SUMS last, over everything else."""
    from components.publish.card import launch_of, write_card
    from components.publish.checksums import write_sums
    from components.publish.code_state import code_state
    from components.publish.provenance import provenance, write_provenance

    for name in POLICY_FILES:
        if (policy.path / name).is_file():
            shutil.copyfile(policy.path / name, folder / name)
    target_files = _target_files(folder / "draftsmith")
    record["tokenizer"] = {name: digest for name, digest in target_files.items() if _of_tokenizer(name)}
    record["launch"] = launch_of(record)
    code = code_state()
    record["code"] = {"commit": code.commit, "changed": code.changed}
    write_card(folder / "README.md", record, evidence)
    write_provenance(folder, provenance(record, evidence.lineage, target_files, code))
    record["files"] = _checksums(folder)
    (folder / "release.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write_sums(folder)


def versions() -> dict[str, str]:
    """Versions of what wrote the release."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("draftsmith", "torch", "transformers", "safetensors", "tokenizers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def _checksums(folder: Path) -> list[dict[str, Any]]:
    """Every file written so far with size and sha256."""
    from components.publish.checksums import files_of
    from components.targets.file_digests import sha256_of

    names = files_of(folder)
    return [{"path": n, "bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in names]


def licence_of(folder: Path | None) -> str:
    """What a model's folder says of its licence: its README's front matter, else a LICENSE file; "" for neither."""
    import yaml

    from components.targets.source import BUILTIN, local_folder

    if folder is None:
        return ""
    if folder == local_folder(BUILTIN):
        return "Apache-2.0, as Draftsmith; its corpus PSF-2.0"
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    front = re.match(r"---\n(.*?)\n---\s*\n", text, re.DOTALL)
    try:
        told = yaml.safe_load(front[1]) if front else None
    except yaml.YAMLError:
        told = None
    named = told.get("license") if isinstance(told, dict) else None
    if isinstance(named, str) and named:
        return named
    return "as its LICENSE file says" if (folder / "LICENSE").is_file() else ""
