"""Tiny copies of the files of every benchmark, in the shape in which they are handed out."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

from components.contract import Context, Prompts
from components.data import collect_workloads
from components.data.settings import WorkloadSource


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder, num_threads=1)


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


def write_copies(folder: Path) -> dict[str, str]:
    """A tiny copy of every preset's files, in the shape in which they are handed out."""
    categories = ["writing", "coding", "math", "translation", "summarization", "qa", "math_reasoning", "rag"]
    made = {
        "mt-bench": lines(folder / "mt.jsonl", [in_turns(n, categories[n % 3]) for n in range(12)]),
        "spec-bench": lines(folder / "spec.jsonl", [in_turns(n, c) for c in categories for n in range(4)]),
        "gsm8k": lines(folder / "gsm.jsonl", [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]),
        "math-500": lines(
            folder / "math.jsonl",
            [{"problem": f"Let $x_{{{n}}}$", "solution": "so", "answer": "1", "level": 3} for n in range(5)],
        ),
        "humaneval": lines(
            folder / "code.jsonl.gz",
            [
                {"task_id": f"HumanEval/{n}", "prompt": f"def f{n}():\n", "canonical_solution": "    return 1\n"}
                for n in range(5)
            ],
        ),
        "ceval": folder / "ceval",
        "cmmlu": zipped(
            folder / "cmmlu_v1_0_1.zip",
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


def collected(folder: Path, source: dict[str, Any], **settings: Any) -> Prompts:
    return collect_workloads(sources=[WorkloadSource.model_validate(source)], ctx=context(folder), **settings)
