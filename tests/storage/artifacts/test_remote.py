"""Homes that share a store: what one has finished, another finds whole; nothing half, broken or foreign is believed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Draft, UserError
from storage.artifacts import remote as remote_store
from storage.artifacts.records import with_digest
from storage.artifacts.remote import VARIABLE, RemoteStore, drain_problems
from storage.artifacts.store import Store

KEY = "ab" * 32
FILES = {"draft.json": b"{}", "deep/model.safetensors": b"weights"}
ROOT = Path(__file__).resolve().parents[3]


def forget_open_stores() -> None:
    """As a new process would see it."""
    remote_store._store_at.cache_clear()


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty shared store that is turned on."""
    place = tmp_path / "team" if request.param == "file" else Path("/") / uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, f"{request.param}://{place}")
    forget_open_stores()
    yield f"{request.param}://{place}"
    forget_open_stores()


@pytest.fixture
def homes(url: str, tmp_path: Path) -> tuple[Store, Store]:
    """The stores of two machines."""
    return Store(tmp_path / "ada"), Store(tmp_path / "bob")


def make(store: Store, key: str = KEY, files: dict[str, bytes] | None = None) -> Draft:
    out, _ = store.open_staging(key)
    for name, content in (FILES if files is None else files).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    made = store.commit(key, "Draft", {"method": "fern"}, {"step": "draft"})
    assert isinstance(made, Draft)
    return made


def content_of(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file() and file.name != "artifact.json"
    }


def objects(store: Store) -> list[str]:
    assert store.remote is not None
    return sorted(store.remote.files.find(f"{store.remote.url}/objects"))


def test_what_one_home_finishes_another_finds(homes: tuple[Store, Store]) -> None:
    ada, bob = homes
    make(ada)
    assert bob.verify_local(KEY).fault == "absent"
    foreseen = bob.probe(KEY).artifact
    assert isinstance(foreseen, Draft) and not foreseen.path.exists(), "looking ahead fetches nothing"
    found = bob.get(KEY)
    assert found == foreseen
    assert found is not None and content_of(found.path) == FILES
    assert bob.record_of(KEY) == ada.record_of(KEY)
    assert bob.verify_local(KEY).fault == ""
    assert not list((bob.home / "partial").iterdir())
    assert drain_problems() == []


def test_nothing_is_foreseen_that_nobody_has(homes: tuple[Store, Store]) -> None:
    assert [store.probe(KEY).fault for store in homes] == ["absent", "absent"]
    assert homes[0].get(KEY) is None
    assert drain_problems() == []


def test_a_prefix_names_a_key_of_another_home(homes: tuple[Store, Store]) -> None:
    ada, bob = homes
    make(ada)
    assert bob.resolve("abab") == KEY
    assert bob.record_of(KEY)["info"] == {"method": "fern"}
    assert bob.keys() == [], "asking brings nothing"


def test_the_same_content_is_sent_once(homes: tuple[Store, Store]) -> None:
    ada, bob = homes
    make(ada, "11" * 32)
    before = objects(ada)
    make(bob, "22" * 32)
    assert objects(bob) == before and len(before) == len(FILES)


def damage_object(remote: RemoteStore) -> None:
    place = next(iter(remote.files.find(f"{remote.url}/objects")))
    remote.files.pipe_file(place, b"x" * remote.files.size(place))


def lose_object(remote: RemoteStore) -> None:
    remote.files.rm_file(next(iter(remote.files.find(f"{remote.url}/objects"))))


def cut_record(remote: RemoteStore) -> None:
    place = f"{remote.url}/artifacts/{KEY}.json"
    remote.files.pipe_file(place, remote.files.cat_file(place)[:-20])


def of_another_key(remote: RemoteStore) -> None:
    place = f"{remote.url}/artifacts/{KEY}.json"
    content = json.loads(remote.files.cat_file(place)) | {"key": "cd" * 32}
    remote.files.pipe_file(place, json.dumps(with_digest(content)).encode())


def changed(remote: RemoteStore) -> None:
    place = f"{remote.url}/artifacts/{KEY}.json"
    remote.files.pipe_file(place, remote.files.cat_file(place).replace(b"ab" * 32, b"cd" * 32))


