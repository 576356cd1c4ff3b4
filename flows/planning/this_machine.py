"""This machine: the device of a run, facts that are recorded beside a result, folders that all homes of a user share.

torch is not imported to find a device. The folder for locks is in the temporary folder, as tmux and Ray do it, and not
where $XDG_RUNTIME_DIR points: a nightly run from cron has no such variable, and it has to find the same lock as a run
from a terminal.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import stat
import tempfile
from pathlib import Path

from components.contract import UserError

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "datasets",
    "numpy",
    "pyarrow",
    "prefect",
    "mlflow",
    "duckdb",
)


def resolve_device(device: str) -> str:
    """`auto` becomes "cuda" where a GPU and a CUDA build of torch are there, else "cpu".

    Raises:
        UserError: cuda was asked for and cannot work here, or the name is unknown.
    """
    if device == "auto":
        return "cuda" if has_cuda() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise UserError(f"--device {device}: unknown device (known: auto, cpu, cuda, cuda:N)")
    if device != "cpu" and not has_cuda():
        raise UserError(f"--device {device}: no GPU that torch can use here; leave it out to run on the CPU")
    return device


@functools.cache
def has_cuda() -> bool:
    """A GPU is visible and the installed torch is built for CUDA (its version file says so; it is not imported)."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return False
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None


@functools.cache
def library_versions() -> dict[str, str]:
    """Versions of the libraries that can change a result."""
    versions = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


@functools.cache
def cpu_features() -> tuple[str, ...]:
    """The CPU's vector extensions, by which libraries choose their kernels."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return ()
    pattern = re.compile(r"avx|amx|fma|bf16|fp16|sve|asimd|neon|sse4")
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted({word for word in value.split() if pattern.match(word)}))
    return ()


def runtime_folder() -> Path:
    """This user's folder for locks on this machine, made with mode 0700 when it is not there yet.

    Where somebody else has taken its name in the temporary folder, it is in the user's own cache folder.

    Raises:
        UserError: neither can be made.
    """
    places = (
        Path(tempfile.gettempdir()) / f"draftsmith-{os.getuid()}",
        Path.home() / ".cache" / "draftsmith" / platform.node(),  # a home may be shared between machines
    )
    for place in places:
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        facts = os.lstat(place)  # not what a link points to
        if stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid() and not facts.st_mode & 0o022:
            return place
    raise UserError(f"neither {places[0]} nor {places[1]} can be made for locks: set TMPDIR to a folder of your own")


def open_machine_lock() -> int:
    """A descriptor of the one lock file by which steps that measure have this machine to themselves."""
    return os.open(runtime_folder() / "machine.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def place_for_sockets(longest: int) -> str:
    """The temporary folder, or /tmp where its path has more than `longest` bytes: a socket's path holds only 107."""
    place = tempfile.gettempdir()
    return place if len(os.fsencode(place)) <= longest else "/tmp"
