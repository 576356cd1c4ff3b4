"""A step's key follows the content of its sources."""

from __future__ import annotations

import gzip
import json
import os
import zipfile
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


def lines(file: Path, rows: list[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    file.write_bytes(gzip.compress(text.encode()) if file.name.endswith(".gz") else text.encode())
    return file


def in_turns(number: int, category: str) -> dict[str, Any]:
    return {"question_id": number, "category": category, "turns": [f"ask {category} {number}", f"and then {number}"]}


def choice(number: int) -> dict[str, str]:
    return {"Question": f"第{number}题是什么？", "A": "甲", "B": "乙", "C": "丙", "D": "丁", "Answer": "B"}


def zipped(file: Path, members: dict[str, list[dict[str, str]]]) -> Path:
    with zipfile.ZipFile(file, "w") as archive:
        for name, rows in members.items():
            cells = [["", *rows[0]], *([str(at), *row.values()] for at, row in enumerate(rows))]
            archive.writestr(name, "\n".join(",".join(row) for row in cells) + "\n")
    return file


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, str]:
    """A tiny copy of every preset's files, in the shape in which they are handed out."""
    categories = ["writing", "coding", "math", "translation", "summarization", "qa", "math_reasoning", "rag"]
    made = {
        "mt-bench": lines(tmp_path / "mt.jsonl", [in_turns(n, categories[n % 3]) for n in range(12)]),
        "spec-bench": lines(tmp_path / "spec.jsonl", [in_turns(n, c) for c in categories for n in range(4)]),
        "gsm8k": lines(
            tmp_path / "gsm.jsonl", [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
        ),
        "math-500": lines(
            tmp_path / "math.jsonl",
            [{"problem": f"Let $x_{{{n}}}$", "solution": "so", "answer": "1", "level": 3} for n in range(5)],
        ),
        "humaneval": lines(
            tmp_path / "code.jsonl.gz",
            [
                {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "canonical_solution": "    return 1\n"}
                for n in range(5)
            ],
        ),
        "ceval": tmp_path / "ceval",
        "cmmlu": zipped(
            tmp_path / "cmmlu_v1_0_1.zip",
            {
                "test/agronomy.csv": [choice(n) for n in range(4)],
                "test/elementary_mathematics.csv": [choice(n) for n in range(10, 14)],
                "dev/agronomy.csv": [choice(n) for n in range(90, 94)],
            },
        ),
    }
    made["ceval"].mkdir()
    for subject in ("physician", "advanced_mathematics"):
        rows = [["id", "question", "A", "B", "C", "D", "answer"]]
        rows += [[str(n), f"{subject}：第{n}题", "甲", "乙", "丙", "丁", "C"] for n in range(4)]
        text = "\n".join(",".join(row) for row in rows) + "\n"
        (made["ceval"] / f"{subject}_val.csv").write_text(text, encoding="utf-8-sig")
    return {name: str(path) for name, path in made.items()}


def test_the_key_follows_the_files(copies: dict[str, str]) -> None:
    settings = {"sources": ["mt-bench", {"preset": "ceval", "path": copies["ceval"]}]}
    before = collect_workloads_fingerprint(settings)
    assert len(before) == 2 and all(name.endswith("_val.csv") for name in before)
    file = Path(copies["ceval"]) / "physician_val.csv"
    file.write_text(file.read_text("utf-8") + "9,新,1,2,3,4,A\n", "utf-8")
    assert collect_workloads_fingerprint(settings) != before
    assert collect_workloads_fingerprint({"sources": ["gsm8k"]}) == {}
