"""artifact.json, the record of an artifact: read with its form and its digest checked, and written with the digest.

The files of an artifact are covered by the sha256 that its record gives each; the record itself, with its settings and
its info, is covered by `digest`. Between machines that share a store, $DRAFTSMITH_STORE_SECRET adds `seal`, an
HMAC-SHA256 of the digest (RFC 2104, Python's own hmac): who can write the store without knowing the secret cannot make
a record that other machines accept. Public keys would need a list of who may sign, which does not exist here.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any, Final, NotRequired, TypedDict, cast

from components.contract import KINDS, UserError
from components.files import digest_of_json
from components.outside_json import JsonObject, parse_json, read_object

RECORD_FILE: Final = "artifact.json"
SECRET_VARIABLE: Final = "DRAFTSMITH_STORE_SECRET"
_KEY = re.compile(r"\w[\w-]{0,127}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_UNSIGNED: Final = ("digest", "seal")


class FileFacts(TypedDict):
    """What a record says of one file: its size in bytes and the hex sha256 of its content."""

    size: int
    sha256: str


class ArtifactRecord(TypedDict):
    """The content of artifact.json. files: by path below the directory. finished_at: seconds since 1970.

    record: how the artifact came to be (pipeline, step, settings, inputs, machine, ...).
    """

    key: str
    kind: str
    session: NotRequired[str]
    info: JsonObject
    record: JsonObject
    files: dict[str, FileFacts]
    finished_at: float
    digest: NotRequired[str]
    seal: NotRequired[str]


class BadRecord(ValueError):
    """A record that cannot be used; the message follows the record's name in a sentence."""


def read_checked(directory: Path) -> ArtifactRecord:
    """The record in an artifact's directory. Raises BadRecord where there is none, or none that can be used."""
    try:
        content = read_object(directory / RECORD_FILE)
    except UserError as error:
        message = str(error).removeprefix(f"{directory / RECORD_FILE}: ")
        raise BadRecord(f"{RECORD_FILE} cannot be read ({message})") from error
    return check_record(content)


def parse_checked(text: str | bytes) -> ArtifactRecord:
    """The record that a text of JSON holds. Raises BadRecord where it cannot be used."""
    try:
        content = parse_json(text, RECORD_FILE)
    except UserError as error:
        raise BadRecord(f"its record cannot be read ({str(error).removeprefix(f'{RECORD_FILE}: ')})") from error
    return check_record(content)


def check_record(content: Any) -> ArtifactRecord:
    """The record, once its form and its digest are checked. Raises BadRecord otherwise.

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
    if unknown := set(content) - set(ArtifactRecord.__annotations__):
        raise BadRecord(f"its record has a field {min(unknown)[:40]!r}, which no record has")
    record = cast("ArtifactRecord", content)
    if "digest" in record and record["digest"] != digest_of(record):
        raise BadRecord("its record has changed since it was made")
    return record


def digest_of(content: ArtifactRecord) -> str:
    """The sha256 of a record without its digest and seal, as hex."""
    unsigned = {name: value for name, value in content.items() if name not in _UNSIGNED}
    parsed = json.loads(json.dumps(unsigned))  # keys become texts, as they are for whoever reads the file
    return digest_of_json(parsed)


def with_digest(content: ArtifactRecord) -> ArtifactRecord:
    """The record with its digest."""
    return {**content, "digest": digest_of(content)}


def with_seal(content: ArtifactRecord) -> ArtifactRecord:
    """The record as other machines get it: with the seal of the team's secret, where there is one."""
    return {**content, "seal": seal_of(str(content["key"]), digest_of(content))} if has_secret() else content.copy()


def has_valid_seal(content: ArtifactRecord) -> bool:
    """Whether a record from another machine has the seal of the team's secret; True where there is no secret."""
    return not has_secret() or is_seal(str(content.get("seal", "")), str(content["key"]), digest_of(content))


def has_secret() -> bool:
    """Whether $DRAFTSMITH_STORE_SECRET restricts the shared store to those that know it."""
    return bool(os.environ.get(SECRET_VARIABLE))


def seal_of(name: str, digest: str) -> str:
    """The HMAC-SHA256 of a named content under the team's secret, as hex. digest: the content's sha256."""
    secret = os.environ[SECRET_VARIABLE].encode()
    return hmac.new(secret, f"{name}\n{digest}".encode(), hashlib.sha256).hexdigest()


def is_seal(seal: str, name: str, digest: str) -> bool:
    """Whether a seal is that of this content under this name, in a time that does not depend on the seal."""
    return hmac.compare_digest(seal.encode(), seal_of(name, digest).encode())
