"""Lists the files behind a source, in an order that depends on their names alone, and those that cannot be read.

`list_files` serves data.collect_chats: it walks folders recursively, reads URLs, and reports unreadable files like bad
rows, with their reason. `find_files`, `traffic_files` and `local_files` serve the steps that read prompts. A file that
could hang the reader or expose what the user did not name (a FIFO, a device, a link that leads out of the folder) is
never opened. A step's fingerprint, which enters its key, is the sha256 of each file.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from components.contract import UserError
from components.data.settings import ChatSource, WorkloadSource, workload_source
from components.data.sources.addresses import PREFIX, is_url, parse_hub_source, source_files
from components.data.sources.files import SUFFIXES, TABLE_SUFFIXES, TEXT_SUFFIXES, Span, cut_lines
from components.data.sources.python_stdlib import STDLIB, stdlib_files
from components.data.sources.streams import COMPRESSIONS, file_system, suffix_of
from components.outside_json import JsonObject
from components.targets.remembered import sha256_of
from components.text import as_utf8, message_of

_MAGIC: Final = re.compile(r"[*?\[]")
_OF_DATASETS: Final = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""Files without rows that `datasets` writes beside its Arrow files."""
_TABLES: Final = (".csv", ".zip")
_LEADS_OUT: Final = ("link_out_of_folder", "a link that leads out of the folder; allow it with follow_links: true")


@dataclass(frozen=True)
class SourceFile:
    """A file to read. location: its path or URL. name: its name below the source's folder. size: bytes.

    span: the lines to read where the file is cut; None for all.
    """

    location: str
    name: str
    size: int
    span: Span | None = None

    def cut(self, kind: str, size: int) -> list[SourceFile]:
        """The file, or pieces of about `size` bytes where it can be cut: uncompressed JSONL on this disk."""
        can_be_cut = not is_url(self.location) and (kind or suffix_of(self.location)) in (".jsonl", ".ndjson")
        if not can_be_cut or self.location.endswith(COMPRESSIONS) or self.size <= 2 * size:
            return [self]
        spans = cut_lines(Path(self.location), size)
        return [replace(self, size=span.stop - span.start, span=span) for span in spans]


@dataclass(frozen=True)
class UnusableFile:
    """A file that cannot be read. reason: the same for all files with this fault; message: one line."""

    name: str
    reason: str
    message: str


@dataclass
class Listing:
    """The files of a source. num_others: files of other kinds, which are ignored."""

    files: list[SourceFile] = field(default_factory=list)
    unusable: list[UnusableFile] = field(default_factory=list)
    num_others: int = 0


def list_files(source: ChatSource) -> Listing:
    """The files of a source, sorted by name; raises UserError where there is none, or the path is unusable."""
    if (hub := source.hub) is not None:
        return Listing([SourceFile(str(file), file.name, 0) for file in source_files(hub)])
    try:
        if "\0" in source.path:
            raise ValueError("a NUL character")
        listing = _list_remote(source) if is_url(source.path) else _list_local(source)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(
            f"sources: {source.path[:200]!r}: not a usable path ({message_of(error, 200)}); mend it"
        ) from error
    listing.files.sort(key=lambda file: file.name)
    listing.unusable.sort(key=lambda file: file.name)
    if not listing.files:
        raise UserError(f"sources: {source.path}: {_no_files_message(listing, source)}")
    return listing


def _no_files_message(listing: Listing, source: ChatSource) -> str:
    if listing.unusable:
        first = listing.unusable[0]
        return f"none of its {len(listing.unusable)} files can be read; {first.name}: {first.message}"
    if listing.num_others:
        return (
            f"none of its {listing.num_others} files is a known kind ({_kinds_read(source)}); name one, or say format:"
        )
    return "there is no such file, or nothing in it; check the path"


def _kinds_read(source: ChatSource) -> str:
    kinds = (source.kind,) if source.kind else (*TABLE_SUFFIXES, *TEXT_SUFFIXES)
    return ", ".join(kind for kind in kinds if not kind.endswith(COMPRESSIONS))


