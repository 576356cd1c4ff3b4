"""Create `.venv` with the pinned versions of constraints.txt, without ever pulling CUDA onto a machine that has no GPU.

Where torch comes from is decided by TORCH_INDEX:
  auto (default)  whatever pip is configured with; if that would bring CUDA to a Linux machine without an NVIDIA
                  driver, PyTorch's own CPU index instead; if that cannot be reached, stop and say so.
  any             whatever pip is configured with, CUDA included.
  URL             that index.
Runs on the standard library alone, since nothing is installed yet.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def stop(message: str) -> None:
    """One line, exit 2."""
    sys.stderr.write(f"install: {message}\n")
    raise SystemExit(2)


def pip(*arguments: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the environment's pip; the caller looks at the exit status."""
    return subprocess.run(
        [str(VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *arguments],
        text=True,
        stdout=subprocess.PIPE if capture else None,
        stderr=subprocess.PIPE if capture else None,
        check=False,
    )


def pinned(name: str) -> str:
    """The requirement `name==version` as constraints.txt pins it."""
    found = re.search(
        rf"^{re.escape(name)}==\S+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    if found is None:
        stop(f"constraints.txt does not pin {name}; add a line `{name}==VERSION`")
    assert found is not None
    return found.group(0)


def has_gpu() -> bool:
    """Whether an NVIDIA driver answers here."""
    return (
        shutil.which("nvidia-smi") is not None
        and subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0
    )


def brings_cuda(requirement: str) -> bool:
    """Whether pip's own choice of torch depends on NVIDIA packages; asks the index, installs nothing."""
    asked = pip(
        "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", requirement, capture=True
    )
    if asked.returncode != 0:
        reason = asked.stderr.strip().splitlines()[-1] if asked.stderr.strip() else "no reason given"
        stop(f"pip finds no {requirement}: {reason}")
    metadata = json.loads(asked.stdout)["install"][0]["metadata"]
    return any(re.match(r"(nvidia|triton|cuda)", need) for need in metadata.get("requires_dist", []))


def install_torch() -> None:
    """Install the pinned torch from the place TORCH_INDEX names."""
    requirement = pinned("torch")
    choice = os.environ.get("TORCH_INDEX", "auto")
    index: list[str] = []
    if choice not in ("auto", "any"):
        index = ["--index-url", choice]
    elif choice == "auto" and platform.system() == "Linux" and not has_gpu() and brings_cuda(requirement):
        sys.stdout.write(f"no GPU here, and pip's own torch would bring CUDA: taking {requirement} from {CPU_INDEX}\n")
        index = ["--index-url", CPU_INDEX]
    done = pip("install", "--quiet", *index, requirement)
    if done.returncode != 0:
        stop(
            f"could not install {requirement}; set TORCH_INDEX to an index that has a CPU build, "
            "or TORCH_INDEX=any to accept CUDA (gigabytes)"
        )


def main() -> None:
    """Everything a fresh machine needs to run and test Draftsmith."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this file is what an older Python would be asked to run
        stop(f"Python 3.11 or newer is needed, this is {platform.python_version()}; try `make demo PYTHON=python3.12`")
    if not (VENV / "bin" / "python").exists():
        sys.stdout.write("creating .venv\n")
        if subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=False).returncode != 0:
            stop("python cannot make a virtual environment; install the venv module (Debian: python3-venv)")
    installed = pip("show", "--quiet", "torch", capture=True).returncode == 0
    if not installed:
        install_torch()
    sys.stdout.write("installing pinned packages (a few minutes on first use)\n")
    if pip("install", "--quiet", "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[dev]").returncode != 0:
        stop("pip could not install the pinned packages; its own message is above")


if __name__ == "__main__":
    main()
