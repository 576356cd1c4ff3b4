"""A key that is made again: the newest stands in the store, what was before is kept, and a kill loses neither."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from killed_changes import die_before

from storage.artifacts.sessions import RECORD_FILE, new_session
from storage.artifacts.store import Store

KEY = "ab" * 32
WEIGHTS = b"the same in every session"


def write(store: Store, number: int) -> None:
    """What a step writes the `number`-th time: other rows, the same weights."""
    out, _ = store.open_staging(KEY)
    (out / "rows.jsonl").write_text(f"{number}\n")
    (out / "deep").mkdir(exist_ok=True)
    (out / "deep" / "weights.bin").write_bytes(WEIGHTS)


def make(home: Path, number: int, kind: str = "Measurements") -> str:
    """Make the key and return its session."""
    store = Store(home)
    with store.lock(KEY):
        write(store, number)
        store.commit(KEY, kind, {"number": number}, {})
    return store.sessions(KEY)[0].name


def numbers(home: Path) -> list[int]:
    """What the rows of each session say, the newest first."""
    return [int((session.path / "rows.jsonl").read_text()) for session in Store(home).sessions(KEY)]


def test_evidence_that_is_made_again_keeps_what_was_before_whole_and_its_bytes_once(tmp_path: Path) -> None:
    made = [make(tmp_path, number) for number in (1, 2, 3)]
    store = Store(tmp_path)
    assert sorted(made) == made and len(set(made)) == 3, "sessions sort by time"
    assert [session.name for session in store.sessions(KEY)] == made[::-1] and numbers(tmp_path) == [3, 2, 1]
    assert [session.is_newest for session in store.sessions(KEY)] == [True, False, False]
    found = store.get(KEY)
    assert found is not None and found.info["number"] == 3 and store.keys() == [KEY]
    assert store.record_of(KEY)["session"] == made[2]
    weights = [session.path / "deep" / "weights.bin" for session in store.sessions(KEY)]
    assert {path.read_bytes() for path in weights} == {WEIGHTS}
    assert len({path.stat().st_ino for path in weights}) == 1, "equal bytes are one file on disk"
    assert store.path_of_session(KEY, made[0]) == store.sessions(KEY)[2].path
    assert store.path_of_session(KEY, "gone") == store.path_of(KEY)
    assert not list((tmp_path / "partial").iterdir()) and not (tmp_path / "broken").exists()


def test_of_what_is_no_evidence_the_record_alone_is_kept(tmp_path: Path) -> None:
    for number in (1, 2):
        make(tmp_path, number, "Draft")
    newest, before = Store(tmp_path).sessions(KEY)
    assert [path.name for path in before.path.iterdir()] == [RECORD_FILE]
    record = json.loads((before.path / RECORD_FILE).read_text())
    assert record["info"] == {"number": 1} and set(record["files"]) == {"rows.jsonl", "deep/weights.bin"}
    assert (newest.path / "rows.jsonl").read_text() == "2\n"


def test_an_artifact_from_before_there_were_sessions_is_a_session_like_others(tmp_path: Path) -> None:
    make(tmp_path, 1)
    store = Store(tmp_path)
    record = store.path_of(KEY) / RECORD_FILE
    content = json.loads(record.read_text())
    del content["session"], content["digest"]
    record.write_text(json.dumps(content))
    assert [session.name for session in store.sessions(KEY)] == [""]
    made = make(tmp_path, 2)
    assert [session.name for session in store.sessions(KEY)] == [made, ""] and numbers(tmp_path) == [2, 1]
    assert store.path_of_session(KEY, "") == store.sessions(KEY)[1].path


def test_a_broken_artifact_is_no_session(tmp_path: Path) -> None:
    make(tmp_path, 1)
    (Store(tmp_path).path_of(KEY) / "rows.jsonl").write_text("2\n")
    make(tmp_path, 3)
    assert numbers(tmp_path) == [3]
    assert len(list((tmp_path / "broken").iterdir())) == 1, "it is set aside, for a person to look at"


def killed(home: Path, call: int, action: Callable[[], object]) -> bool:
    """Do it in a child that is killed before its call-th change; False when it was done before."""
    child = os.fork()
    if not child:
        try:
            die_before(call, "rename", "replace", "link", "unlink", "rmdir")
            action()
            os._exit(0)
        finally:
            os._exit(1)  # whatever happened, this is no second pytest
    how = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert how in (0, -signal.SIGKILL)
    return how != 0


@pytest.mark.parametrize("kind", ["Measurements", "Draft"])
def test_killed_before_any_of_its_steps_a_replacement_loses_neither_what_was_nor_what_is_new(
    tmp_path: Path, kind: str
) -> None:
    first = tmp_path / "first"
    before = make(first, 1, kind)
    at, seen = 0, set[tuple[bool, int]]()
    while True:
        at += 1
        home = tmp_path / f"killed-{at}"
        shutil.copytree(first, home)
        with Store(home).lock(KEY):
            write(Store(home), 2)
        if not killed(home, at, lambda home=home: Store(home).commit(KEY, kind, {}, {})):  # type: ignore[misc]
            break
        store = Store(home)
        sealed = (home / "partial" / KEY / RECORD_FILE).is_file()
        kept = store.sessions(KEY)
        assert before in [session.name for session in kept], f"killed before step {at}: what was there is gone"
        assert sealed or len(kept) == 2 or (home / "partial" / KEY / "rows.jsonl").read_text() == "2\n"
        seen.add((sealed, len(kept)))
        store.settle_all()
        names = [session.name for session in store.sessions(KEY)]
        assert len(names) == (2 if sealed or len(kept) == 2 else 1) and names[-1] == before, f"before step {at}"
        found = store.verify_local(KEY)
        assert found.artifact is not None and found.artifact.info == ({} if len(names) == 2 else {"number": 1})
        after = make(home, 3, kind)
        assert [session.name for session in store.sessions(KEY)] == [after, *names], "it goes on as if nothing had been"
        if kind == "Measurements":
            assert numbers(home) == ([3, 2, 1] if len(names) == 2 else [3, 1])
    assert at > 5
    assert seen == {(False, 1), (True, 1), (False, 2)}, "kills came before it was sealed, while it moved, and after"


def test_whoever_looks_for_an_artifact_finishes_what_a_kill_cut_short(tmp_path: Path) -> None:
    make(tmp_path, 1)
    with Store(tmp_path).lock(KEY):
        write(Store(tmp_path), 2)
    store = Store(tmp_path)

    def finish() -> None:
        real = os.rename
        moved: list[Path] = []

        def once(source: Any, to: Any) -> None:
            if moved:
                os.kill(os.getpid(), signal.SIGKILL)
            moved.append(to)
            real(source, to)

        os.rename = once  # type: ignore[assignment]
        Store(tmp_path).commit(KEY, "Measurements", {}, {})

    assert killed(tmp_path, 99, finish)
    assert store.verify_local(KEY).fault == "absent", "looking changes nothing"
    found = store.get(KEY)
    assert found is not None and numbers(tmp_path) == [2, 1]


def test_a_name_tells_the_time_and_is_nobody_elses() -> None:
    at = 1_750_000_000.25
    assert new_session(at).startswith("20250615-150640-250000-") and new_session(at) != new_session(at)
    assert new_session(at) < new_session(at + 0.001) < new_session(at + 86_400.0)
