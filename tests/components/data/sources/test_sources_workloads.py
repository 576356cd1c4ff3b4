"""The tables behind a source of benchmark prompts: CSV, zips of CSV and what cannot be read of them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from workload_files import collected, zipped

from components.contract import UserError
from components.data.settings import WorkloadSource
from components.data.sources.workloads import local_files


def test_a_damaged_zip_is_one_line(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} in words?", "answer": f"{n}"} for n in range(200)]
    whole = zipped(tmp_path / "a.zip", {"a.csv": rows}).read_bytes()
    said: Counter[str] = Counter()
    for at in range(0, len(whole), 29):
        (tmp_path / "a.zip").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        source = {"path": str(tmp_path / "a.zip"), "workload": "w", "language": "en"}
        try:
            made = collected(tmp_path / f"out{at}", source, num_prompts=1000)
        except UserError as error:
            assert "a.zip" in str(error) and "\n" not in str(error)
            said["refused"] += 1
        else:
            said[f"{made.info['num_test'] + made.info['num_warm_up']} rows"] += 1
    assert said["refused"] > 10 and set(said) <= {"refused", "200 rows"}


def test_a_table_in_a_folder_that_leads_out_of_it_or_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.csv").write_text("prompt\nWhat is not for everybody?\n")
    (tmp_path / "in" / "a.csv").symlink_to(tmp_path / "out.csv")
    source = WorkloadSource(path=str(tmp_path / "in"), workload="w", language="en")
    with pytest.raises(UserError, match="a link that leads out"):
        local_files(source)
    with pytest.raises(UserError, match="a link that leads out"):
        local_files(source.model_copy(update={"path": str(tmp_path / "in" / "*.csv")}))
    (tmp_path / "in" / "a.csv").unlink()
    (tmp_path / "in" / "a.csv").touch()
    with pytest.raises(UserError, match="the file is empty"):
        local_files(source)


def test_a_folder_is_no_table_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    table = tmp_path / "table.csv"
    table.write_text("question\nWhy?\n")
    source = {"path": str(tmp_path / "*.csv"), "workload": "chat", "language": "en"}
    assert local_files(WorkloadSource.model_validate(source)) == [table]
