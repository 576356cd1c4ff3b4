"""Whatever is damaged in a home is noticed, named, set aside, and what can be made again is made again."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from components.contract import UserError
from components.files import write_whole
from storage import journal
from storage.artifacts.store import BELIEVED_S, Store
from storage.history import segments
from storage.history.files import compact, files_of, history_dir
from storage.history.query import query
from storage.history.records import new_promotion
from storage.history.write import record_all, record_promotion, record_run
from storage.repair import find_damage, repair


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Four artifacts in the store and in the history, and two entries of the promotion log."""
    store = Store(tmp_path)
    for number in range(4):
        key = f"k{number}" * 4
        with store.lock(key):
            out, _ = store.open_staging(key)
            (out / "weights.bin").write_bytes(bytes(range(256)) * 20)
            store.commit(key, "Draft", {"number": number}, {"pipeline": "p", "step": "draft"})
    assert record_all(tmp_path, store) == {}
    for number in (1, 2):
        journal.log_promotion(
            tmp_path, new_promotion("m", "champion", "promote", None, number, "user", "why", {"number": str(number)})
        )
    return tmp_path


def artifacts(home: Path) -> list[str]:
    return [str(row[0]) for row in query("SELECT artifact_key FROM artifact ORDER BY 1", home)[1]]


KEYS = [f"k{number}" * 4 for number in range(4)]


def test_a_whole_home_has_nothing_to_repair(home: Path) -> None:
    assert list(find_damage(home, Store(home))) == [] and repair(home, Store(home)) == []
    assert not (home / "broken").exists() and artifacts(home) == KEYS


def test_rot_that_changes_neither_time_nor_size_is_found(home: Path) -> None:
    file = home / "store" / KEYS[1] / "weights.bin"
    before = file.stat()
    data = bytearray(file.read_bytes())
    data[777] ^= 4
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    store = Store(home)
    assert store.verify_local(KEYS[1]).artifact is not None, "it was verified a moment ago: nobody reads it again"
    (found,) = find_damage(home, store)
    assert (found.kind, found.name) == ("artifact", KEYS[1]) and "weights.bin has changed" in found.fault
    stamps = home / "verified" / f"{KEYS[1]}.json"
    os.utime(stamps, (0, stamps.stat().st_mtime - BELIEVED_S - 1))
    assert "weights.bin has changed" in store.verify_local(KEYS[1]).fault, "after a week it is read again"
    (said,) = repair(home, store)
    assert KEYS[1][:12] in said and "weights.bin" in said
    assert store.verify_local(KEYS[1]).fault == "absent" and len(list((home / "broken").iterdir())) == 1
    assert artifacts(home) == KEYS, "what was measured of it stays known"


def test_no_byte_of_a_record_changes_unnoticed(home: Path) -> None:
    """Of 200 flipped bits none leaves another record in use."""
    file, dice = home / "store" / KEYS[0] / "artifact.json", random.Random(0)
    whole = file.read_bytes()
    before = json.loads(whole)
    for _ in range(200):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        file.write_bytes(data)
        found = Store(home).verify_local(KEYS[0])
        assert found.artifact is None or json.loads(bytes(data)) == before, bytes(data)


@pytest.mark.parametrize("changed", ["settings", "info", "files", "session"])
def test_a_changed_record_is_not_reused(home: Path, changed: str) -> None:
    file = home / "store" / KEYS[0] / "artifact.json"
    content = json.loads(file.read_text())
    if changed == "settings":
        content["record"]["settings"] = {"num_steps": 7}
    elif changed == "files":
        content["files"] = {}
    else:
        content[changed] = "20200101-000000-000000-deadbeef" if changed == "session" else {"number": 9}
    file.write_text(json.dumps(content))
    assert Store(home).verify_local(KEYS[0]).fault == "its record has changed since it was made"


