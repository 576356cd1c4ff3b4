"""Build llama.cpp's programs, once, from the sources that llama-cpp-python's source distribution holds.

Needs cmake, ninja and a C++ compiler (Debian: cmake ninja-build g++). Only the three programs that are driven are
built, and lightly (lighter_llama_cpp.cmake): they show what llama.cpp says and keeps, never how fast it is. An attempt
that was cut off goes on where it was.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]

from engine_homes import LLAMA_CPP_PACKAGE, is_ready, llama_cpp_home  # noqa: E402

PROGRAMS = ("llama-speculative-simple", "llama-completion", "llama-server")
LIGHTER = Path(__file__).with_name("lighter_llama_cpp.cmake")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_C_FLAGS_RELEASE=-O1 -DNDEBUG",
    "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG",
    f"-DCMAKE_PROJECT_llama.cpp_INCLUDE={LIGHTER}",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_ALL_WARNINGS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would ask a model hub for the server's web page
    "-DLLAMA_OPENSSL=OFF",
)


def stop(message: str) -> None:
    """One line, exit 2."""
    sys.stderr.write(f"install_llama_cpp: {message}\n")
    raise SystemExit(2)


def run(*command: str, shown: bool = False) -> None:
    """Run a command; its last line is the reason when it fails. shown: what it prints goes to the terminal."""
    output = None if shown else subprocess.PIPE
    done = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        said = [line for line in (done.stdout or "its own message is above").splitlines() if line.strip()]
        stop(f"{command[0]} failed: {(said or ['no reason given'])[-1][:300]}")


def fetched(work: Path) -> Path:
    """llama.cpp's sources, downloaded and unpacked unless an earlier attempt has done so."""
    unpacked, partly = work / "unpacked", work / "unpacked.part"
    if not unpacked.is_dir():
        shutil.rmtree(partly, ignore_errors=True)
        partly.mkdir(parents=True)
        package = LLAMA_CPP_PACKAGE.partition("==")[0]
        fetch = ("download", "--quiet", "--no-deps", "--no-binary", package, LLAMA_CPP_PACKAGE, "-d", str(partly))
        run(sys.executable, "-m", "pip", *fetch)
        with tarfile.open(next(partly.glob("*.tar.gz"))) as archive:
            archive.extractall(partly, filter="data")
        partly.rename(unpacked)
    return next(unpacked.glob("*/vendor/llama.cpp"))


def main() -> None:
    """Nothing where it is ready."""
    home = llama_cpp_home()
    if is_ready(home):
        return
    missing = [tool for tool in ("cmake", "ninja", "c++") if shutil.which(tool) is None]
    if missing:
        stop(f"no {', '.join(missing)} here; install them (Debian: cmake ninja-build g++)")
    work = home / "work"
    sys.stdout.write(f"test-engines: building llama.cpp in {home} (once, some minutes)\n")
    sys.stdout.flush()
    source = fetched(work)
    run("cmake", "-S", str(source), "-B", f"{work}/build", "-G", "Ninja", *OPTIONS)
    run("ninja", "-C", f"{work}/build", *PROGRAMS, shown=True)
    for folder in (home / "bin", home / "source"):
        folder.mkdir(exist_ok=True)
    for program in PROGRAMS:
        shutil.copy2(f"{work}/build/bin/{program}", home / "bin" / program)
    for part in ("conversion", "gguf-py"):
        shutil.copytree(source / part, home / "source" / part, dirs_exist_ok=True)
    shutil.copy2(source / "convert_hf_to_gguf.py", home / "source")
    packages = home / "source" / "packages"
    needed = ("install", "--quiet", "--no-deps", "--upgrade", "--target", str(packages), "sentencepiece")
    run(sys.executable, "-m", "pip", *needed)  # the converter imports it for every Llama
    shutil.rmtree(work)
    (home / ".ready").touch()


if __name__ == "__main__":
    main()
