"""What the registry needs to know of a release, and the copy of our code that goes with its model."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from storage.artifacts import RECORD_FILE
from storage.records import git_commit
from storage.tracking import KEY_TAG

ROOT = Path(__file__).resolve().parents[1]
_FACTS = (
    "target",
    "target_key",
    "draft_key",
    "method",
    "depth_k",
    "verdict",
    "al",
    "al_meas",
    "speedup_pred",
    "speedup_meas",
    "meas_lo",
    "meas_hi",
    "pred_error",
)


@dataclass(frozen=True)
class ReleaseFacts:
    """What the registry needs to know of a Release; read from artifact.json."""

    release_key: str
    name: str
    target: str
    worth_using: bool  # the verdict is not "do not speculate"
    gate_passed: bool
    tags: dict[str, str]


def facts_of(release: Path) -> ReleaseFacts:
    """What artifact.json says of a release; publish/export.py puts these facts into its info."""
    content = json.loads((release / RECORD_FILE).read_text(encoding="utf-8"))
    info, record = content["info"], content["record"]
    tags = {
        KEY_TAG: content["key"],
        "draftsmith.pipeline": str(record.get("pipeline", "")),
        "draftsmith.git_commit": str(record.get("git_commit") or git_commit() or ""),
        "gate.status": "passed" if info["gate_passed"] else "failed",
        "gate.checks": json.dumps(info["gate_checks"]),
    }
    tags |= {f"draftsmith.{name}": str(info[name]) for name in _FACTS if info.get(name) is not None}
    name = _model_name(str(info["target"]), str(info["method"]))
    return ReleaseFacts(
        release_key=content["key"],
        name=name,
        target=str(info["target"]),
        worth_using=info["verdict"] in ("use", "undecided"),
        gate_passed=bool(info["gate_passed"]),
        tags=tags,
    )


def _model_name(target: str, method: str) -> str:
    """`<target name>-<method>`; a target in a folder is named by the folder, one from a hub by its id."""
    name = Path(target).name if Path(target).is_absolute() or target.startswith(".") else target
    return re.sub(r"[^\w.-]+", "-", f"{name}-{method}").strip("-")


def copy_of_components(scratch: Path, with_builtin: bool) -> Path:
    """The code that the model needs, so that it loads where Draftsmith is not installed; weights if it serves them."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        if with_builtin and Path(folder).name == "builtin":
            return set()
        return {name for name in names if "." in name and not name.endswith((".py", ".json"))} | {"__pycache__"}

    place = scratch / "components"
    shutil.copytree(ROOT / "components", place, ignore=left_out)
    return place
