"""Rows for steps that make or take chats, and `collect_chats` under the invariant that every row is accounted for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from components.contract import Chats, Context
from components.data import collect_chats
from components.data.formats.chats import read_chats, read_dropped, read_manifest
from components.data.settings import ChatSource, Cleaning

SUBJECTS = ("rivers", "bridges", "ovens", "clocks", "kites", "seeds", "stones", "wheels", "lamps", "shoes")


GOOD = '{"prompt": "What do people grow in the gardens?", "response": "They grow peas."}\n'
"""A line of JSON Lines that every rule keeps."""
LENIENT = Cleaning(
    role_order=False, min_question_characters=0, min_answer_characters=0, min_text_characters=0, mojibake=False,
    control_characters=False, replacement_characters=False, max_repeated_share=1.0,
)  # fmt: skip
"""Rules that keep almost any row."""


def rows(number: int, start: int = 0) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"Explain in few words how the {index} {SUBJECTS[index % 10]} of our town are looked after.",
            "response": f"The {SUBJECTS[index % 10]} are looked after by {index + 2} people who meet every morning.",
        }
        for index in range(start, start + number)
    ]


def write_lines(file: Path, content: Sequence[Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
    return file


def context(folder: Path, notes: list[str] | None = None) -> Context:
    (folder / "scratch").mkdir(parents=True, exist_ok=True)
    (folder / "out").mkdir(exist_ok=True)

    def send(event: Any) -> None:
        if notes is not None and event["event"] == "note":
            notes.append(event["message"])

    return Context(key="k", out=folder / "out", scratch=folder / "scratch", send=send)


def collect(folder: Path, *sources: str | ChatSource | dict[str, Any], **settings: Any) -> Chats:
    given = [ChatSource.model_validate(one) for one in sources]
    made = collect_chats(sources=given, ctx=context(folder, settings.pop("notes", None)), **settings)
    counted = made.info
    assert counted["num_rows"] + counted["num_dropped"] == counted["num_read"]
    assert sum(counted["dropped"].values()) == counted["num_dropped"] == len(list(read_dropped(made.path)))
    assert len(list(read_chats(made))) == counted["num_rows"] == read_manifest(made)["num_rows"]
    return made


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def write_repository(folder: Path, questions: Sequence[Mapping[str, Any]]) -> Path:
    """A repository of two configurations: `main`, the questions in Parquet around one bad row; `other`, in JSONL."""
    write_lines(folder / "other" / "rows.jsonl", [{"prompt": f"case {index}"} for index in range(60)])
    (folder / "main").mkdir()
    middle = len(questions) // 2
    rows: list[Any] = [*questions[:middle], {"question": None, "answer": "1"}, *questions[middle:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  default: true\n  data_files: main/train.parquet\n"
        "- config_name: other\n  data_files: other/rows.jsonl\n---\n"
    )
    return folder
