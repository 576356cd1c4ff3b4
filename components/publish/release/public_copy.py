"""The public copy of a release: what may leave this machine, and the searches for what may not.

In the copy, draftsmith/target.json and draft.json, which alone name folders of this machine, name models as the rest of
the release does; release.json and SHA256SUMS are written anew. Copies of the same release are equal byte for byte.
Weights are hard-linked, not copied, where the disk allows.

Folders of a release that hold weights of the target are as private as the target. `stitched` has the whole target,
`mimo` its embedding and LM head, `speculators` its embedding (P-EAGLE's except for one row), and Medusa with
`head: tied` the LM head once a head. A draft model of the target's width starts from its embedding, and rows of tokens
that training never saw stay the target's except for weight decay. Not counted are weights that start as the target's
and are trained in every row: the last norms, and the LM heads of EAGLE-3, P-EAGLE and Medusa with heads of their own.
EAGLE-1, EAGLE-3 and MTP hold no weights that they share.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from components.contract import UserError
from components.engines.profiles import Settings
from components.publish.formats.checkpoint import link_or_copy, read_json
from components.publish.formats.gguf import gguf_texts
from components.publish.names import find_name, public_name, public_settings
from components.publish.release.checksums import FILE, file_records, files_of, write_sums
from components.release_record import RELEASE, FormatRecord, ReleaseRecord, write_json
from components.targets.source import BUILTIN

TARGET, DRAFT = "draftsmith/target.json", "draftsmith/draft.json"
SCANNED_BYTES = 1 << 20
"""Bytes of a binary file that are searched: headers and metadata are at its beginning."""
BINARY = (".safetensors",)
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab*", "merges*")
"""The target's tokenizer files, which are not searched: they are full of words and pieces of paths."""
PLAIN_FOLDERS = frozenset(
    {"base", "best", "builtin", "checkpoint", "checkpoints", "draft", "final", "hf", "hub", "last", "latest", "main"}
    | {"model", "models", "output", "outputs", "release", "snapshots", "target", "weights"}
)
"""Common names of folders, which reveal nothing and occur in every release."""
_OF_SYSTEM = frozenset({"data", "home", "mnt", "opt", "root", "srv", "tmp", "users", "var", "workspace"})
_KEY = re.compile(r"[0-9a-f]{64}")
_NUMBERED = re.compile(r"(?:checkpoint|epoch|global_step|iter|run|step|v)?[-_]?\d+|[0-9a-f]{40}", re.IGNORECASE)
"""checkpoint-1200 or a commit: folders that are identified by their parent."""
_OF_HUB_CACHE = "models--"
ALWAYS = ("stitched", "mimo", "speculators", "dflash")
"""Formats that hold weights of the target for every drafter."""
BY_SETTINGS = {"medusa": "train with head: own", "draft-model": "train with a hidden_size of its own"}
"""Methods for which it depends on the settings whether a format holds weights of the target -> the remedy."""
_HOME = re.compile(r"(?<![\w.:/-])/(?:home|Users|root)/[^\s\"'`|]+")
_PATH = re.compile(r"(?<![\w./:<-])/(?:[\w.@+-]+/)+[\w.@+-]+")


def write_public_copy(release: Path, folder: Path) -> ReleaseRecord:
    """Write the copy into an emptied folder; returns its release.json. Raises UserError for a broken release."""
    record: ReleaseRecord = read_json(release / RELEASE, release.name)  # type: ignore[assignment]  # validated before
    shutil.rmtree(folder, ignore_errors=True)
    for name in files_of(release):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name not in (TARGET, DRAFT, RELEASE):
            link_or_copy(release / name, folder / name)
    target = read_json(release / TARGET, release.name)
    is_builtin = target["folder"] == BUILTIN
    public = {"model": BUILTIN, "folder": BUILTIN} if is_builtin else {"model": record["target"]["model"], "folder": ""}
    write_json(folder / TARGET, {**target, **public})
    if (release / DRAFT).is_file():
        draft = read_json(release / DRAFT, release.name)
        write_json(folder / DRAFT, {**draft, "settings": public_settings(draft["settings"])}, indent=2)
    record["files"] = file_records(folder, [name for name in files_of(folder) if name != RELEASE])
    write_json(folder / RELEASE, record)
    write_sums(folder)
    return record


