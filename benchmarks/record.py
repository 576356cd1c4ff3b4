"""What every benchmark leaves behind: one JSON file with its numbers, the machine and the versions."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.machine import describe_machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """The commit measured, with a plus sign where the tree had changes."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")


def write_record(name: str, numbers: Mapping[str, Any], *, device: str = "cpu") -> Path:
    """Write benchmarks/results/NAME-DATE.json and return its path; a record is never overwritten by another day's.

    device: what was measured on ("cpu", "cuda"); the machine's description names it.
    """
    now = datetime.now(UTC)
    machine = dataclasses.asdict(describe_machine(device))
    record = {
        "benchmark": name,
        "measured_at": now.isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
    file.write_text(json.dumps({**record, **numbers}, indent=1) + "\n", encoding="utf-8")
    return file