def _is_read(source: ChatSource, name: str, *, named: bool) -> bool:
    """Whether a file of this name is read. named: the user named it, alone or by a pattern."""
    if source.kind and named:
        return True
    if name in _OF_DATASETS:
        return False
    kind = suffix_of(name)
    if source.format == "text":
        return kind in TEXT_SUFFIXES
    if source.kind:
        others = {".jsonl": (".ndjson",), ".arrow": (".feather", ".ipc")}
        return kind == source.kind or kind in others.get(source.kind, ())
    return name.lower().endswith(TABLE_SUFFIXES) or (named and kind in TEXT_SUFFIXES)


def _list_local(source: ChatSource) -> Listing:
    listing = Listing()
    path = Path(source.path).expanduser()
    if path.is_dir():
        for file in _walk(path, path, source.follow_links, listing, {path.resolve()}):
            _classify_file(file, path, source, listing, named=False)
    elif path.exists():
        if not _is_read(source, path.name, named=True):
            raise UserError(f"sources: {path}: unknown kind of file; expected {_kinds_read(source)}, or say format:")
        if fault := _file_fault(path, path.resolve().parent, True):
            raise UserError(f"sources: {path}: {fault[1]}")
        listing.files.append(SourceFile(str(path), path.name, path.stat().st_size))
    elif magic := _MAGIC.search(source.path):
        root = Path(os.path.dirname(source.path[: magic.start()]) or ".").expanduser()
        for name in glob.iglob(str(path), recursive=True):
            if not os.path.isdir(name):
                _classify_file(Path(name), root, source, listing, named=True)
    return listing


def _walk(folder: Path, top: Path, follow: bool, listing: Listing, visited: set[Path]) -> Iterator[Path]:
    """Every file below a folder that is not hidden; links to folders only where they may be followed, each once."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        listing.unusable.append(
            UnusableFile(_relative_name(folder, top), "unreadable", f"folder: {message_of(error, 200)}")
        )
        return
    for entry in entries:
        path = Path(entry.path)
        if entry.name.startswith("."):
            continue
        if not path.is_dir():  # False for a link to itself, where the entry's own method raises
            yield path
            continue
        real = path.resolve()
        if entry.is_symlink() and not follow:
            if not real.is_relative_to(top.resolve()):
                listing.unusable.append(UnusableFile(_relative_name(path, top), *_LEADS_OUT))
        elif real not in visited:
            visited.add(real)
            yield from _walk(path, top, follow, listing, visited)


def _classify_file(path: Path, root: Path, source: ChatSource, listing: Listing, *, named: bool) -> None:
    """Add a file to the listing: to be read, not readable, or of another kind."""
    if not _is_read(source, path.name, named=named):
        listing.num_others += 1
        return
    name = _relative_name(path, root)
    if fault := _file_fault(path, root.resolve(), source.follow_links):
        listing.unusable.append(UnusableFile(name, *fault))
    else:
        listing.files.append(SourceFile(str(path), name, path.stat().st_size))


def _file_fault(path: Path, root: Path, follow: bool) -> tuple[str, str] | None:
    """(reason, message) of a file that cannot be read; None where it can. The file is not opened."""
    try:
        facts = path.stat()
    except OSError as error:
        return ("broken_link" if path.is_symlink() else "unreadable"), message_of(error, 200)
    if not stat.S_ISREG(facts.st_mode):
        return "not_a_file", "no regular file (a pipe, a socket or a device): it might never end"
    if not follow and not path.resolve().is_relative_to(root):
        return _LEADS_OUT
    if not os.access(path, os.R_OK):
        return "unreadable", "not readable by this user; change its permissions"
    if not facts.st_size:
        return "empty_file", "the file is empty; remove it or fill it"
    return None


def _relative_name(path: Path, root: Path) -> str:
    """The name below the source's folder, with slashes, as valid UTF-8 whatever bytes it holds."""
    try:
        name = path.relative_to(root).as_posix()
    except ValueError:
        name = os.path.relpath(path, root)
    return as_utf8(name)


