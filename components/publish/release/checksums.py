"""SHA256SUMS: every file of a release with its sha256, in the form that `sha256sum -c SHA256SUMS` reads.

One line a file, sorted by name: 64 hex digits, two spaces, the path from the release's folder. It covers release.json
and provenance.json too, but not itself, and not `artifact.json`, which belongs to the store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from components.contract import UserError
from components.publish.card.lineage import RECORD as STORE_RECORD
from components.publish.formats.checkpoint import require_plain
from components.release_record import FileRecord
from components.targets.remembered import sha256_of

FILE = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\\\n\r]+)")


def files_of(folder: Path) -> list[str]:
    """Sorted paths of all files of a release, except SHA256SUMS and the store's record."""
    every = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
    paths = (file.relative_to(folder).as_posix() for file in every)
    return sorted(name for name in paths if name not in (FILE, STORE_RECORD))


def file_records(folder: Path, names: Iterable[str]) -> list[FileRecord]:
    """{"path", "bytes", "sha256"} of each of these files in a folder."""
    return [{"path": n, "bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in names]


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every file of a release."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in files_of(folder)]
    (folder / FILE).write_text("".join(lines), encoding="utf-8", newline="\n")


def read_sums(folder: Path) -> dict[str, str]:
    """file -> sha256, from SHA256SUMS. Raises UserError, one line, for a line that sha256sum would not accept."""
    label = f"{folder.name}/{FILE}"
    require_plain(folder / FILE, label)
    sums: dict[str, str] = {}
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{label}: not text ({error.reason}); copy it again") from error
    if lines.pop() != "":
        raise UserError(f"{label}: its last line is cut short; copy it again")
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UserError(f"{label}:{number}: {line!r:.80} is no sha256, two spaces and a path; export it again")
        digest, name = match.groups()
        if name in sums or name == FILE or name.startswith("/") or ".." in Path(name).parts:
            raise UserError(f"{label}:{number}: {name!r:.80} stands twice, or is not in this folder; export it again")
        sums[name] = digest
    return sums


def check_sums(folder: Path) -> dict[str, str]:
    """Check every file of a release and return its SHA256SUMS. Raises UserError, one line, for the first difference."""
    sums = read_sums(folder)
    names = files_of(folder)
    if strange := sorted(set(names) - set(sums)):
        raise UserError(f"{folder.name}/{strange[0]}: not part of this release; remove it")
    for name, digest in sums.items():
        require_plain(folder / name, f"{folder.name}/{name}")
        if sha256_of(folder / name) != digest:
            raise UserError(f"{folder.name}/{name}: not what was released (its sha256 differs); copy it again")
    return sums