def with_a_file_outside(remote: RemoteStore) -> None:
    place = f"{remote.url}/artifacts/{KEY}.json"
    remote.files.pipe_file(place, remote.files.cat_file(place).replace(b"draft.json", b"../../draft.json"))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (damage_object, "has changed since it was made"),
        (lose_object, "is missing"),
        (cut_record, "its record cannot be read"),
        (of_another_key, "that of something else"),
        (changed, "has changed since it was made"),
        (with_a_file_outside, "it has a file named '../../draft.json'"),
    ],
)
def test_what_is_broken_there_is_refused_and_made_again(
    homes: tuple[Store, Store], damage: Callable[[RemoteStore], None], why: str
) -> None:
    ada, bob = homes
    make(ada)
    assert bob.remote is not None
    damage(bob.remote)
    assert bob.get(KEY) is None
    said = drain_problems()
    assert len(said) == 1 and why in said[0] and KEY[:12] in said[0] and "made again" in said[0]
    assert not list(bob.home.glob("partial/*"))
    assert not (bob.home.parent / "draft.json").exists()
    make(bob)
    third = Store(bob.home.parent / "eve")
    found = third.get(KEY)
    assert found is not None and content_of(found.path) == FILES
    assert drain_problems() == []


def test_two_machines_that_finish_one_key_at_once_leave_one_whole_artifact(homes: tuple[Store, Store]) -> None:
    versions = [{"weights": bytes([number]) * 60_000, f"of-{number}": b"!"} for number in range(2)]
    for round_number in range(4):
        key = f"{round_number:064x}"
        at_once = threading.Barrier(2)

        def finish(store: Store, files: dict[str, bytes], key: str = key, at_once: threading.Barrier = at_once) -> None:
            at_once.wait()
            make(store, key, files)

        threads = [threading.Thread(target=finish, args=pair) for pair in zip(homes, versions, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = Store(homes[0].home.parent / f"third-{round_number}").get(key)
        assert found is not None and content_of(found.path) in versions
    assert drain_problems() == []


def test_a_store_that_is_down_stops_nothing_and_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "team").write_text("not a directory")  # every access fails, as that of a share that is not mounted
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    forget_open_stores()
    store = Store(tmp_path / "ada")
    make(store)
    make(store, "cd" * 32)
    assert store.get("ef" * 32) is None
    said = drain_problems()
    assert len(said) == 1 and "does not answer" in said[0] and "resync" in said[0]
    assert sorted(path.name for path in (store.home / "to_share").iterdir()) == [KEY, "cd" * 32]

    (tmp_path / "team").unlink()
    forget_open_stores()
    again = Store(tmp_path / "ada")
    assert again.share(KEY)
    assert [path.name for path in (store.home / "to_share").iterdir()] == ["cd" * 32]
    assert Store(tmp_path / "bob").get(KEY) is not None


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("s3://key:secret@bucket/prefix", "no credentials in the URL"),
        ("team/store", "not a URL"),
        ("teapot://kitchen", "nothing here opens teapot://"),
    ],
)
def test_a_wrong_url_is_one_line_without_its_secret(
    url: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, url)
    forget_open_stores()
    with pytest.raises(UserError, match=why) as caught:
        Store(tmp_path).probe(KEY)
    assert "secret" not in str(caught.value)


UPLOADER = """
import sys
from storage.artifacts.store import Store
store = Store(sys.argv[1])
for number in range(10000):
    key = f"{number:04d}" * 16
    out, _ = store.open_staging(key)
    for name in "abcd":
        (out / name).write_bytes(f"{number} {name}".encode() * 20000)
    print(number, flush=True)
    store.commit(key, "Draft", {"number": number}, {})
"""


@pytest.mark.parametrize("after", [2, 5, 9])
def test_a_kill_in_an_upload_leaves_every_key_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setenv(VARIABLE, f"file://{tmp_path}/team")
    forget_open_stores()
    process = subprocess.Popen(
        [sys.executable, "-c", UPLOADER, str(tmp_path / "ada")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    threading.Event().wait(after / 2000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    bob, ada = Store(tmp_path / "bob"), Store(tmp_path / "ada")
    assert bob.remote is not None
    shared = bob.remote.keys()
    assert shared is not None and len(shared) >= after - 1
    assert all(bob.get(key) is not None for key in shared)
    unshared = [path.name for path in (ada.home / "to_share").iterdir()]
    assert set(ada.keys()) - set(shared) <= set(unshared), "what was not sent is known, and sent later"
    assert all(ada.share(key) for key in unshared)
    assert set(bob.remote.keys() or ()) == set(ada.keys())
    assert drain_problems() == []


@settings(max_examples=15, deadline=None)
@given(
    files=st.dictionaries(
        st.text("ab .é%*?[#\n", min_size=1, max_size=8).filter(lambda name: name not in (".", "..")),
        st.binary(max_size=50),
        max_size=5,
    )
)
def test_any_files_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes]) -> None:
    place = tmp_path_factory.mktemp("any")
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = f"file://{place}/team"
    try:
        make(Store(place / "ada"), files=files)
        found = Store(place / "bob").get(KEY)
        assert found is not None and content_of(found.path) == files
        assert json.loads((found.path / "artifact.json").read_text())["key"] == KEY
    finally:
        shutil.rmtree(place)
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