@pytest.mark.parametrize("how", ["torn", "flipped", "empty", "no manifest", "torn manifest"])
def test_a_damaged_history_says_so_and_is_made_anew(home: Path, how: str) -> None:
    compact(home, 0, whole=True)
    folder = history_dir(home) / "artifact"
    (segment,) = [Path(name) for name in files_of(home, "artifact") if "_segment" in name]
    data, manifest = bytearray(segment.read_bytes()), folder / "_manifest.json"
    if how == "torn":
        segment.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[45] ^= 1  # of the dictionary of keys
        segment.write_bytes(data)
    elif how == "empty":
        segment.write_bytes(b"")
    elif how == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:20])
    with pytest.raises(UserError, match=r"doctor --repair") as refused:
        artifacts(home)
    assert "\n" not in str(refused.value)
    assert [damage.kind for damage in find_damage(home, Store(home))] == ["history"]
    said = repair(home, Store(home))
    assert len(said) == 1 and "4 artifacts" in said[0] and "2 promotions" in said[0]
    assert artifacts(home) == KEYS and list(find_damage(home, Store(home))) == []
    (kept,) = (home / "broken").iterdir()
    assert (kept / "artifact").is_dir(), "what the history was is kept"


def test_a_compaction_that_was_killed_before_its_end_is_no_damage(home: Path) -> None:
    folder = history_dir(home) / "artifact"
    (folder / "_keys-0123456789abcdef.txt").write_text("\n".join(segments.fresh_keys(folder, segments.Manifest())))
    assert artifacts(home) == KEYS and list(find_damage(home, Store(home))) == []


def test_unreadable_lines_of_the_promotion_log_are_set_aside(home: Path) -> None:
    file = journal.promotions_file(home)
    first, second = file.read_text().splitlines()
    file.write_text(f"{first}\n{second[:40]}\n\x00\xff\n{second}")
    found = list(find_damage(home, Store(home)))
    assert [damage.name for damage in found] == ["line 2 of promotions.jsonl", "line 3 of promotions.jsonl"]
    (said,) = repair(home, Store(home))
    assert said.startswith("2 unreadable lines")
    assert file.read_text() == f"{first}\n{second}\n" and list(find_damage(home, Store(home))) == []
    (aside,) = (home / "broken").iterdir()
    assert aside.read_text().splitlines()[0] == second[:40]


