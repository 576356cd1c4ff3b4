"""The shared store: what several machines have made, under one URL that fsspec opens, behind each home's own store.

`DRAFTSMITH_STORE=s3://bucket/prefix` (or `file:///mnt/team`, or any other URL of fsspec) turns it on. Credentials come
from the environment, as the URL's own library reads them, and are refused inside the URL, since the URL is shown.

    URL/objects/ab/ab12...     contents of files, named by their sha256
    URL/artifacts/KEY.json     artifact.json of a finished artifact, written after its objects: complete or absent
    URL/earlier/KEY.SESSION.json   the same of what the key was before it was made again
    URL/runs/RUN_ID.jsonl      journals of ended runs
    URL/promotions/ID.json     the promotion log, one move of an alias each
    URL/runs/RUN_ID.jsonl.seal and the like, where the machines share $DRAFTSMITH_STORE_SECRET: what has no seal of it
                               is left out, so that to write the store is not enough to tell others anything

A file's name is its content, so two machines that finish the same key at once cannot mix their files: the newer
session stands in artifacts/, and the other one, which may be somebody's measurement, in earlier/. Nothing that comes
from here is believed before its sha256 is right. A store that does not answer never stops a run: the fault becomes one
line in `problems`, and nobody waits for it again for a minute.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from components.contract import UserError
from storage.artifact_records import (
    SECRET_VARIABLE,
    BadRecord,
    has_secret,
    is_ours,
    is_seal,
    parse_checked,
    seal_of,
    with_seal,
)
from storage.sessions import place_name
from storage.whole_files import sha256_of

VARIABLE = "DRAFTSMITH_STORE"
SECONDS_LEFT_ALONE = 60.0  # after a fault; a long run tries again later
NUM_TRANSFERS = 8  # files in flight at once
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]*")
_SEAL = ".seal"
_RENAMING = ("file", "local")  # elsewhere an upload is one request, which happens whole or not at all
# Seconds to wait for S3 to answer; the listing cache would hide what other machines write.
_OPTIONS: dict[str, dict[str, Any]] = {
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
    return _opened(url) if url else None


def take_problems() -> list[str]:
    """What has gone wrong with the shared store since the last call, one line each."""
    url = os.environ.get(VARIABLE, "").strip()
    if not url or _opened.cache_info().currsize == 0:
        return []
    store = _opened(url)
    said, store.problems = store.problems, []
    return said


@functools.cache
def _opened(url: str) -> RemoteStore:
    return RemoteStore(url)


class RemoteStore:
    """One shared store. Every method may be called when it is down: it then does nothing and returns what says so.

    problems: one line for each thing that is worth telling, until somebody takes them.
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
        self._told: set[str] = set()

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

        def look() -> dict[str, str]:
            return {name.removesuffix(".json"): _mark(facts) for name, facts in self._listing("artifacts").items()}

        return self.attempt(look)

    def record(self, key: str) -> dict[str, Any] | None:
        """artifact.json of an artifact, its form checked; None when there is none, or none that can be used."""
        return self.attempt(lambda: self._record(key))

    def upload(self, directory: Path, content: Mapping[str, Any]) -> bool:
        """Put a finished artifact there: the objects that it lacks first, then what names them. True when it is there.

        directory: the artifact's; of an earlier session it may have lost files. content: its artifact.json.
        """

        def send() -> bool:
            here = [item for item in content["files"].items() if (directory / item[0]).is_file()]
            with ThreadPoolExecutor(NUM_TRANSFERS) as pool:  # list() passes on what a thread raised
                list(pool.map(lambda item: self._put_object(directory / item[0], item[1]), here))
            key = content["key"]
            there = self._any_record(key)
            is_newest = (
                there is None or not is_ours(there) or float(there["finished_at"]) <= float(content["finished_at"])
            )
            older = there if is_newest else content
            if there is not None and older is not None and place_name(there) != place_name(content):
                kept = older if older is there else with_seal(older)
                self._write(f"earlier/{key}.{place_name(older)}.json", json.dumps(kept, indent=1))
            if is_newest:
                self._write(f"artifacts/{key}.json", json.dumps(with_seal(content), indent=1))
            return True

        return bool(self.attempt(send))

    def download(self, key: str, into: Path, only: Callable[[str], bool] = lambda name: True) -> dict[str, Any] | None:
        """Fetch the files of an artifact and verify each; returns its artifact.json.

        key: or KEY.SESSION, for one in earlier/. into: an absent directory; it may hold files even when the answer is
        None. only: which files, by name.
        A broken artifact is taken out of the shared store, so that whoever makes it next puts it back whole.
        """

        def fetch() -> dict[str, Any] | None:
            content = self._record(key)
            if content is None:
                return None
            wanted = [item for item in content["files"].items() if only(item[0])]
            into.mkdir(parents=True)
            with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
                said = list(pool.map(lambda item: self._get_object(item[1], into / item[0], item[0]), wanted))
            if broken := next((why for why in said if why), ""):
                self._refuse(key, broken)
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
            self._tell_once(f"{len(unsealed)} of {len(texts)} {folder} in {self.url} have no seal; they are left out")
        return texts - unsealed

    def read_text(self, name: str) -> str | None:
        """A small file, by its path under the URL; None where it has not the seal that it must have."""
        data = self.attempt(lambda: bytes(self.files.cat_file(f"{self.url}/{name}")))
        if data is None:
            return None
        if has_secret():
            seal = self.attempt(lambda: bytes(self.files.cat_file(f"{self.url}/{name}{_SEAL}")))
            if seal is None or not is_seal(seal.decode("ascii", "replace"), name, hashlib.sha256(data).hexdigest()):
                self._tell_once(f"{name} in {self.url} is not sealed with ${SECRET_VARIABLE}; it is left out")
                return None
        return data.decode("utf-8", "replace")

    def write_text(self, name: str, text: str) -> bool:
        """Write a small file whole, its seal before it; True when it is there."""

        def write() -> bool:
            if has_secret():
                self._write(f"{name}{_SEAL}", seal_of(name, hashlib.sha256(text.encode("utf-8")).hexdigest()))
            self._write(name, text)
            return True

        return bool(self.attempt(write))

    def attempt(self, action: Callable[[], Answer]) -> Answer | None:
        """Do it, or say in one line that the store does not answer, and return None."""
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
                said = " ".join(str(error).split())[:160].rstrip(".")
                self.problems.append(
                    f"the shared store {self.url} does not answer ({type(error).__name__}: {said}); going on with the "
                    "store of this machine, `draftsmith resync` uploads later"
                )
            self._silent_until = time.monotonic() + SECONDS_LEFT_ALONE
            return None

    @property
    def is_silent(self) -> bool:
        """It has not answered lately."""
        return time.monotonic() < self._silent_until

    def try_again(self) -> None:
        """Forget that it did not answer: somebody asks on purpose."""
        self._silent_until = 0.0

    def _record(self, name: str) -> dict[str, Any] | None:
        """The record of KEY or KEY.SESSION, its form, digest and seal checked."""
        content = self._any_record(name)
        if content is None or is_ours(content):
            return content
        self._tell_once(
            f"{name[:12]} in the shared store {self.url} is not sealed with ${SECRET_VARIABLE}: it is not used"
        )
        return None

    def _any_record(self, name: str) -> dict[str, Any] | None:
        """The record, whoever has written it."""
        try:
            text = self.files.cat_file(f"{self.url}/{_place(name)}", start=0)  # from 0: one request, not three
        except FileNotFoundError:
            return None
        try:
            content = parse_checked(text)
            if content["key"] != name.partition(".")[0]:
                raise BadRecord("its record is that of something else")
        except BadRecord as error:
            self._refuse(name, str(error))
            return None
        return content

    def _tell_once(self, problem: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            self.problems.append(problem)

    def _refuse(self, name: str, why: str) -> None:
        self.problems.append(f"the shared store {self.url} has a broken artifact {name[:12]}: {why}; it is made again")
        self._remove(_place(name))

    def _get_object(self, facts: Mapping[str, Any], to: Path, name: str) -> str:
        """Fetch one file; returns what is wrong with it, or ''."""
        place = _object(facts)
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.files.get_file(f"{self.url}/{place}", str(to))
        except FileNotFoundError:
            return f"{name} is missing"
        if sha256_of(to) == facts["sha256"]:
            return ""
        self._remove(place)  # a content under another content's name is of no use to anybody
        return f"{name} has changed since it was made"

    def _put_object(self, file: Path, facts: Mapping[str, Any]) -> None:
        place = f"{self.url}/{_object(facts)}"
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
        beside = f"{folder}/.{name}.{uuid.uuid4().hex}"
        put(beside)
        self.files.mv(beside, place)

    def _remove(self, name: str) -> None:
        try:
            self.files.rm_file(f"{self.url}/{name}")
        except FileNotFoundError:
            return  # somebody else has removed it already

    def _listing(self, folder: str) -> dict[str, Mapping[str, Any]]:
        try:
            found: Iterable[Mapping[str, Any]] = self.files.ls(f"{self.url}/{folder}", detail=True, refresh=True)
        except FileNotFoundError:
            return {}  # nobody has written there yet
        named = ((str(facts["name"]).rpartition("/")[2], facts) for facts in found)
        return {name: facts for name, facts in named if _NAME.fullmatch(name)}


def _place(name: str) -> str:
    """Where artifact.json of KEY, or of KEY.SESSION, is."""
    return f"{'earlier' if '.' in name else 'artifacts'}/{name}.json"


def _object(facts: Mapping[str, Any]) -> str:
    return f"objects/{facts['sha256'][:2]}/{facts['sha256']}"


def _mark(facts: Mapping[str, Any]) -> str:
    """What a listing says of a file that changes when it is written again."""
    return str(facts.get("ETag") or facts.get("mtime") or facts.get("created") or facts.get("size"))
