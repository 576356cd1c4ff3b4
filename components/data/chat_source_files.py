"""The files behind a source of chats, in an order that depends on their names alone, and what there cannot be read.

A folder is walked with all below it. What could hang a reader or show it what the user did not name (a FIFO, a device,
a link that leads out of the folder) is never opened: it is reported like a bad row, with its reason.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from components.contract import UserError
from components.data.chat_sources import ChatSource
from components.data.hub_rows import source_files
from components.data.row_files import TABLE_SUFFIXES, TEXT_SUFFIXES, Span, cut_lines
from components.data.row_streams import COMPRESSIONS, file_system, is_url, one_line, suffix_of

_MAGIC: Final = re.compile(r"[*?\[]")
_OF_DATASETS: Final = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
"""What `datasets` writes beside its Arrow files: no rows."""
_LEADS_OUT: Final = ("link_out_of_folder", "a link that leads out of the folder; allow it with follow_links: true")


@dataclass(frozen=True)
class FoundFile:
    """A file to read. place: its path or URL. where: its name below the source's folder. size: bytes.

    span: the lines that are read of it, where it is cut; None: all.
    """

    place: str
    where: str
    size: int
    span: Span | None = None

    def cut(self, kind: str, size: int) -> list[FoundFile]:
        """Itself, or its pieces of about this size where it can be cut: JSONL on this disk that is not compressed."""
        can_be_cut = not is_url(self.place) and (kind or suffix_of(self.place)) in (".jsonl", ".ndjson")
        if not can_be_cut or self.place.endswith(COMPRESSIONS) or self.size <= 2 * size:
            return [self]
        spans = cut_lines(Path(self.place), size)
        return [replace(self, size=span.stop - span.start, span=span) for span in spans]


@dataclass(frozen=True)
class Unusable:
    """What is there and cannot be read. reason: the same for all of its kind; said: one line."""

    where: str
    reason: str
    said: str


@dataclass
class Listing:
    """What a source holds. num_others: files of kinds that hold no rows, left alone."""

    files: list[FoundFile] = field(default_factory=list)
    unusable: list[Unusable] = field(default_factory=list)
    num_others: int = 0


def list_files(source: ChatSource) -> Listing:
    """The files of a source, sorted by name; raises UserError where there is none, or the path is unusable."""
    if (hub := source.hub) is not None:
        return Listing([FoundFile(str(file), file.name, 0) for file in source_files(hub)])
    try:
        if "\0" in source.path:
            raise ValueError("a NUL character")
        listing = _remote(source) if is_url(source.path) else _local(source)
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user, no permission
        raise UserError(f"sources: {source.path[:200]!r}: not a usable path ({one_line(error)}); mend it") from error
    listing.files.sort(key=lambda file: file.where)
    listing.unusable.sort(key=lambda one: one.where)
    if not listing.files:
        raise UserError(f"sources: {source.path}: {_why_none(listing, source)}")
    return listing


def _why_none(listing: Listing, source: ChatSource) -> str:
    if listing.unusable:
        first = listing.unusable[0]
        return f"none of its {len(listing.unusable)} files can be read; {first.where}: {first.said}"
    if listing.num_others:
        return f"none of its {listing.num_others} files is a known kind ({_known(source)}); name one, or say format:"
    return "there is no such file, or nothing in it; check the path"


def _known(source: ChatSource) -> str:
    kinds = (source.kind,) if source.kind else (*TABLE_SUFFIXES, *TEXT_SUFFIXES)
    return ", ".join(kind for kind in kinds if not kind.endswith(COMPRESSIONS))


def _takes(source: ChatSource, name: str, *, named: bool) -> bool:
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


def _local(source: ChatSource) -> Listing:
    listing = Listing()
    path = Path(source.path).expanduser()
    if path.is_dir():
        for file in _walk(path, path, source.follow_links, listing, {path.resolve()}):
            _consider(file, path, source, listing, named=False)
    elif path.exists():
        if not _takes(source, path.name, named=True):
            raise UserError(f"sources: {path}: unknown kind of file; expected {_known(source)}, or say format:")
        if why := _why_unusable(path, path.resolve().parent, True):
            raise UserError(f"sources: {path}: {why[1]}")
        listing.files.append(FoundFile(str(path), path.name, path.stat().st_size))
    elif magic := _MAGIC.search(source.path):
        import glob

        root = Path(os.path.dirname(source.path[: magic.start()]) or ".").expanduser()
        for name in glob.iglob(str(path), recursive=True):
            if not os.path.isdir(name):
                _consider(Path(name), root, source, listing, named=True)
    return listing


def _walk(folder: Path, top: Path, follow: bool, listing: Listing, seen: set[Path]) -> Iterator[Path]:
    """Every file below a folder that is not hidden; links to folders only where they may be followed, each once."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        listing.unusable.append(Unusable(_below(folder, top), "unreadable", f"folder: {one_line(error)}"))
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
                listing.unusable.append(Unusable(_below(path, top), *_LEADS_OUT))
        elif real not in seen:
            seen.add(real)
            yield from _walk(path, top, follow, listing, seen)


