"""A file is whole or absent whoever is killed, private where it must be, and locked by one process at a time."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from torn_safetensors import killed_while_writing

from components.contract import UserError
from components.files import (
    digest_of_json,
    locked,
    open_lock,
    sha256_of,
    sweep,
    try_lock,
    wait_for_lock,
    write_whole,
    written_whole,
)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "shard"
    with pytest.raises(RuntimeError), written_whole(file) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with written_whole(file) as first, written_whole(file) as second:  # two writers of the same shard
        assert first != second
        first.write_text("same")
        second.write_text("same")
        assert not file.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["shard"]
    assert file.read_text() == "same"


def test_what_killed_writers_left_is_swept_up(tmp_path: Path) -> None:
    for name in (".shard.0.tmp", "shard", "other.tmp"):
        (tmp_path / name).write_text("x")
    sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other.tmp", "shard"]


def test_what_safetensors_left_when_it_was_killed_is_swept_up(tmp_path: Path) -> None:
    """It writes under a name of its own in the same folder; what that looks like is its business, and may change."""
    torn = killed_while_writing(tmp_path)
    sweep(tmp_path)
    assert torn and not list(tmp_path.iterdir())


def test_what_lies_in_folders_below_is_swept_up_and_folders_stay(tmp_path: Path) -> None:
    (tmp_path / "below" / ".part.0.tmp").mkdir(parents=True)
    (tmp_path / "below" / ".shard.0.tmp").write_text("x")
    sweep(tmp_path)
    assert [path.name for path in (tmp_path / "below").iterdir()] == [".part.0.tmp"]


def test_a_text_is_replaced_whole_and_as_private_as_it_is_asked_to_be(tmp_path: Path) -> None:
    file = tmp_path / "auth"
    write_whole(file, "first")
    write_whole(file, "second", durable=True, mode=0o600)
    assert file.read_text() == "second" and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [file]
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder where a file belongs"):
        write_whole(tmp_path / "folder", "x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["auth", "folder"]


def test_a_digest_is_that_of_the_bytes_and_of_the_values(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1000)
    assert sha256_of(tmp_path / "a") == hashlib.sha256(b"abc" * 1000).hexdigest()
    assert digest_of_json({"b": 1, "a": [1.5]}) == digest_of_json({"a": [1.5], "b": 1}) != digest_of_json({"a": [1.5]})


def test_readers_share_a_lock_and_a_writer_has_it_alone(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with locked(lock, shared=True), locked(lock, shared=True, wait=False) as second:
        assert second
        with locked(lock, wait=False) as alone:
            assert not alone
    with locked(lock), open_lock(lock) as file:
        assert not try_lock(file, shared=True)
    with open_lock(lock) as file:
        wait_for_lock(file)
        with locked(lock, wait=False) as other:
            assert not other
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match="is a folder where a lock belongs"):
        open_lock(tmp_path / "folder")