def _list_remote(source: ChatSource) -> Listing:
    listing = Listing()
    system = file_system(source.path)
    try:
        objects = _list_objects(system, source.path)
    except UserError:
        raise
    except Exception as error:  # every kind of network and permission failure ends here, as one line
        mend = "check URL and access"
        if source.path.startswith("hf://"):
            mend = "a hub is reached by `draftsmith run --online` alone"
        raise UserError(f"sources: {source.path}: not to be had ({message_of(error, 200)}); {mend}") from error
    named = len(objects) == 1 or _MAGIC.search(source.path) is not None
    protocol = source.path.split("://", 1)[0]
    root = source.path.split("://", 1)[1]
    root = root[: pattern_at.start()].rpartition("/")[0] if (pattern_at := _MAGIC.search(root)) else root.rstrip("/")
    for name, size in objects:
        bare = name.lstrip("/")
        relative = bare.removeprefix(root.lstrip("/")).lstrip("/") or bare.rsplit("/", 1)[-1]
        if any(part.startswith(".") for part in relative.split("/")):
            continue
        if not _is_read(source, bare.rsplit("/", 1)[-1], named=named):
            listing.num_others += 1
        elif not size:
            listing.unusable.append(UnusableFile(relative, "empty_file", "the object is empty"))
        else:
            listing.files.append(SourceFile(f"{protocol}://{name}", relative, size))
    return listing


def _list_objects(system: Any, url: str) -> list[tuple[str, int]]:
    """(name, bytes) of every object that a URL, a prefix or a pattern names."""
    if _MAGIC.search(url):
        objects = system.glob(url, detail=True)
    elif system.isfile(url):
        objects = {system._strip_protocol(url): system.info(url)}
    else:
        objects = system.find(url, detail=True)
    return [(name, int(facts.get("size") or 0)) for name, facts in objects.items() if facts.get("type") == "file"]


def find_files(source: str) -> list[Path]:
    """The files that a path or a glob pattern names, sorted; raises UserError when there is none or one is unusable."""
    kinds, root = ", ".join(SUFFIXES), None
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            root = path
            files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIXES) and file.is_file())
            if not files:
                raise UserError(f"source: {source}: no {kinds} file in this folder; name the folder that holds them")
        elif path.is_file():
            files = [path]
        else:
            files, root = sorted(files_of_pattern(str(path))), folder_of_pattern(source)
        sizes = [file.stat().st_size for file in files]
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {source[:200]}: not a usable path ({error}); give one that can be read") from error
    if not files:
        raise UserError(
            f"source: {source}: no such file; give 'python-stdlib', a path or pattern of {kinds}, or hf:NAME:SPLIT"
        )
    for file, size in zip(files, sizes, strict=True):
        if not file.name.endswith(SUFFIXES):
            raise UserError(f"source: {file}: unknown kind of file; expected one of {kinds}")
        require_usable(file, size, root)
    return files


def require_usable(file: Path, size: int, root: Path | None) -> None:
    """Raise UserError where a file is empty, unreadable, or a link out of the folder it was found in (`root`)."""
    if root is not None and leads_out(file, root):
        raise UserError(f"source: {file}: is a link that leads out of {root}; name the file that it leads to")
    if size == 0:
        raise UserError(f"source: {file}: the file is empty; remove it or fill it")
    if not os.access(file, os.R_OK):
        raise UserError(f"source: {file}: not readable by this user; change its permissions")


def files_of_pattern(pattern: str) -> list[Path]:
    """The files that match a glob pattern."""
    return [Path(name) for name in glob.glob(pattern, recursive=True) if Path(name).is_file()]


def folder_of_pattern(source: str) -> Path:
    """The folder of a glob pattern: the part before its first wild card."""
    wild = min((source.find(sign) for sign in "*?[" if sign in source), default=len(source))
    return Path(os.path.dirname(source[:wild]) or ".").expanduser()


def leads_out(file: Path, root: Path) -> bool:
    """Whether a file below a folder is a link out of it: whoever writes there could have any file read."""
    return not file.resolve().is_relative_to(root.resolve())


