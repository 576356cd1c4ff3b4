"""A step's key follows the content of its sources."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from collected_chats import rows, write_lines

from components.data.sources.fingerprints import (
    collect_chats_fingerprint,
    collect_prompts_fingerprint,
    collect_workloads_fingerprint,
)


def questions(number: int) -> list[dict[str, str]]:
    return [{"question": f"What is {index} plus {index}?", "answer": str(2 * index)} for index in range(number)]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", questions(3))
    before = collect_prompts_fingerprint({"source": str(file)})
    file.touch()
    assert collect_prompts_fingerprint({"source": str(file)}) == before
    write_lines(file, questions(4))
    assert collect_prompts_fingerprint({"source": str(file)}) != before


def test_the_fingerprint_follows_content_and_what_cannot_be_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", rows(2))
    settings = {"sources": [{"path": str(tmp_path / "in"), "name": "n"}]}
    before = collect_chats_fingerprint(settings)
    (tmp_path / "in" / "a.jsonl").touch()
    assert collect_chats_fingerprint(settings) == before
    write_lines(tmp_path / "in" / "a.jsonl", rows(3))
    changed = collect_chats_fingerprint(settings)
    assert changed != before
    os.mkfifo(tmp_path / "in" / "b.jsonl")
    assert collect_chats_fingerprint(settings) == {**changed, "n: b.jsonl": "not_a_file"}
    assert collect_chats_fingerprint({"sources": ["eaglechat", "s3://bucket/chats/x.jsonl"]}) == {}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with two configurations: `main` in Parquet with one bad row of 61, `other` in JSONL."""
    import pyarrow
    import pyarrow.parquet

    folder = tmp_path / "sums"
    write_lines(folder / "other" / "rows.jsonl", [{"prompt": f"case {index}"} for index in range(60)])
    (folder / "main").mkdir()
    rows: list[Any] = [*questions(30), {"question": None, "answer": "1"}, *questions(60)[30:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  default: true\n  data_files: main/train.parquet\n"
        "- config_name: other\n  data_files: other/rows.jsonl\n---\n"
    )
    return folder


def test_a_local_data_set_counts_by_content_and_a_hub_id_by_name(repository: Path) -> None:
    source = {"source": f"hf:{repository}:train"}
    before = collect_prompts_fingerprint(source)
    assert len(before) == 3
    write_lines(repository / "other" / "rows.jsonl", questions(1))
    assert collect_prompts_fingerprint(source) != before
    assert collect_prompts_fingerprint({"source": "hf:owner/name@v1:train"}) == {}


def test_the_key_follows_the_files(copies: dict[str, str]) -> None:
    settings = {"sources": ["mt-bench", {"preset": "ceval", "path": copies["ceval"]}]}
    before = collect_workloads_fingerprint(settings)
    assert len(before) == 2 and all(name.endswith("_val.csv") for name in before)
    file = Path(copies["ceval"]) / "physician_val.csv"
    file.write_text(file.read_text("utf-8") + "9,新,1,2,3,4,A\n", "utf-8")
    assert collect_workloads_fingerprint(settings) != before
    assert collect_workloads_fingerprint({"sources": ["gsm8k"]}) == {}