def private_names(release: Path, record: ReleaseRecord) -> tuple[str, ...]:
    """The names of a private target on this machine: its hub id and the last part of it, or the name of its folder.

    For a folder with a common name (final, checkpoint-1200, a commit) it is the first folder above with another one.
    The built-in target has none, and a name that the user has put into `target_name` is not private.
    """
    target = read_json(release / TARGET, release.name)
    model, folder = str(target["model"]), str(target["folder"])
    if folder == BUILTIN:
        return ()
    public_target = str(record["target"]["model"])
    # Without a target_name the release has the target's own public name, which was not chosen to be published.
    by_intention = public_target if public_target != public_name(model) else ""
    is_hub_id = public_name(model) == model and not Path(model).is_absolute()
    names = _hub_id_names(model.partition("@")[0]) if is_hub_id else _folder_names(Path(model))
    if folder and folder != model:
        names += _folder_names(Path(folder))
    return tuple(
        name
        for name in dict.fromkeys(names)
        if len(name) > 1 and name.lower() not in PLAIN_FOLDERS and not find_name(by_intention, [name])
    )


def _hub_id_names(name: str) -> list[str]:
    return [name, name.rpartition("/")[2]]


def _folder_names(folder: Path) -> list[str]:
    """The last part of a path that is not a common name; for a folder of a hub's cache, the names of its hub id."""
    for part in reversed(folder.expanduser().absolute().parts[1:]):
        if part.startswith(_OF_HUB_CACHE):
            return _hub_id_names(part.removeprefix(_OF_HUB_CACHE).replace("--", "/"))
        if part.lower() in _OF_SYSTEM or _KEY.fullmatch(part):  # a key: an artifact of our store
            break
        if part.lower() not in PLAIN_FOLDERS and not _NUMBERED.fullmatch(part):
            return [part]
    return []


def refuse_leaks(folder: Path, release: Path, names: Collection[str] = ()) -> None:
    """Raises UserError, one line, for the first file that names a folder of this machine, or one of the names.

    names: searched as whole words, in any spelling (names.py).
    """
    for name, what in find_leaks(folder, _local_folders(release), names):
        raise UserError(
            f"{name}: names {what}, which must not leave this machine; export the release anew with a target_name that"
            " tells nothing, and without that path in any setting"
        )


def find_leaks(folder: Path, places: Collection[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(file, what it names) for every file that contains a place or a name, in its text or its file name."""
    for name in [*files_of(folder), FILE]:
        file = folder / name
        if any(fnmatch.fnmatch(file.name, pattern) for pattern in VOCABULARIES):
            continue
        text = f"{name}\n{_read_text(file)}"
        path = next((place for place in places if place in text), "") or _first_local_path(text)
        if path:
            yield name, f"the folder {path!r:.120}"
        elif named := find_name(text, names):
            yield name, f"the private target {named!r:.120}"


def _read_text(file: Path) -> str:
    """The text of a file; of a binary file its metadata."""
    if file.suffix == ".gguf":
        return "\n".join(gguf_texts(file))
    with file.open("rb") as stream:
        raw = stream.read(SCANNED_BYTES if file.suffix in BINARY else -1)
    return raw.decode("utf-8", errors="replace")


def _first_local_path(text: str) -> str:
    """The first path in a text that is in a home directory or exists on this machine; "" for none."""
    home = _HOME.search(text)
    return home[0] if home else next((one[0] for one in _PATH.finditer(text) if Path(one[0]).exists()), "")


def _local_folders(release: Path) -> list[str]:
    """Folders of this machine that a file might name: the target's, a draft model's, the store, home, temporary."""
    target = read_json(release / TARGET, release.name)
    models = [str(target["folder"]), str(target["model"])]
    if (release / DRAFT).is_file():
        models.append(str(read_json(release / DRAFT, release.name)["settings"].get("model") or ""))
    models_here = [Path(one).expanduser() for one in models if one.startswith(("/", "~", "."))]
    machine_folders = [release.absolute().parent, Path.home(), Path.cwd(), Path(tempfile.gettempdir())]
    folders = {str(form) for place in [*models_here, *machine_folders] for form in (place.absolute(), place.resolve())}
    folders |= {json.dumps(place)[1:-1] for place in folders}
    return sorted(
        place if Path(place) in models_here else f"{place}/" for place in folders if len(Path(place).parts) > 1
    )


def holds_target(format: str, method: str, settings: Settings, target_width: int) -> bool:
    """Whether a drafter written in a format holds weights of its target. settings: the method's own."""
    if format in ALWAYS:
        return True
    if method == "draft-model":
        return int(settings.get("hidden_size") or target_width) == target_width
    return method == "medusa" and settings.get("head") == "tied"


def formats_with_target_weights(formats: Mapping[str, FormatRecord]) -> dict[str, str]:
    """Folder -> remedy, for every folder with weights of the target. formats: release.json's.

    In a release without the fact, methods whose settings decide count as holding them.
    """
    remedies: dict[str, str] = {}
    for name, facts in sorted(formats.items()):
        if facts["format"] in ALWAYS:
            remedies[name] = "export other formats"
        elif facts.get("holds_target", facts["method"] in BY_SETTINGS):
            remedies[name] = BY_SETTINGS.get(facts["method"], "export other formats")
    return remedies
