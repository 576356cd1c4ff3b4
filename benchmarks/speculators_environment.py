"""An environment of its own for `speculators`, which needs an older transformers than Draftsmith does.

Made once under the user's cache directory, or where DRAFTSMITH_SPECULATORS_ENV says. torch is the version that
Draftsmith is pinned to, from wherever TORCH_INDEX says (see install.py), so that both sides run the same kernels.

    python -m benchmarks.speculators_environment       makes it, where it is not there
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from install import pinned

VERSION = "0.9.0"
WORKER = Path(__file__).with_name("speculators_worker.py")


def environment() -> Path:
    """The environment's folder."""
    if named := os.environ.get("DRAFTSMITH_SPECULATORS_ENV"):
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "draftsmith" / f"speculators-{VERSION}"


def python() -> Path:
    """The environment's interpreter; makes the environment first if it is not there (minutes, 2 GB)."""
    found = environment() / "bin" / "python"
    if _version(found) != VERSION:
        print(f"making {environment()} with speculators {VERSION} (minutes, once)", flush=True)
        _run([sys.executable, "-m", "venv", str(environment())])
        choice = os.environ.get("TORCH_INDEX", "any")
        index = [] if choice in ("any", "auto") else ["--extra-index-url", choice]
        # One resolution for both: speculators alone would take the newest torch, and with it CUDA.
        _run([str(found), "-m", "pip", "install", "--quiet", *index, f"speculators=={VERSION}", pinned("torch")])
        # Wrong builds of these two break the import of transformers; nothing here needs them.
        _run([str(found), "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "torchaudio"])
    return found


def _version(interpreter: Path) -> str:
    if not interpreter.exists():
        return ""
    asked = "import importlib.metadata as m; print(m.version('speculators'))"
    done = subprocess.run([str(interpreter), "-c", asked], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _run(command: list[str]) -> None:
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"speculators: `{' '.join(command)}` failed, its own message is above")


if __name__ == "__main__":
    python()
