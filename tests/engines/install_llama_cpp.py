"""Build llama.cpp's programs, once, from the sources that llama-cpp-python's source distribution holds.

Needs cmake, ninja and a C++ compiler (Debian: cmake ninja-build g++); ten to thirty minutes on two cores.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from engine_homes import LLAMA_CPP_PACKAGE, is_ready, llama_cpp_home  # noqa: E402

PROGRAMS = ("llama-speculative-simple", "llama-completion", "llama-server")
OPTIONS = ("-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_CURL=OFF", "-DLLAMA_BUILD_TESTS=OFF")


def stop(message: str) -> None:
    """One line, exit 2."""
    sys.stderr.write(f"install_llama_cpp: {message}\n")
    raise SystemExit(2)


def run(*command: str) -> None:
    """Run a command; its last line is the reason when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in done.stdout.splitlines() if line.strip()] or ["no reason given"]
        stop(f"{command[0]} failed: {said[-1][:300]}")


def main() -> None:
    """Nothing where it is ready; from the beginning where an earlier attempt was cut off."""
    home = llama_cpp_home()
    if is_ready(home):
        return
    missing = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
    if missing:
        stop(f"no {', '.join(missing)} here; install them (Debian: cmake ninja-build g++)")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    sys.stdout.write(f"test-engines: building llama.cpp in {home} (once, ten minutes or more)\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(dir=home) as work:
        fetch = ("download", "--quiet", "--no-deps", "--no-binary", ":all:", LLAMA_CPP_PACKAGE, "-d", work)
        run(sys.executable, "-m", "pip", *fetch)
        with tarfile.open(next(Path(work).glob("*.tar.gz"))) as archive:
            archive.extractall(work, filter="data")
        source = next(Path(work).glob("*/vendor/llama.cpp"))
        run("cmake", "-S", str(source), "-B", f"{work}/build", "-G", "Ninja", *OPTIONS)
        run("ninja", "-C", f"{work}/build", *PROGRAMS)
        (home / "bin").mkdir()
        for program in PROGRAMS:
            shutil.copy2(f"{work}/build/bin/{program}", home / "bin" / program)
        (home / "source").mkdir()
        for part in ("conversion", "gguf-py"):
            shutil.copytree(source / part, home / "source" / part)
        shutil.copy2(source / "convert_hf_to_gguf.py", home / "source")
        needed = ("install", "--quiet", "--no-deps", "--target", str(home / "source" / "packages"), "sentencepiece")
        run(sys.executable, "-m", "pip", *needed)  # the converter imports it for every Llama
    (home / ".ready").touch()


if __name__ == "__main__":
    main()
