"""Inputs from outside a pipeline: an artifact of this store by its key, or a directory that holds one.

    store:KEY     an artifact in the store, by its key or the start of it
    path:DIR      a directory with an `artifact.json`, for example one copied from another machine

`registry:` and `query:` belong to the vocabulary and are refused until they work.
"""

from __future__ import annotations

import json
from pathlib import Path

from components.contract import KINDS, Artifact, UserError
from flows.problems import did_you_mean
from storage.artifacts import RECORD_FILE, Store, sha256_of

SCHEMES = ("store", "path")
NOT_YET = ("registry", "query")


def is_outside(reference: str) -> bool:
    """Whether a reference names something outside the pipeline (it has a colon; step names have none)."""
    return ":" in reference


def reference_error(reference: str) -> str:
    """What is wrong with the form of an outside reference, or ''."""
    scheme, _, rest = reference.partition(":")
    if scheme in NOT_YET:
        return f"'{scheme}:' inputs are not available yet: use store:KEY or path:DIR"
    if scheme not in SCHEMES:
        return f"'{reference}' is neither a step nor an outside input{did_you_mean(scheme, SCHEMES)}"
    return "" if rest.strip() else f"'{reference}' names nothing after the colon"


def find_source(reference: str, store: Store) -> Artifact:
    """The artifact that an outside reference names, verified.

    Raises:
        UserError: it is missing, broken, or the reference is malformed.
    """
    if why := reference_error(reference):
        raise UserError(why)
    scheme, _, rest = reference.partition(":")
    if scheme == "path":
        return _from_directory(Path(rest.strip()))
    found = store.look(store.resolve(rest.strip()))
    if found.artifact is None:
        raise UserError(f"'{reference}' is broken: {found.why}")
    return found.artifact


def _from_directory(path: Path) -> Artifact:
    try:
        content = json.loads((path / RECORD_FILE).read_text(encoding="utf-8"))
        kind, key, files = KINDS[content["kind"]], str(content["key"]), dict(content["files"])
    except FileNotFoundError as error:
        raise UserError(f"'path:{path}' has no {RECORD_FILE}: it is not the directory of an artifact") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"'path:{path}': {RECORD_FILE} cannot be read ({type(error).__name__})") from error
    for name, facts in files.items():
        file = path / name
        if not file.is_file() or sha256_of(file) != facts["sha256"]:
            raise UserError(f"'path:{path}' is broken: {name} is missing or has changed")
    return kind(key=key, path=path.absolute(), info=content.get("info", {}))
