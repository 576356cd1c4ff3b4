"""Tiny copies of the files of every benchmark, in the shape in which they are handed out."""

from __future__ import annotations

import gzip
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from components.contract import Context, Prompts
from components.data import collect_workloads
from components.data.settings import WorkloadSource
from components.data.sources.presets import WORKLOAD_PRESETS


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


def table(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file)
    return file


SPEED_BENCH: tuple[str, ...] = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
)


def speed_bench(number: int, category: str) -> dict[str, Any]:
    turns = [f"ask {category} {number}", f"and then {number}"][: 1 + number % 2]
    return {
        "question_id": f"{category}-{number}",
        "category": category,
        "sub_category": "",
        "turns": turns,
        "source": "made here",
        "src_id": str(number),
        "difficulty": "",
        "multiturn": len(turns) > 1,
    }


def withheld(number: int, category: str) -> dict[str, Any]:
    """A row of SPEED-Bench whose text its publisher does not hand out."""
    words = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    return {**speed_bench(number, category), "turns": [f"{words}\n\nSummarise {{article}}"], "multiturn": False}


def mbpp(number: int) -> dict[str, Any]:
    return {
        "task_id": number,
        "text": f"Write a function that adds {number}.",
        "code": f"def add(x):\r\n    return x + {number}",
        "test_list": [f"assert add(0) == {number}", f"assert add(1) == {number + 1}"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }


def contest_problem(number: int) -> dict[str, Any]:
    return {
        "question_title": f"Sum {number}",
        "question_content": f"Print the sum and {number}.",
        "platform": "leetcode" if number % 2 else "atcoder",
        "question_id": str(number),
        "contest_id": "c",
        "contest_date": "2025-01-04T00:00:00",
        "starter_code": "class Solution:\n    def add(self): ..." if number % 2 else "",
        "difficulty": "easy",
        "public_test_cases": "[]",
        "private_test_cases": "eJw=",
        "metadata": "{}",
    }


def function_call(number: int) -> dict[str, Any]:
    properties = {
        "base": {"type": "float", "description": "metres"},
        "at": {"type": "tuple", "items": {"type": "float"}},
        "type": {"type": "any", "description": "of triangle"},
        "unit": {"type": "string", "default": "m"},
    }
    parameters = {"type": "dict", "properties": properties, "required": ["base"]}
    function = {"name": "area", "description": "The area.", "parameters": parameters}
    system = [{"role": "system", "content": "Be brief."}] if number % 2 else []
    messages = [*system, {"role": "user", "content": f"The area of triangle {number}?"}]
    return {"id": f"simple_{number}", "question": [messages], "function": [function]}


def long_context(number: int, length: str) -> dict[str, str]:
    choices = {f"choice_{letter}": f"{letter.lower()}{number}" for letter in "ABCD"}
    row = {"_id": f"{length}{number}", "domain": "Code", "sub_domain": "", "difficulty": "easy", "length": length}
    return {
        **row,
        "question": f"Which {length} {number}?",
        **choices,
        "answer": "B",
        "context": f"{length} text {number}",
    }


def published_rows(name: str) -> list[dict[str, Any]]:
    """Four or more rows of a benchmark that is handed out as rows with fields, in its published schema."""
    categories = ["writing", "coding", "math", "translation", "summarization", "qa", "math_reasoning", "rag"]
    numbers = range(4)
    match name:
        case "mt-bench":
            return [in_turns(n, categories[n % 3]) for n in range(12)]
        case "spec-bench":
            return [in_turns(n, c) for c in categories for n in numbers]
        case "speed-bench":
            return [speed_bench(n, c) for c in SPEED_BENCH for n in numbers]
        case "gsm8k":
            return [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(5)]
        case "math-500":
            return [{"problem": f"Let $x_{{{n}}}$", "solution": "so", "answer": "1", "level": 3} for n in range(5)]
        case "aime-2025":
            return [{"question": f"Find the sum of ${n}$.", "answer": f"{n}"} for n in numbers]
        case "humaneval":
            rows = [{"prompt": f"def f{n}():\n", "canonical_solution": "    return 1\n"} for n in range(5)]
            return [{"task_id": f"HumanEval/{n}", **row} for n, row in enumerate(rows)]
        case "mbpp":
            return [mbpp(n) for n in numbers]
        case "livecodebench":
            return [contest_problem(n) for n in numbers]
        case "alpaca":
            inputs = ["", "apples, pears", "", "stones"]
            return [
                {"instruction": f"Sort {n}", "input": i, "output": "so", "text": "all"} for n, i in enumerate(inputs)
            ]
        case "arena-hard":
            row = {"category": "arena-hard-v0.1", "cluster": "ABC"}
            return [{"question_id": f"q{n}", **row, "turns": [{"content": f"Explain {n}"}]} for n in numbers]
        case "bfcl":
            return [function_call(n) for n in numbers]
        case "longbench-v2":
            return [long_context(n, length) for length in ("short", "medium", "long") for n in numbers]
        case "ceval":
            return [
                {"id": n, "question": f"第{n}题", "A": "甲", "B": "乙", "C": "丙", "D": "丁", "answer": "C"}
                for n in numbers
            ]
        case "cmmlu":
            return [choice(n) for n in numbers]
    assert name.startswith("speed-bench-"), name
    return [speed_bench(n, c) for c in ("low_entropy", "mixed", "high_entropy") for n in numbers]


_FILES = {
    "speed-bench": "speed/qualitative/test.parquet",
    "gsm8k": "gsm.jsonl",
    "humaneval": "code.jsonl.gz",
    "mbpp": "mbpp/test-00000-of-00001.parquet",
    "alpaca": "train-00000-of-00001-a09b74b3ef9c3b56.parquet",
    "arena-hard": "arena/train-00000-of-00001.parquet",
    "bfcl": "BFCL_v3_simple.json",
    "longbench-v2": "data.json",
}
"""The names of the files as they are handed out, where they matter; the others are JSONL."""


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """Rows of a benchmark in a file of the kind in which it is handed out (for C-Eval and CMMLU: as JSONL)."""
    prepared = f"speed/{WORKLOAD_PRESETS[name].configs[0]}/test.parquet" if name.startswith("speed-bench-") else ""
    file = folder / (prepared or _FILES.get(name, f"{name}.jsonl"))
    if file.suffix == ".parquet":
        return table(file, rows)
    if name == "longbench-v2":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows), encoding="utf-8")
        return file
    return lines(file, rows)


