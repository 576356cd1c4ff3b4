"""Compaction: no row is lost or doubled, no reader notices, whenever it is killed; old files stay readable."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from components.contract import UserError
from components.rows import QualityFlag
from storage.artifacts.store import Store
from storage.history import segments
from storage.history import segments as compaction
from storage.history.files import compact, files_of, history_dir, sessions_known, write_table
from storage.history.query import query
from storage.history.records import Provenance, now
from storage.history.write import rebuild, record_artifact

HERE = Path(__file__).parents[1]


def flag(value: float, code: str = "c") -> dict[str, Any]:
    """A row of quality_flag."""
    row = QualityFlag("s", "d", "mtp", code, "info", value, "")
    return {**dataclasses.asdict(row), **dataclasses.asdict(Provenance("k", "p", "s", "r", None, now(), "0"))}


def add(home: Path, key: str, *values: float) -> None:
    rows = [flag(value) | {"artifact_key": key} for value in values]
    write_table(home, "quality_flag", key, rows, key)


def values(home: Path) -> list[tuple[str, float]]:
    return sorted(query("SELECT artifact_key, value FROM quality_flag", home)[1])


def test_no_row_is_lost_or_doubled_and_a_compacted_key_is_known(home: Path) -> None:
    expected = [(f"k{i:02}", float(i)) for i in range(12)]
    for key, value in expected[:7]:
        add(home, key, value)
    assert compact(home, 3) == {"quality_flag": 7}
    assert values(home) == expected[:7] and len(files_of(home, "quality_flag")) == 1
    add(home, "k00", 99.0)
    assert values(home) == expected[:7], "a compacted key is not written again"
    for key, value in expected[7:]:
        add(home, key, value)
    assert compact(home, 3) == {"quality_flag": 6}, "five files and the segment, which is not four times as large"
    assert values(home) == expected and len(files_of(home, "quality_flag")) == 1
    assert compact(home, 3) == {} and compact(home, 0, whole=True) == {}


def test_a_large_segment_is_left_alone_until_there_is_as_much_beside_it(home: Path) -> None:
    add(home, "large", *range(100))
    add(home, "other", 1.0)
    compact(home, 2)
    for i in range(2):
        add(home, f"small{i}", float(i))
    assert compact(home, 2) == {"quality_flag": 2} and len(files_of(home, "quality_flag")) == 2
    assert compact(home, 0, whole=True) == {"quality_flag": 2} and len(files_of(home, "quality_flag")) == 1
    assert len(values(home)) == 103


def test_files_stay_under_a_reader_and_go_when_nobody_reads(home: Path) -> None:
    for i in range(4):
        add(home, f"k{i}", float(i))
    with segments.reading(history_dir(home)):
        listed = files_of(home, "quality_flag")
        compact(home, 2)
        compact(home, 0, whole=True)
        assert sum(pq.read_metadata(file).num_rows for file in listed) == 4
        assert len(values(home)) == 4, "a reader that comes now sees the segment alone"
    for i in range(4, 6):
        add(home, f"k{i}", float(i))
    compact(home, 2)
    assert not any(Path(file).exists() for file in listed[1:])
    assert len(values(home)) == 6


def test_sessions_of_one_key_are_compacted_side_by_side_and_known_by_their_own_names(home: Path, make: Any) -> None:
    for i in range(3):
        record_artifact(home, make(f"k{i}").path)
    compact(home, 2)
    record_artifact(home, make("k1", info={"made": "anew"}).path)
    for _ in range(2):
        sql = (
            "SELECT artifact_key, info ->> 'made', is_newest FROM artifact JOIN v_session USING (artifact_key, session)"
        )
        assert query(f"{sql} ORDER BY ALL", home)[1] == [
            ("k0", None, True),
            ("k1", "anew", True),
            ("k1", None, False),
            ("k2", None, True),
        ]
        assert len(sessions_known(home, "k1")) == 2 and len(sessions_known(home, "k")) == 0
        compact(home, 0, whole=True)
    before = query("SELECT * FROM artifact ORDER BY ALL", home)[1]
    rebuild(home, Store(home))
    assert query("SELECT * FROM artifact ORDER BY ALL", home)[1] == before


def test_killed_before_any_of_its_steps_a_compaction_loses_and_doubles_nothing(home: Path, tmp_path: Path) -> None:
    for i in range(3):
        add(home, f"k{i}", float(i))
    compact(home, 2)
    for i in range(3, 6):
        add(home, f"k{i}", float(i))
    expected = values(home)
    out = tmp_path / "killed"
    script = [sys.executable, str(HERE / "killed_compaction.py"), str(history_dir(home)), str(out)]
    done = subprocess.run(
        script,
        cwd=HERE.parents[1],
        env={"PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    died = sorted(out.iterdir(), key=lambda path: int(path.name))
    assert len(died) >= 8, "it renames a segment, the keys and two manifests, and deletes four files and more"
    for number, history in enumerate(died, 1):
        again = tmp_path / f"home-{number}"
        again.mkdir()
        history.rename(again / "history")
        assert values(again) == expected, f"killed before step {number}"
        compact(again, 0, whole=True)
        assert values(again) == expected, f"killed before step {number}, then compacted"
        left = {path.name for path in (again / "history" / "quality_flag").iterdir()}
        manifest = segments.read_manifest(again / "history" / "quality_flag")
        assert {name for name in left if name[0] == "_"} - {"_manifest.json", "_sums.txt"} == manifest.files()
        assert not [name for name in left if name.endswith(".tmp") or name.startswith("k")], left


def test_appends_and_questions_go_on_while_a_table_is_compacted_again_and_again(home: Path) -> None:
    faults: list[BaseException] = []
    done = threading.Event()

    def ask() -> None:
        try:
            seen = 0
            while not done.is_set():
                found = values(home)
                assert len(found) == len(set(found)) >= seen, "a row came twice, or went"
                seen = len(found)
        except BaseException as error:
            faults.append(error)

    def merge() -> None:
        try:
            while not done.is_set():
                compact(home, 2)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for work in (ask, ask, merge)]
    for thread in threads:
        thread.start()
    for i in range(60):
        add(home, f"k{i:02}", float(i))
    done.set()
    for thread in threads:
        thread.join()
    assert faults == []
    assert values(home) == [(f"k{i:02}", float(i)) for i in range(60)]


@pytest.mark.parametrize("compacted", [False, True], ids=["its own file", "compacted"])
def test_files_written_before_a_column_was_added_stay_readable(home: Path, monkeypatch: Any, compacted: bool) -> None:
    for i in range(2):
        add(home, f"old{i}", float(i))
    if compacted:
        compact(home, 2)

    @dataclasses.dataclass(frozen=True)
    class Longer(QualityFlag):
        depth_k: int | None = None

    from storage.history import records, schema

    assert records.MEASURED["quality_flag"] is QualityFlag
    monkeypatch.setitem(records.MEASURED, "quality_flag", Longer)
    schema.defaults_of.cache_clear()
    write_table(home, "quality_flag", "new", [flag(2.0) | {"artifact_key": "new", "depth_k": 3}], "new")
    write_table(home, "quality_flag", "rebuilt", [flag(3.0) | {"artifact_key": "rebuilt"}], "a row of an older version")
    expected = [("new", 3), ("old0", None), ("old1", None), ("rebuilt", None)]
    sql = "SELECT artifact_key, depth_k FROM quality_flag ORDER BY 1"
    assert query(sql, home)[1] == expected
    assert query("SELECT typeof(depth_k) FROM quality_flag LIMIT 1", home)[1] == [("BIGINT",)]
    assert compact(home, 2) and query(sql, home)[1] == expected
    schema.defaults_of.cache_clear()


def test_the_threshold_of_a_run_is_the_one_documented() -> None:
    assert compaction.COMPACT_AT <= 500, "ten thousand small files take seconds to scan, a few hundred tenths of one"


def test_a_key_is_looked_up_again_when_a_compaction_has_swapped_the_keys_meanwhile(
    home: Path, monkeypatch: Any
) -> None:
    for i in range(3):
        add(home, f"k{i}", float(i))
    compact(home, 2)
    real = segments.segment_keys
    swaps: list[str] = []

    def after_another_compaction(directory: Path, manifest: segments.Manifest) -> set[str]:
        if not swaps:
            swaps.append(manifest.keys)
            add(home, "k3", 3.0)
            add(home, "k4", 4.0)
            monkeypatch.setattr(segments, "segment_keys", real)
            compact(home, 2)
        return real(directory, manifest)

    monkeypatch.setattr(segments, "segment_keys", after_another_compaction)
    assert segments.is_known(history_dir(home) / "quality_flag", "k1")
    assert swaps and not (history_dir(home) / "quality_flag" / swaps[0]).exists()


def test_a_manifest_of_another_version_costs_one_line_that_names_the_mend(home: Path) -> None:
    add(home, "k", 1.0)
    manifest = history_dir(home) / "quality_flag" / "_manifest.json"
    manifest.write_text('{"segments": [{"file": "_segment-1.parquet", "before": 1.5, "covers": ["k"]}]}')
    with pytest.raises(UserError, match=r"another version .*`draftsmith doctor --repair`") as refused:
        values(home)
    assert "\n" not in str(refused.value)
    rebuild(home, Store(home))
    assert values(home) == []


def test_a_rebuild_leaves_the_locks_that_others_wait_on(home: Path) -> None:
    add(home, "k", 1.0)
    with segments.reading(history_dir(home)):
        compact(home, 0, whole=True)
    locks = {path: path.stat().st_ino for path in history_dir(home).rglob("*.lock")}
    assert len(locks) > 2
    rebuild(home, Store(home))
    assert {path: path.stat().st_ino for path in locks} == locks and values(home) == []