def test_who_waits_for_the_log_while_it_is_mended_writes_to_the_new_one(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that a waiting process has opened may be another one by the time it gets the lock."""
    import fcntl

    real: Callable[..., None] = fcntl.flock
    swapped: list[bool] = []

    def swap_first(file: object, how: int) -> None:
        if not swapped:
            swapped.append(True)
            path = journal.promotions_file(home)
            content = path.read_text()
            path.unlink()
            path.write_text(content)
        real(file, how)

    monkeypatch.setattr(fcntl, "flock", swap_first)
    journal.log_promotion(home, new_promotion("m", "champion", "promote", 2, 3, "user", "why", {"number": "3"}))
    assert swapped and [row.to_version for row in journal.promotions(home)] == [1, 2, 3]


@pytest.mark.parametrize("how", ["another file of keys", "a file is gone", "a footer", "another table's manifest"])
def test_what_has_no_checksum_of_its_own_in_the_history_is_found(home: Path, how: str) -> None:
    folder = history_dir(home) / "artifact"
    if how == "a file is gone":
        next(folder.glob("k*.parquet")).unlink()
    elif how == "a footer":
        file = next(folder.glob("k*.parquet"))
        data = bytearray(file.read_bytes())
        data[-100] ^= 1
        file.write_bytes(data)
    else:
        for row in journal.promotions(home):
            record_promotion(home, row)
        compact(home, 0, whole=True)
        (keys,) = folder.glob("_keys-*.txt")
        if how == "another file of keys":
            keys.write_text(keys.read_text().replace("k1", "k7"))
        else:
            (folder / "_manifest.json").write_bytes((history_dir(home) / "promotion" / "_manifest.json").read_bytes())
    if how != "another file of keys":  # which only writers read
        with pytest.raises(UserError, match=r"doctor --repair"):
            artifacts(home)
    assert {damage.kind for damage in find_damage(home, Store(home))} == {"history"}
    repair(home, Store(home))
    assert artifacts(home) == KEYS and list(find_damage(home, Store(home))) == []


def test_a_changed_line_of_the_promotion_log_is_taken_from_the_history(home: Path) -> None:
    for row in journal.promotions(home):
        record_promotion(home, row)
    file = journal.promotions_file(home)
    before = file.read_text()
    file.write_text(before.replace('"to_version": 1', '"to_version": 3'))
    assert [row.to_version for row in journal.promotions(home)] == [2]
    repair(home, Store(home))
    assert [row.to_version for row in journal.promotions(home)] == [1, 2]
    file.unlink()
    assert [damage.kind for damage in find_damage(home, Store(home))] == ["promotions"]
    repair(home, Store(home))
    assert file.read_text() == before and list(find_damage(home, Store(home))) == []


@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_a_damaged_journal_is_made_anew_with_the_history(home: Path, how: str) -> None:
    opened = journal.Journal.start(home, "p", {"steps": 3}, "direct")
    facts = {"uses": "u.v", "kind": "Draft", "status": "completed", "why": "new", "seconds": 1.5, "settings": {"a": 1}}
    opened.add(
        "step", step="draft", key=KEYS[0], inputs={}, info={"number": 0}, path=f"store/{KEYS[0]}", session="", **facts
    )
    opened.add("end", status="completed", reason="")
    opened.close()
    before = journal.read(opened.path)
    record_run(home, before)
    lines = opened.path.read_text().splitlines(keepends=True)
    opened.path.unlink()
    if how != "gone":
        opened.path.write_text("".join(lines[:-1]) if how == "cut" else "".join(lines).replace("1.5", "9.5"))
    assert [damage.kind for damage in find_damage(home, Store(home))] == ["journal"]
    repair(home, Store(home))
    start, step, end = journal.read(opened.path)
    assert start["params"] == {"steps": 3} and step["seconds"] == 1.5 and step["settings"] == {"a": 1}
    assert end["status"] == "completed" and list(find_damage(home, Store(home))) == []


def test_what_stands_where_an_artifact_or_a_lock_belongs_is_set_aside(home: Path) -> None:
    (home / "store" / KEYS[1] / "artifact.json").unlink()
    (home / "locks" / f"{KEYS[2]}.lock").unlink()
    (home / "locks" / f"{KEYS[2]}.lock").mkdir()
    with pytest.raises(UserError, match="is a folder where a lock belongs"), Store(home).lock(KEYS[2]):
        pass
    assert {damage.kind for damage in find_damage(home, Store(home))} == {"artifact", "folder"}
    assert len(repair(home, Store(home))) == 2 and list(find_damage(home, Store(home))) == []


def test_a_folder_where_a_small_file_belongs_is_named_and_set_aside(home: Path) -> None:
    row = new_promotion("m", "champion", "promote", 2, 1, "user", "why", {})
    file = home / "history" / "promotion" / f"{row.promotion_id}.parquet"
    file.mkdir(parents=True)
    with pytest.raises(UserError, match="is a folder where a file belongs"):
        record_promotion(home, row)
    with pytest.raises(UserError, match="is a folder where a file belongs"):
        write_whole(file, "{}")
    assert not [path for path in file.parent.iterdir() if path.name.startswith(f".{file.name}")]
    repair(home, Store(home))
    assert list(find_damage(home, Store(home))) == []
    record_promotion(home, row)


def test_a_folder_in_the_place_of_a_note_of_what_was_verified_stops_nobody(home: Path) -> None:
    note = home / "verified" / f"{KEYS[0]}.json"
    note.unlink(missing_ok=True)
    note.mkdir(parents=True)
    assert Store(home).get(KEYS[0]) is not None
    assert [damage.kind for damage in find_damage(home, Store(home))] == ["folder"]
    assert len(repair(home, Store(home))) == 1 and list(find_damage(home, Store(home))) == []


def test_an_empty_database_and_a_password_that_is_none_are_set_aside(home: Path) -> None:
    for name, content in (("prefect/prefect.db", b""), ("prefect/auth", b"draftsmith:\xff\xfe")):
        (home / name).parent.mkdir(exist_ok=True)
        (home / name).write_bytes(content)
    assert {damage.kind for damage in find_damage(home, Store(home))} == {"database", "password"}
    assert len(repair(home, Store(home))) == 2 and list(find_damage(home, Store(home))) == []
    (home / "prefect" / "auth").write_text("draftsmith:word\n")
    assert list(find_damage(home, Store(home))) == []


def test_a_record_that_has_changed_is_named_by_whoever_reads_it(home: Path) -> None:
    file = home / "store" / KEYS[0] / "artifact.json"
    file.write_text(file.read_text().replace('"number": 0', '"number": 8'))
    with pytest.raises(UserError, match="has changed since it was made; `draftsmith doctor --repair`"):
        Store(home).record_of(KEYS[0])
