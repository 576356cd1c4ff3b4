"""A release as it may leave this machine: the same files without its folders, and a last look for what leaks.

draftsmith/target.json and draft.json are the only files that name folders, because they load from them here; in the
copy they name models as the rest of the release does, and release.json and SHA256SUMS are written anew. The copy of the
same release is the same, byte for byte. Weights are linked, not copied, where the disk allows.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from components.contract import UserError
from components.publish.checkpoint_files import read_json
from components.publish.checksums import FILE, files_of, write_sums
from components.publish.gguf_texts import gguf_texts
from components.publish.private_words import named_in
from components.publish.public_names import public_name, public_settings
from components.targets.file_digests import sha256_of
from components.targets.source import BUILTIN

TARGET, DRAFT, RECORD = "draftsmith/target.json", "draftsmith/draft.json", "release.json"
LOOKED_AT = 1 << 20
"""Bytes of a binary file that are looked at: headers and metadata stand at its beginning."""
BINARY = (".safetensors",)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab*", "merges*")
"""Copies of the target's, full of words and pieces of paths that name nothing."""
TELL_NOTHING = frozenset(
    {"base", "best", "builtin", "checkpoint", "checkpoints", "draft", "final", "hf", "hub", "last", "latest", "main"}
    | {"model", "models", "output", "outputs", "release", "snapshots", "target", "weights"}
)
"""Names of folders that give nothing away, and stand in every release anyway."""
_OF_SYSTEM = frozenset({"data", "home", "mnt", "opt", "root", "srv", "tmp", "users", "var", "workspace"})
_KEY = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"(?:checkpoint|epoch|global_step|iter|run|step|v)?[-_]?\d+|[0-9a-f]{40}", re.IGNORECASE)
"""checkpoint-1200 or a commit: folders that are told apart by what they lie in."""
_OF_HUB_CACHE = "models--"
_HOME = re.compile(r"(?<![\w.:/-])/(?:home|Users|root)/[^\s\"'`|]+")
_PATH = re.compile(r"(?<![\w./:<-])/(?:[\w.@+-]+/)+[\w.@+-]+")


def write_public_copy(release: Path, folder: Path) -> dict[str, Any]:
    """Write the copy into an empty folder; gives its release.json. Raises UserError for a release that is not whole."""
    record = read_json(release / RECORD, release.name)
    shutil.rmtree(folder, ignore_errors=True)
    for name in files_of(release):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in (TARGET, DRAFT, RECORD):
            _link(release / name, folder / name)
    named = str(record["target"]["model"])
    target = read_json(release / TARGET, release.name)
    here = BUILTIN if target["folder"] == BUILTIN else ""
    _write(folder / TARGET, {**target, "model": BUILTIN if here else named, "folder": here}, 1)
    if (release / DRAFT).is_file():
        draft = read_json(release / DRAFT, release.name)
        _write(folder / DRAFT, {**draft, "settings": public_settings(draft["settings"])}, 2)
    files = [name for name in files_of(folder) if name != RECORD]
    listed = [{"path": n, "bytes": (folder / n).stat().st_size, "sha256": sha256_of(folder / n)} for n in files]
    _write(folder / RECORD, {**record, "files": listed}, 1)
    write_sums(folder)
    return {**record, "files": listed}


def private_names(release: Path, record: Mapping[str, Any]) -> tuple[str, ...]:
    """What a private target is called on this machine: its hub id and the last part of it, or of its folder.

    A folder that tells nothing by itself (final, checkpoint-1200, a commit) is called by the first above it that does.
    Nothing for the built-in one, and for what `target_name` says by intention.
    """
    target = read_json(release / TARGET, release.name)
    model, folder = str(target["model"]), str(target["folder"])
    if folder == BUILTIN:
        return ()
    told = str(record["target"]["model"])
    # What nobody renamed was not said by intention: without a target_name it stands here as the target is called.
    by_intention = told if told != public_name(model) else ""
    is_hub_id = public_name(model) == model and not Path(model).is_absolute()
    own = _names_of_id(model.partition("@")[0]) if is_hub_id else _names_of_folder(Path(model))
    if folder and folder != model:
        own += _names_of_folder(Path(folder))
    return tuple(
        name
        for name in dict.fromkeys(own)
        if len(name) > 1 and name.lower() not in TELL_NOTHING and not named_in(by_intention, [name])
    )


def _names_of_id(name: str) -> list[str]:
    """owner/name and name."""
    return [name, name.rpartition("/")[2]]


def _names_of_folder(folder: Path) -> list[str]:
    """The nearest part of a path that tells something; a hub's cache is read as the id that it is of."""
    for part in reversed(folder.expanduser().absolute().parts[1:]):
        if part.startswith(_OF_HUB_CACHE):
            return _names_of_id(part.removeprefix(_OF_HUB_CACHE).replace("--", "/"))
        if part.lower() in _OF_SYSTEM or _KEY.fullmatch(part):  # a key: trained here, and lies in our store
            break
        if part.lower() not in TELL_NOTHING and not _NUMBERED.fullmatch(part):
            return [part]
    return []


def refuse_leaks(folder: Path, release: Path, names: Collection[str] = ()) -> None:
    """Raises UserError, one line, for the first file that names a folder of this machine, or one of the names.

    names: as words of their own, however they are spelt (private_words.py).
    """
    for name, what in leaks(folder, _places(release), names):
        raise UserError(
            f"{name}: names {what}, which must not leave this machine; export the release anew with a target_name that"
            " tells nothing, and without that path in any setting"
        )


def leaks(folder: Path, places: Collection[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(file, what it names) for every file that names a place or a name; file names count as well."""
    for name in [*files_of(folder), FILE]:
        file = folder / name
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in VOCABULARIES):
            continue
        text = f"{name}\n{_text_of(file)}"
        found = next((place for place in places if place in text), "") or _path_in(text)
        if found:
            yield name, f"the folder {found!r:.120}"
        elif named := named_in(text, names):
            yield name, f"the private target {named!r:.120}"


def _text_of(file: Path) -> str:
    """What a file says in words."""
    if file.suffix == ".gguf":
        return "\n".join(gguf_texts(file))
    with file.open("rb") as stream:
        raw = stream.read(LOOKED_AT if file.suffix in BINARY else -1)
    return raw.decode("utf-8", errors="replace")


def _path_in(text: str) -> str:
    """The first path in a text that somebody's home begins, or that is there on this machine."""
    home = _HOME.search(text)
    return home[0] if home else next((one[0] for one in _PATH.finditer(text) if Path(one[0]).exists()), "")


def _places(release: Path) -> list[str]:
    """Folders of this machine that a file might name: the target's, a draft model's, the store, home, and the like."""
    target = read_json(release / TARGET, release.name)
    told = [str(target["folder"]), str(target["model"])]
    if (release / DRAFT).is_file():
        told.append(str(read_json(release / DRAFT, release.name)["settings"].get("model") or ""))
    given = [Path(one).expanduser() for one in told if one.startswith(("/", "~", "."))]
    own = [release.absolute().parent, Path.home(), Path.cwd(), Path(tempfile.gettempdir())]
    every = {str(form) for place in [*given, *own] for form in (place.absolute(), place.resolve())}
    every |= {json.dumps(place)[1:-1] for place in every}
    return sorted(place if Path(place) in given else f"{place}/" for place in every if len(Path(place).parts) > 1)


def _link(file: Path, copy: Path) -> None:
    try:
        os.link(file, copy)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, copy)


def _write(file: Path, content: Mapping[str, Any], indent: int) -> None:
    file.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
