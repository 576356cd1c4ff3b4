"""artifact.json, the record of an artifact: read with its form and its digest checked, and written with the digest.

The files of an artifact are covered by the sha256 that its record gives each; the record itself, with its settings and
its info, is covered by `digest`. Between machines that share a store, $DRAFTSMITH_STORE_SECRET adds `seal`, an
HMAC-SHA256 of the digest (RFC 2104, Python's own hmac): whoever can write the store but does not know the secret cannot
make a record that the others take. Keys of a public kind would need a list of who may sign, which nobody here keeps.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from components.contract import KINDS, UserError
from components.outside_json import parse_json, read_object
from storage.whole_files import digest_of_json

RECORD_FILE: Final = "artifact.json"
SECRET_VARIABLE: Final = "DRAFTSMITH_STORE_SECRET"
_KEY = re.compile(r"\w[\w-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNSIGNED: Final = ("digest", "seal")
_FIELDS: Final = frozenset({"key", "kind", "session", "info", "record", "files", "finished_at", *_UNSIGNED})


class BadRecord(ValueError):
    """A record that cannot be used; str() says why, in words that follow the record's name."""


def read_checked(directory: Path) -> dict[str, Any]:
    """The record in an artifact's directory. Raises BadRecord where there is none, or none that can be used."""
    try:
        content = read_object(directory / RECORD_FILE)
    except UserError as error:
        said = str(error).removeprefix(f"{directory / RECORD_FILE}: ")
        raise BadRecord(f"{RECORD_FILE} cannot be read ({said})") from error
    return checked(content)


def parse_checked(text: str | bytes) -> dict[str, Any]:
    """The record that a text of JSON holds. Raises BadRecord where it cannot be used."""
    try:
        content = parse_json(text, RECORD_FILE)
    except UserError as error:
        raise BadRecord(f"its record cannot be read ({str(error).removeprefix(f'{RECORD_FILE}: ')})") from error
    return checked(content)


def checked(content: Any) -> dict[str, Any]:
    """The record, if it has the form of one and the digest that it says. Raises BadRecord otherwise.

    A record from before records had digests has none, and its form alone is checked.
    """
    if not isinstance(content, dict):
        raise BadRecord("its record is no object")
    if not isinstance(content.get("key"), str) or not _KEY.fullmatch(content["key"]):
        raise BadRecord("its record has no usable key")
    for field, kinds in (("kind", str), ("info", dict), ("record", dict), ("files", dict)):
        if not isinstance(content.get(field), kinds):
            raise BadRecord(f"its record has no usable {field}")
    if content["kind"] not in KINDS or not isinstance(content.get("finished_at"), float | int):
        raise BadRecord("its record is not one of an artifact")
    for name, facts in content["files"].items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise BadRecord(f"it has a file named {name[:80]!r}")
        if not isinstance(facts, dict) or not isinstance(facts.get("size"), int):
            raise BadRecord(f"{name} has no size")
        if not isinstance(facts.get("sha256"), str) or not _SHA256.fullmatch(facts["sha256"]):
            raise BadRecord(f"{name} has no sha256")
    if unknown := set(content) - _FIELDS:
        raise BadRecord(f"its record has a field {min(unknown)[:40]!r}, which no record has")
    if "digest" in content and content["digest"] != digest_of(content):
        raise BadRecord("its record has changed since it was made")
    return content


def digest_of(content: Mapping[str, Any]) -> str:
    """The sha256 of a record without its digest and seal, as hex."""
    bare = {name: value for name, value in content.items() if name not in _UNSIGNED}
    as_read = json.loads(json.dumps(bare))  # keys become texts, as they are for whoever reads the file
    return digest_of_json(as_read)


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record with its digest."""
    return {**content, "digest": digest_of(content)}


def with_seal(content: Mapping[str, Any]) -> dict[str, Any]:
    """The record as it goes to other machines: with the seal of the team's secret, where there is one."""
    return {**content, "seal": seal_of(str(content["key"]), digest_of(content))} if has_secret() else dict(content)


def is_ours(content: Mapping[str, Any]) -> bool:
    """Whether a record from another machine has the seal of the team's secret; True where there is no secret."""
    return not has_secret() or is_seal(str(content.get("seal", "")), str(content["key"]), digest_of(content))


def has_secret() -> bool:
    """Whether this machine shares its store with those alone that know a secret."""
    return bool(os.environ.get(SECRET_VARIABLE))


def seal_of(name: str, digest: str) -> str:
    """The HMAC-SHA256 of a named content under the team's secret, as hex. digest: the content's sha256."""
    secret = os.environ[SECRET_VARIABLE].encode()
    return hmac.new(secret, f"{name}\n{digest}".encode(), hashlib.sha256).hexdigest()


def is_seal(seal: str, name: str, digest: str) -> bool:
    """Whether a seal is that of this content under this name; it takes as long for any wrong one."""
    return hmac.compare_digest(seal.encode(), seal_of(name, digest).encode())
