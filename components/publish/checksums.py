"""SHA256SUMS: every file of a release with its sha256, in the form that `sha256sum -c SHA256SUMS` reads.

One line a file, sorted by name: 64 hex digits, two spaces, the path from the release's folder. It covers release.json
and provenance.json as well; of itself it can say nothing, and `artifact.json` is the store's, not the release's.
"""

from __future__ import annotations

import re
from pathlib import Path

from components.contract import UserError
from components.publish.checkpoint_files import require_plain
from components.targets.file_digests import sha256_of

FILE = "SHA256SUMS"
OF_THE_STORE = "artifact.json"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\\\n\r]+)")


def files_of(folder: Path) -> list[str]:
    """Everything in a release but SHA256SUMS and the store's own record: paths from its folder, sorted."""
    every = (file for file in folder.rglob("*") if file.is_symlink() or not file.is_dir())
    found = (file.relative_to(folder).as_posix() for file in every)
    return sorted(name for name in found if name not in (FILE, OF_THE_STORE))


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS over every file of a release."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in files_of(folder)]
    (folder / FILE).write_text("".join(lines), encoding="utf-8", newline="\n")


def read_sums(folder: Path) -> dict[str, str]:
    """file -> sha256 as SHA256SUMS says; raises UserError, one line, for one that sha256sum would not take."""
    at = f"{folder.name}/{FILE}"
    require_plain(folder / FILE, at)
    found: dict[str, str] = {}
    try:
        lines = (folder / FILE).read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{at}: not text ({error.reason}); copy it again") from error
    if lines.pop() != "":
        raise UserError(f"{at}: its last line is cut short; copy it again")
    for number, line in enumerate(lines, start=1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise UserError(f"{at}:{number}: {line!r:.80} is no sha256, two spaces and a path; export it again")
        digest, name = match.groups()
        if name in found or name == FILE or name.startswith("/") or ".." in Path(name).parts:
            raise UserError(f"{at}:{number}: {name!r:.80} stands twice, or is not in this folder; export it again")
        found[name] = digest
    return found


def check_sums(folder: Path) -> dict[str, str]:
    """SHA256SUMS, every file of the release held against it; raises UserError, one line, for the first that differs."""
    sums = read_sums(folder)
    there = files_of(folder)
    if strange := sorted(set(there) - set(sums)):
        raise UserError(f"{folder.name}/{strange[0]}: not part of this release; remove it")
    for name, digest in sums.items():
        require_plain(folder / name, f"{folder.name}/{name}")
        if sha256_of(folder / name) != digest:
            raise UserError(f"{folder.name}/{name}: not what was released (its sha256 differs); copy it again")
    return sums
