"""The history under its benchmark, at a small size: readers in other processes see every row once, and no error."""

from __future__ import annotations

from pathlib import Path

from benchmarks.history import measure


def test_readers_see_no_error_and_no_row_twice_while_runs_are_appended_and_compacted(tmp_path: Path) -> None:
    numbers, fine = measure(tmp_path, runs=12, readers=2, appends=11)
    assert fine and numbers["no_row_lost_or_doubled"]
    crowd = numbers["crowd"]
    assert crowd["errors"] == 0 and crowd["rows_as_expected"] and crowd["questions"] >= 2 * crowd["readers"]
    assert numbers["rows"]["run"] == 12 and crowd["appends"] == 11