def traffic_files(source: str) -> tuple[list[Path], int]:
    """(non-empty files of a source, sorted; how many files are skipped: of another kind, or links out of the folder).

    A folder or pattern may have no files; raises UserError where the folder does not exist.
    """
    try:
        path = Path(source).expanduser()
        is_pattern = any(sign in source for sign in "*?[")
        folder = folder_of_pattern(source) if is_pattern else path
        if folder.is_dir():
            candidates = files_of_pattern(str(path)) if is_pattern else list(path.iterdir())
        elif not is_pattern and path.name.endswith(SUFFIXES):
            candidates = find_files(source) if not path.is_file() or path.stat().st_size else []
        else:
            raise UserError(
                f"source: {folder}: no such folder; `mkdir -p {folder}` makes it, or name the one with the traffic"
            )
        files = sorted(file for file in candidates if file.is_file() and not file.name.startswith("."))
        inside = [file for file in files if not folder.is_dir() or not leads_out(file, folder)]
        usable = [file for file in inside if file.name.endswith(SUFFIXES)]
        return [file for file in usable if file.stat().st_size > 0], len(files) - len(usable)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {source[:200]}: not a usable path ({error}); give one that can be read") from error


def local_files(source: WorkloadSource) -> list[Path]:
    """The local files of a source, sorted; none for a source on the hub."""
    if not source.path:
        return []
    if source.path.startswith(PREFIX):
        return source_files(parse_hub_source(source.path))
    return _tabular_files(source.path) or find_files(source.path)


def _tabular_files(path: str) -> list[Path]:
    """The CSV or zip files that a path or pattern names; none when it names something else."""
    try:
        place = Path(path).expanduser()
        if place.is_dir():
            root, candidates = place, list(place.glob("*.csv"))
        elif not path.endswith(_TABLES):
            return []
        elif place.is_file():
            require_usable(place, place.stat().st_size, None)
            return [place]
        else:
            root = folder_of_pattern(path)
            candidates = list(Path(place.anchor or ".").glob(str(place.relative_to(place.anchor))))
        files = sorted(file for file in candidates if file.is_file())
        for file in files:
            require_usable(file, file.stat().st_size, root)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"source: {path[:200]}: not a usable path ({error}); give one that can be read") from error
    return files


def collect_chats_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source, or the reason why a file is not read."""
    digests: dict[str, str] = {}
    for declared in settings["sources"]:
        source = ChatSource.model_validate(declared)
        if is_url(source.path):
            continue
        listing = list_files(source)
        digests |= {file.location: sha256_of(Path(file.location)) for file in listing.files}
        digests |= {f"{source.label}: {unusable.name}": unusable.reason for unusable in listing.unusable}
    return digests


def collect_prompts_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`."""
    named = (str(settings.get("source", STDLIB)), str(settings.get("keep_out", "")))
    return {name: digest for source in named if source for name, digest in digests_of(source).items()}


def collect_traffic_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of `source` and `keep_out`."""
    files, _ = traffic_files(str(settings["source"]))
    digests = {str(file): sha256_of(file) for file in files}
    if keep_out := str(settings.get("keep_out", "")):
        digests |= digests_of(keep_out)
    return digests


def collect_workloads_fingerprint(settings: JsonObject) -> dict[str, str]:
    """File -> sha256 of every local source."""
    sources = [workload_source(item) for item in settings["sources"]]
    return {str(file): sha256_of(file) for source in sources for file in local_files(source)}


def digests_of(source: str) -> dict[str, str]:
    """The files of a source of `collect_prompts`: name -> sha256."""
    if source == STDLIB:
        total = hashlib.sha256()
        for entry in stdlib_files():
            total.update(f"{entry.source}\0{sha256_of(entry.path)}\n".encode())
        return {STDLIB: total.hexdigest()}
    files = source_files(parse_hub_source(source)) if source.startswith(PREFIX) else find_files(source)
    return {str(file): sha256_of(file) for file in files}
