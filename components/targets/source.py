"""Finds, checks and fingerprints the files of a target without reading a weight.

Three sources: `builtin` (in this package), a folder in Hugging Face format, a hub id. Weights are safetensors only. A
Target artifact is `target.json` alone: the folder, and the size and sha256 of every file; opening the target checks
that the files are unchanged. It never permits code that comes with a model to run: components/source_code.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from components.contract import UserError
from components.outside_json import JsonObject, read_object
from components.source_code import REMOTE_CODE, may_run_code
from components.targets.remembered import sha256_of
from components.text import message_of

BUILTIN: Final = "builtin"
_BUILTIN_FOLDER: Final = Path(__file__).parent / "builtin"
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json")
_SETTINGS: Final = (
    *("*config.json", "tokenizer*", "*.model", "vocab*", "merges*"),
    *("chat_template*", "special_tokens_map.json", "added_tokens.json"),
)
TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "vocab.json")


def model_name(model: str) -> str:
    """The name of a model without this machine's folders: of a folder the last part, anything else as it is."""
    is_folder = model.startswith(("/", "~", ".")) or (model not in ("", BUILTIN) and local_folder(model) is not None)
    return Path(model).name if is_folder else model


def load_target_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The content behind `model`, for the step's key: file name -> sha256.

    Planning never asks the network, so a hub id counts by its name alone; pin it as owner/name@revision.
    """
    model = str(settings.get("model", BUILTIN))
    trust = bool(settings.get("trust_remote_code", False))
    folder = local_folder(model)
    if folder is None:
        return {}
    return {file.relative_to(folder).as_posix(): sha256_of(file) for file in list_files(folder, model, trust)}


def make_stand_in_fingerprint(settings: JsonObject) -> dict[str, str]:
    """The content behind `model`, weights aside, for the step's key: file name -> sha256; a hub id counts by name."""
    folder = local_folder(str(settings["model"]))
    return {} if folder is None else {file.name: sha256_of(file) for file in settings_files(folder)}


def is_hub_id(model: str) -> bool:
    """Whether a model that is no folder here is one on a hub: owner/name or owner/name@revision."""
    name = model.partition("@")[0]
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def find_folder(model: str, trust_remote_code: bool = False, *, weights: bool = True) -> Path:
    """The folder that `model` names, downloaded first if it is a hub id; raises UserError in one line.

    weights: without them only configuration and tokenizer are downloaded.
    """
    folder = local_folder(model)
    if folder is not None:
        return folder
    name, _, revision = model.partition("@")
    if not is_hub_id(model):
        raise UserError(
            f"model: {model}: no such folder; give 'builtin', a folder with config.json, or a hub id like owner/name"
        )
    from huggingface_hub import snapshot_download

    patterns = _patterns(trust_remote_code, weights)
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except Exception as error:  # every network and hub failure becomes one line
        reason = message_of(error)
        raise UserError(f"model: {model}: not a local folder, and the hub did not give it ({reason})") from error


def _patterns(trust_remote_code: bool, weights: bool = True) -> list[str]:
    """The files of a target, as patterns of names."""
    return [*(_WEIGHTS if weights else []), *_SETTINGS, *(["*.py"] if trust_remote_code else [])]


def settings_files(folder: Path) -> list[Path]:
    """Configuration, tokenizer and chat template of a target, as far as they are there, sorted by name."""
    return sorted({file for pattern in _SETTINGS for file in folder.glob(pattern) if file.is_file()})


def list_files(folder: Path, location: str, trust_remote_code: bool = False) -> list[Path]:
    """The files of a target, sorted by name; raises UserError when one that is needed is missing."""
    patterns = _patterns(trust_remote_code)
    files = sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
    strange = next((file for file in sorted(folder.iterdir()) if not file.is_file() and not file.is_dir()), None)
    if strange is not None:
        what = "a broken link" if strange.is_symlink() else "a pipe, a socket or a device"
        raise UserError(f"{location}: {strange.name} is {what}; a model's folder holds files")
    if not (folder / "config.json").is_file():
        raise UserError(f"{location}: no config.json in {folder}: not a model in Hugging Face format")
    if not any(file.suffix == ".safetensors" for file in files):
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth"))
        content = (
            "only pickled weights, which are never loaded; convert them to safetensors" if pickled else "no weights"
        )
        raise UserError(f"{location}: no *.safetensors in {folder} ({content})")
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UserError(f"{location}: no tokenizer in {folder}: expected one of {', '.join(TOKENIZERS)}")
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = read_object(index).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(value, str) for value in named.values()):
            raise UserError(f"{index}: no weight_map of tensor names to files; download it again")
        expected = set(named.values())
        missing = sorted(expected - {file.name for file in files if file.suffix == ".safetensors"})
        if missing:
            first = f"first {missing[0]!r:.80}"
            raise UserError(
                f"{location}: {len(missing)} of {len(expected)} weight files are missing in {folder}, {first}"
            )
    return files


def open_record(path: Path) -> tuple[Path, JsonObject]:
    """The model folder of a Target artifact (or of a plain folder) and its record, checked against the files' sizes.

    config.json is compared by content as well: it is small, and a changed one breaks everything quietly.
    """
    file = path / "target.json"
    if not file.is_file():
        list_files(path, str(path))
        return path, {"model": str(path), "trust_remote_code": False, "dtype": None}
    record = read_object(file)
    if not {"model", "trust_remote_code", "folder", "files"} <= record.keys() or not isinstance(record["files"], dict):
        raise UserError(f"{file}: is not the record of a target; load the target again")
    model = str(record["model"])
    if record["trust_remote_code"]:
        if not may_run_code(model):
            raise UserError(
                f"{model}: brings Python code of its own, which nobody has allowed to run here: if you have read it, "
                f"write trust_remote_code: ['{model}'] into the pipeline, or set ${REMOTE_CODE} for a command"
            )
        folder = find_folder(model, True)  # the permission is for this name, not for any folder that the record names
    elif record["folder"]:
        folder = _BUILTIN_FOLDER if record["folder"] == BUILTIN else _in_home_of(path, Path(record["folder"]))
    else:  # a release on another machine: `model` must be a hub id
        folder = find_folder(model)
    for name, facts in record["files"].items():
        now = folder / name
        if not now.is_file():
            raise UserError(f"{now}: gone since the target was loaded; bring it back or run the pipeline again")
        small = facts["size"] <= 1 << 20
        if now.stat().st_size != facts["size"] or (small and sha256_of(now) != facts["sha256"]):
            raise UserError(f"{now}: changed since the target was loaded; run the pipeline again to use the new file")
    return folder, record


def _in_home_of(path: Path, folder: Path) -> Path:
    """The folder of a target that a step has made, in the home around `path`: homes are copied and moved."""
    if folder.parent.name != "store":
        return folder
    nearby = (above / "store" / folder.name for above in path.absolute().parents)
    return next((place for place in nearby if place.is_dir()), folder)


def local_folder(model: str) -> Path | None:
    """The folder that `model` names on this machine; None for a hub id. Never asks the network."""
    if model == BUILTIN:
        if not (_BUILTIN_FOLDER / "config.json").is_file():
            raise UserError(
                "model: builtin: its files are missing from this installation; run pipeline build-builtin-target"
            )
        return _BUILTIN_FOLDER
    try:
        folder = Path(model).expanduser()
        return folder.resolve() if folder.is_dir() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, an unknown ~user
        raise UserError(f"model: {model[:80]}...: not a usable path ({type(error).__name__})") from error