def write_copies(folder: Path) -> dict[str, str]:
    """A tiny copy of every preset's files, in the shape in which they are handed out."""
    made = {name: write_rows(folder, name, published_rows(name)) for name in WORKLOAD_PRESETS}
    made["ceval"] = folder / "ceval"
    made["cmmlu"] = zipped(
        folder / "cmmlu_v1_0_1.zip",
        {
            "test/agronomy.csv": [choice(n) for n in range(4)],
            "test/elementary_mathematics.csv": [choice(n) for n in range(10, 14)],
            "dev/agronomy.csv": [choice(n) for n in range(90, 94)],
        },
    )
    made["ceval"].mkdir()
    for subject in ("physician", "advanced_mathematics"):
        rows = [["id", "question", "A", "B", "C", "D", "answer"]]
        rows += [[str(n), f"{subject}：第{n}题", "甲", "乙", "丙", "丁", "C"] for n in range(4)]
        text = "\n".join(",".join(row) for row in rows) + "\n"
        (made["ceval"] / f"{subject}_val.csv").write_text(text, encoding="utf-8-sig")
    return {name: str(path) for name, path in made.items()}


def collected(folder: Path, source: dict[str, Any], **settings: Any) -> Prompts:
    return collect_workloads(sources=[WorkloadSource.model_validate(source)], ctx=context(folder), **settings)
