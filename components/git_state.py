"""The commit of Draftsmith that is running, and whether files differ from it.

It is recorded beside results and is never part of a key: a commit that changes a README must not train anything again.
The code that a step reaches is part of its key, as digests of its syntax (flows/planning/code_index.py).
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CODE = ("components", "flows", "storage")
TIMEOUT_S = 20


class CodeState(NamedTuple):
    """commit: hex, None outside a clone or without git. changed: whether files under CODE differ from it or are new."""

    commit: str | None
    changed: bool | None


@functools.cache
def code_state() -> CodeState:
    """The state of the clone around this file at the first call; git runs once."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        return CodeState(None, None)
    command = [git, "-C", str(ROOT), "status", "--porcelain=v2", "--branch", "--", *CODE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return CodeState(None, None)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    commit = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if commit in (None, "(initial)"):
        return CodeState(None, None)
    return CodeState(commit, any(not line.startswith("#") for line in lines))
