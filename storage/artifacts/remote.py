"""The shared store: artifacts of several machines under one URL that fsspec opens, behind each home's own store.

`DRAFTSMITH_STORE=s3://bucket/prefix` (or `file:///mnt/team`, or any other URL of fsspec) turns it on. Credentials come
from the environment, as the URL's own library reads them, and are refused inside the URL, since the URL is shown.

    URL/objects/ab/ab12...     contents of files, named by their sha256
    URL/artifacts/KEY.json     artifact.json of a finished artifact, written after its objects: complete or absent
    URL/earlier/KEY.SESSION.json   the same of what the key was before it was made again
    URL/runs/RUN_ID.jsonl      journals of ended runs
    URL/promotions/ID.json     the promotion log, one move of an alias each
    URL/runs/RUN_ID.jsonl.seal and the like, where the machines share $DRAFTSMITH_STORE_SECRET: what has no seal of it
                               is left out, so that write access to the store is not enough

A file's name is its content, so two machines that finish the same key at once cannot mix their files: the newer
session stands in artifacts/, and the other one, which may be somebody's measurement, in earlier/. Nothing that comes
from here is believed before its sha256 is right. A store that does not answer never stops a run: the fault becomes one
line in `problems`, and the store is not tried again for a minute.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from components.contract import UserError
from components.files import sha256_of
from components.outside_json import JsonObject
from components.text import message_of
from storage.artifacts.records import (
    SECRET_VARIABLE,
    ArtifactRecord,
    BadRecord,
    FileFacts,
    has_secret,
    has_valid_seal,
    is_seal,
    parse_checked,
    seal_of,
    with_seal,
)
from storage.artifacts.sessions import directory_name

VARIABLE = "DRAFTSMITH_STORE"
SECONDS_LEFT_ALONE = 60.0  # after a fault; a long run tries again later
NUM_TRANSFERS = 8  # files in flight at once
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]*")
_SEAL = ".seal"
_RENAMING = ("file", "local")  # elsewhere an upload is one request, which happens whole or not at all
# Seconds to wait for S3 to answer; the listing cache would hide what other machines write.
_OPTIONS: dict[str, JsonObject] = {
    "s3": {
        "use_listings_cache": False,
        "config_kwargs": {"connect_timeout": 5, "read_timeout": 30, "retries": {"max_attempts": 2}},
    },
    "file": {"auto_mkdir": True},
}
Answer = TypeVar("Answer")


def shared_store() -> RemoteStore | None:
    """The store that $DRAFTSMITH_STORE names, the same object all through this process; None when it names none.

    Raises:
        UserError: the URL cannot be one of a store.
    """
    url = os.environ.get(VARIABLE, "").strip()
    return _store_at(url) if url else None


def drain_problems() -> list[str]:
    """Return and forget the problems with the shared store since the last call, one line each."""
    url = os.environ.get(VARIABLE, "").strip()
    if not url or _store_at.cache_info().currsize == 0:
        return []
    store = _store_at(url)
    problems, store.problems = store.problems, []
    return problems


@functools.cache
def _store_at(url: str) -> RemoteStore:
    return RemoteStore(url)


class RemoteStore:
    """One shared store. Every method may be called when it is down: it then does nothing and returns None or False.

    problems: one line each, until `drain_problems` takes them.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise UserError(f"{VARIABLE}: no credentials in the URL: it is shown in logs; give them in the environment")
        if not parts.scheme:
            raise UserError(f"{VARIABLE} is '{url}', not a URL such as s3://bucket/prefix or file:///mnt/team")
        self.url = url.rstrip("/")
        self.problems: list[str] = []
        self._protocol = {"s3a": "s3", "local": "file"}.get(parts.scheme, parts.scheme)
        self._silent_until = 0.0
        self._reported: set[str] = set()

    @functools.cached_property
    def files(self) -> Any:
        """The fsspec file system of the URL."""
        import fsspec

        try:
            return fsspec.filesystem(self._protocol, **_OPTIONS.get(self._protocol, {}))
        except (ImportError, ValueError) as error:
            how = "pip install 'draftsmith[s3]'" if self._protocol == "s3" else str(error).rstrip(".")
            raise UserError(f"{VARIABLE}: nothing here opens {self._protocol}:// ({how})") from error

    def keys(self) -> dict[str, str] | None:
        """Key -> mark of every artifact; the mark changes when the artifact is made anew. None: it does not answer."""

        def list_artifacts() -> dict[str, str]:
            return {
                name.removesuffix(".json"): _change_mark(facts) for name, facts in self._listing("artifacts").items()
            }

        return self.attempt(list_artifacts)

    def record(self, key: str) -> ArtifactRecord | None:
        """artifact.json of an artifact, its form checked; None when there is none, or none that can be used."""
        return self.attempt(lambda: self._read_record(key))

    def upload(self, directory: Path, content: ArtifactRecord) -> bool:
        """Upload a finished artifact: first the objects that are missing there, then its record. True when it is there.

        directory: the artifact's; of an earlier session it may have lost files. content: its artifact.json.
        """

        def send() -> bool:
            present = [item for item in content["files"].items() if (directory / item[0]).is_file()]
            with ThreadPoolExecutor(NUM_TRANSFERS) as pool:  # list() passes on what a thread raised
                list(pool.map(lambda item: self._put_object(directory / item[0], item[1]), present))
            key = content["key"]
            shared = self._read_any_record(key)
            is_newest = (
                shared is None
                or not has_valid_seal(shared)
                or float(shared["finished_at"]) <= float(content["finished_at"])
            )
            older = shared if is_newest else content
            if shared is not None and older is not None and directory_name(shared) != directory_name(content):
                written = older if older is shared else with_seal(older)
                self._write(f"earlier/{key}.{directory_name(older)}.json", json.dumps(written, indent=1))
            if is_newest:
                self._write(f"artifacts/{key}.json", json.dumps(with_seal(content), indent=1))
            return True

        return bool(self.attempt(send))

    def download(self, key: str, into: Path, only: Callable[[str], bool] = lambda name: True) -> ArtifactRecord | None:
        """Download the files of an artifact and verify each; returns its artifact.json.

        key: or KEY.SESSION, for one in earlier/. into: an absent directory; it may hold files even when the answer is
        None. only: which files, by name.
        A broken artifact is deleted from the shared store, so that its next maker uploads it whole.
        """

        def fetch() -> ArtifactRecord | None:
            content = self._read_record(key)
            if content is None:
                return None
            items = [item for item in content["files"].items() if only(item[0])]
            into.mkdir(parents=True)
            with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
                faults = list(pool.map(lambda item: self._get_object(item[1], into / item[0], item[0]), items))
            if broken := next((fault for fault in faults if fault), ""):
                self._drop_broken(key, broken)
                return None
            return content

        return self.attempt(fetch)

    def names(self, folder: str) -> set[str] | None:
        """The names in runs/, promotions/ or earlier/. None: the store does not answer.

        Where machines share a secret, texts without a seal are left out, and how many they are is a problem.
        """
        names = self.attempt(lambda: set(self._listing(folder)))
        if names is None or folder == "earlier":  # a record holds its seal
            return names
        texts = {name for name in names if not name.endswith(_SEAL)}
        unsealed = {name for name in texts if f"{name}{_SEAL}" not in names} if has_secret() else set()
        if unsealed:
            self._report_once(f"{len(unsealed)} of {len(texts)} {folder} in {self.url} have no seal; they are left out")
        return texts - unsealed

    def read_text(self, name: str) -> str | None:
        """The text of a small file, by its path under the URL; None where it lacks the seal that it must have."""
        data = self.attempt(lambda: bytes(self.files.cat_file(f"{self.url}/{name}")))
        if data is None:
            return None
        if has_secret():
            seal = self.attempt(lambda: bytes(self.files.cat_file(f"{self.url}/{name}{_SEAL}")))
            if seal is None or not is_seal(seal.decode("ascii", "replace"), name, hashlib.sha256(data).hexdigest()):
                self._report_once(f"{name} in {self.url} is not sealed with ${SECRET_VARIABLE}; it is left out")
                return None
        return data.decode("utf-8", "replace")

    def write_text(self, name: str, text: str) -> bool:
        """Write a small file whole, after its seal; True when it is there."""

        def write() -> bool:
            if has_secret():
                self._write(f"{name}{_SEAL}", seal_of(name, hashlib.sha256(text.encode("utf-8")).hexdigest()))
            self._write(name, text)
            return True

        return bool(self.attempt(write))

    def attempt(self, action: Callable[[], Answer]) -> Answer | None:
        """The result of `action`, or None with one line in `problems` that the store does not answer."""
        if self.is_silent:
            return None
        try:
            answer = action()
            self._silent_until = 0.0
            return answer
        except UserError:
            raise
        except Exception as error:  # every library behind fsspec has classes of its own
            if not self._silent_until:
                message = message_of(error, 160)
                self.problems.append(
                    f"the shared store {self.url} does not answer ({type(error).__name__}: {message}); going on with "
                    "the store of this machine, `draftsmith resync` uploads later"
                )
            self._silent_until = time.monotonic() + SECONDS_LEFT_ALONE
            return None

    @property
    def is_silent(self) -> bool:
        """Whether it failed to answer within the last minute."""
        return time.monotonic() < self._silent_until

    def try_again(self) -> None:
        """Forget that it did not answer, since a person asks for a new attempt."""
        self._silent_until = 0.0

    def _read_record(self, name: str) -> ArtifactRecord | None:
        """The record of KEY or KEY.SESSION, its form, digest and seal checked."""
        content = self._read_any_record(name)
        if content is None or has_valid_seal(content):
            return content
        self._report_once(
            f"{name[:12]} in the shared store {self.url} is not sealed with ${SECRET_VARIABLE}: it is not used"
        )
        return None

    def _read_any_record(self, name: str) -> ArtifactRecord | None:
        """The record, its form and digest checked, whoever has written it."""
        try:
            text = self.files.cat_file(f"{self.url}/{_record_name(name)}", start=0)  # from 0: one request, not three
        except FileNotFoundError:
            return None
        try:
            content = parse_checked(text)
            if content["key"] != name.partition(".")[0]:
                raise BadRecord("its record is that of something else")
        except BadRecord as error:
            self._drop_broken(name, str(error))
            return None
        return content

    def _report_once(self, problem: str) -> None:
        if problem not in self._reported:
            self._reported.add(problem)
            self.problems.append(problem)

    def _drop_broken(self, name: str, fault: str) -> None:
        self.problems.append(
            f"the shared store {self.url} has a broken artifact {name[:12]}: {fault}; it is made again"
        )
        self._remove(_record_name(name))

    def _get_object(self, facts: FileFacts, to: Path, name: str) -> str:
        """Download one file; returns what is wrong with it, or ''."""
        place = _object_name(facts)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.files.get_file(f"{self.url}/{place}", str(to))
        except FileNotFoundError:
            return f"{name} is missing"
        if sha256_of(to) == facts["sha256"]:
            return ""
        self._remove(place)  # a content under another content's name is of no use to anybody
        return f"{name} has changed since it was made"

    def _put_object(self, file: Path, facts: FileFacts) -> None:
        place = f"{self.url}/{_object_name(facts)}"
        try:
            if self.files.size(place) == facts["size"]:
                return
        except FileNotFoundError:
            pass
        self._put_whole(place, lambda to: self.files.put_file(str(file), to))

    def _write(self, name: str, text: str) -> None:
        self._put_whole(f"{self.url}/{name}", lambda to: self.files.pipe_file(to, text.encode("utf-8")))

    def _put_whole(self, place: str, put: Callable[[str], object]) -> None:
        if self._protocol not in _RENAMING:
            put(place)
            return
        folder, _, name = place.rpartition("/")
        self.files.makedirs(folder, exist_ok=True)
        partial = f"{folder}/.{name}.{uuid.uuid4().hex}"
        put(partial)
        self.files.mv(partial, place)

    def _remove(self, name: str) -> None:
        try:
            self.files.rm_file(f"{self.url}/{name}")
        except FileNotFoundError:
            return  # somebody else has removed it already

    def _listing(self, folder: str) -> dict[str, JsonObject]:
        try:
            entries: Iterable[JsonObject] = self.files.ls(f"{self.url}/{folder}", detail=True, refresh=True)
        except FileNotFoundError:
            return {}  # nobody has written there yet
        by_name = ((str(facts["name"]).rpartition("/")[2], facts) for facts in entries)
        return {name: facts for name, facts in by_name if _NAME.fullmatch(name)}


def _record_name(name: str) -> str:
    """The name under the URL of the artifact.json of KEY or of KEY.SESSION."""
    return f"{'earlier' if '.' in name else 'artifacts'}/{name}.json"


def _object_name(facts: FileFacts) -> str:
    return f"objects/{facts['sha256'][:2]}/{facts['sha256']}"


def _change_mark(facts: JsonObject) -> str:
    """A value in a listing that changes when the file is written again."""
    return str(facts.get("ETag") or facts.get("mtime") or facts.get("created") or facts.get("size"))
