"""What every benchmark leaves behind: one JSON file with its numbers, the machine and the versions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.files import write_whole
from components.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured, with a plus sign where the tree had changes."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def write_record(name: str, numbers: Mapping[str, Any], *, device: str = "cpu", folder: Path = RESULTS) -> Path:
    """Write benchmarks/results/NAME-DATE.json and return its path; a record is never overwritten by another day's.

    device: what was measured on ("cpu", "cuda"); the machine's description names it. A reader, or a kill, finds the
    record as it was before or whole.
    """
    now = datetime.now(UTC)
    machine = dataclasses.asdict(describe_machine(device))
    record = {
        "benchmark": name,
        "measured_at": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}-{now:%Y-%m-%d}.json"
    write_whole(file, json.dumps({**record, **numbers}, indent=1) + "\n")
    return file