def _consider(path: Path, root: Path, source: ChatSource, listing: Listing, *, named: bool) -> None:
    """Put a file where it belongs: to be read, not readable, or of another kind."""
    if not _takes(source, path.name, named=named):
        listing.num_others += 1
        return
    where = _below(path, root)
    if why := _why_unusable(path, root.resolve(), source.follow_links):
        listing.unusable.append(Unusable(where, *why))
    else:
        listing.files.append(FoundFile(str(path), where, path.stat().st_size))


def _why_unusable(path: Path, root: Path, follow: bool) -> tuple[str, str] | None:
    """(reason, in words) why a file cannot be read; None where it can. Nothing is opened to find out."""
    try:
        facts = path.stat()
    except OSError as error:
        return ("broken_link" if path.is_symlink() else "unreadable"), one_line(error)
    if not stat.S_ISREG(facts.st_mode):
        return "not_a_file", "no regular file (a pipe, a socket or a device): it might never end"
    if not follow and not path.resolve().is_relative_to(root):
        return _LEADS_OUT
    if not os.access(path, os.R_OK):
        return "unreadable", "not readable by this user; change its permissions"
    if not facts.st_size:
        return "empty_file", "the file is empty; remove it or fill it"
    return None


def _below(path: Path, root: Path) -> str:
    """The name below the source's folder, with slashes, as text that can be written whatever bytes it holds."""
    try:
        name = path.relative_to(root).as_posix()
    except ValueError:
        name = os.path.relpath(path, root)
    return name.encode("utf-8", "replace").decode("utf-8")


def _remote(source: ChatSource) -> Listing:
    listing = Listing()
    system = file_system(source.path)
    try:
        found = _objects(system, source.path)
    except UserError:
        raise
    except Exception as error:  # every kind of network and permission failure ends here, as one line
        mend = "check URL and access"
        if source.path.startswith("hf://"):
            mend = "a hub is reached by `draftsmith run --online` alone"
        raise UserError(f"sources: {source.path}: not to be had ({one_line(error)}); {mend}") from error
    named = len(found) == 1 or _MAGIC.search(source.path) is not None
    protocol = source.path.split("://", 1)[0]
    root = source.path.split("://", 1)[1]
    root = root[: found_at.start()].rpartition("/")[0] if (found_at := _MAGIC.search(root)) else root.rstrip("/")
    for name, size in found:
        bare = name.lstrip("/")
        where = bare.removeprefix(root.lstrip("/")).lstrip("/") or bare.rsplit("/", 1)[-1]
        if any(part.startswith(".") for part in where.split("/")):
            continue
        if not _takes(source, bare.rsplit("/", 1)[-1], named=named):
            listing.num_others += 1
        elif not size:
            listing.unusable.append(Unusable(where, "empty_file", "the object is empty"))
        else:
            listing.files.append(FoundFile(f"{protocol}://{name}", where, size))
    return listing


def _objects(system: Any, url: str) -> list[tuple[str, int]]:
    """(name, bytes) of every object that a URL, a prefix or a pattern names."""
    if _MAGIC.search(url):
        found = system.glob(url, detail=True)
    elif system.isfile(url):
        found = {system._strip_protocol(url): system.info(url)}
    else:
        found = system.find(url, detail=True)
    return [(name, int(facts.get("size") or 0)) for name, facts in found.items() if facts.get("type") == "file"]
