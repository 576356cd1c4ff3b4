"""An artifact is complete or absent, whatever dies, and nothing that is broken is ever used."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torn_safetensors import killed_while_writing

from components.contract import Draft, UserError
from storage.artifacts.store import Store

KEY = "ab" * 32
ROOT = Path(__file__).resolve().parents[3]


def make(store: Store, key: str = KEY, files: dict[str, bytes] | None = None) -> Draft:
    out, _ = store.open_staging(key)
    for name, content in (files or {"draft.json": b"{}", "deep/model.safetensors": b"weights"}).items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(content)
    made = store.commit(key, "Draft", {"method": "fern"}, {"step": "draft"})
    assert isinstance(made, Draft)
    return made


def test_what_is_finished_is_found_whole(tmp_path: Path) -> None:
    store = Store(tmp_path)
    made = make(store)
    found = Store(tmp_path).get(KEY)
    assert found == made
    assert type(found) is Draft
    content = store.record_of(KEY)
    assert set(content["files"]) == {"draft.json", "deep/model.safetensors"}
    assert content["record"] == {"step": "draft"}
    assert not list((tmp_path / "partial").iterdir())
    assert store.keys() == [KEY]


def test_nothing_is_found_before_it_is_finished(tmp_path: Path) -> None:
    store = Store(tmp_path)
    out, scratch = store.open_staging(KEY)
    (out / "draft.json").write_text("{}")
    (scratch / "checkpoint").write_text("half")
    (out / "artifact.json").write_text("{}")  # a finish that died before its rename
    assert store.get(KEY) is None
    assert store.open_staging(KEY) == (out, scratch)
    assert (out / "draft.json").exists() and (scratch / "checkpoint").exists()
    assert not (out / "artifact.json").exists()


def test_what_safetensors_was_writing_when_it_was_killed_is_no_part_of_an_artifact(tmp_path: Path) -> None:
    store = Store(tmp_path)
    out, scratch = store.open_staging(KEY)
    (out / "deep").mkdir()
    assert killed_while_writing(out / "deep") and killed_while_writing(scratch)
    make(store)
    assert set(store.record_of(KEY)["files"]) == {"draft.json", "deep/model.safetensors"}
    assert {path.name for path in store.path_of(KEY).rglob("*") if path.is_file()} == {
        *("artifact.json", "draft.json", "model.safetensors")
    }


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("truncate", "deep/model.safetensors has 3 bytes instead of 7"),
        ("flip", "deep/model.safetensors has changed since it was made"),
        ("remove", "deep/model.safetensors is missing"),
        ("record", "artifact.json cannot be read (is not JSON"),
        ("no record", "artifact.json cannot be read (there is no such file)"),
        ("unknown kind", "its record is not one of an artifact"),
    ],
)
def test_a_broken_artifact_is_set_aside_never_used(tmp_path: Path, damage: str, why: str) -> None:
    store = Store(tmp_path)
    path = make(store).path
    weights, record = path / "deep" / "model.safetensors", path / "artifact.json"
    if damage == "truncate":
        weights.write_bytes(b"wei")
    elif damage == "flip":
        weights.write_bytes(b"weighty"[:7])
    elif damage == "remove":
        weights.unlink()
    elif damage == "record":
        record.write_text("{")
    elif damage == "no record":
        record.unlink()
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "kind": "Cake"}))
    assert store.verify_local(KEY).fault.startswith(why)
    assert path.exists(), "looking changes nothing"
    assert store.get(KEY) is None
    assert not path.exists()
    assert len(list((tmp_path / "broken").iterdir())) == 1
    make(store)
    assert store.get(KEY) is not None


def test_a_change_that_keeps_size_and_time_is_seen_when_the_inode_is_new(tmp_path: Path) -> None:
    store = Store(tmp_path)
    weights = make(store).path / "deep" / "model.safetensors"
    stat = weights.stat()
    beside = weights.with_name("beside")
    beside.write_bytes(b"WEIGHTS")
    os.utime(beside, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    os.replace(beside, weights)
    assert store.verify_local(KEY).fault == "deep/model.safetensors has changed since it was made"


def test_verified_files_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    make(store)
    monkeypatch.setattr("storage.artifacts.store.sha256_of", lambda file: pytest.fail(f"{file} was read"))
    assert store.get(KEY) is not None
    for file in (tmp_path / "verified").iterdir():
        file.unlink()
    with pytest.raises(pytest.fail.Exception):
        store.get(KEY)


def test_only_one_holds_the_lock_of_a_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with (
        store.lock(KEY) as first,
        Store(tmp_path).lock(KEY, wait=False) as second,
        store.lock("cd", wait=False) as other,
    ):
        assert (first, second, other) == (True, False, True)
    with store.lock(KEY, wait=False) as again:
        assert again


def test_a_broken_artifact_that_is_being_rebuilt_is_left_alone(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = make(store).path
    (path / "draft.json").unlink()
    with store.lock(KEY):
        assert Store(tmp_path).get(KEY) is None
        assert path.exists()


MAKER = """
import sys
from storage.artifacts.store import Store
store = Store(sys.argv[1])
for number in range(10000):
    key = f"{number:04d}" * 16
    out, scratch = store.open_staging(key)
    for name in "abcd":
        (out / name).write_bytes(name.encode() * 5000)
    store.commit(key, "Draft", {"number": number}, {})
    print(number, flush=True)
"""


@pytest.mark.parametrize("after", [3, 8, 13])
def test_a_kill_leaves_every_key_whole_or_absent(tmp_path: Path, after: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", MAKER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for _ in range(after):
        process.stdout.readline()
    time.sleep(after / 4000)
    process.send_signal(signal.SIGKILL)
    said = process.communicate()[0].split()
    store = Store(tmp_path)
    assert len(store.keys()) >= after + len(said)
    for key in [path.name for path in (tmp_path / "store").iterdir()]:
        assert store.verify_local(key).artifact is not None


@settings(max_examples=30, deadline=None)
@given(
    files=st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=6), st.binary(min_size=1, max_size=50), min_size=1, max_size=5
    ),
    place=st.randoms(use_true_random=False),
)
def test_any_flipped_byte_is_found(tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], place) -> None:  # type: ignore[no-untyped-def]
    store = Store(tmp_path_factory.mktemp("home"))
    made = make(store, files=files)
    assert store.verify_local(KEY).artifact is not None
    name = place.choice(sorted(files))
    content = bytearray(files[name])
    content[place.randrange(len(content))] ^= 1 << place.randrange(8)
    (made.path / name).write_bytes(bytes(content))
    assert store.verify_local(KEY).fault == f"{name} has changed since it was made"


def test_a_prefix_names_one_key(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in ("ab12", "ab34", "cd56"):
        make(store, key)
    assert store.resolve("cd") == "cd56"
    with pytest.raises(UserError, match="'ab' is the start of 2 keys"):
        store.resolve("ab")
    with pytest.raises(UserError, match=r"no artifact in .* starts with 'ef'"):
        store.resolve("ef")
