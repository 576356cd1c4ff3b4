"""Small sets of unified rows and benchmark prompts, and the step run over them, for the tests of deduplication."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import parquet

from components.contract import Chats, Context, Mapper, Prompts
from components.data import deduplicate
from components.data.formats.chats import Chat, ChatWriter, read_chats


def chat(question: str, answer: str, source: str = "web", where: str = "") -> Chat:
    """A conversation of one exchange."""
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    name = where or f"f:{hashlib.sha256((question + answer).encode()).hexdigest()[:8]}"
    return Chat.of(source=source, where=name, messages=turns)


def document(text: str, source: str = "web") -> Chat:
    """A plain text."""
    return Chat.of(source=source, where=f"d:{hashlib.sha256(text.encode()).hexdigest()[:8]}", text=text)


def written(folder: Path, rows: Sequence[Chat], rows_per_part: int = 1000) -> Chats:
    """The rows as an artifact."""
    with ChatWriter(folder, rows_per_part=rows_per_part) as writer:
        for row in rows:
            writer.write(row)
    return Chats(key=folder.name, path=folder)


def benchmark(folder: Path, *prompts: dict[str, Any] | str) -> Prompts:
    """Prompts p0, p1, ... of a benchmark: texts, or fields of a row that differ from those of a text in split test."""
    folder.mkdir()
    lines = []
    for number, given in enumerate(prompts):
        row = {"prompt_id": f"p{number}", "split": "test", "workload": "exam", "source": "exam.jsonl"}
        row |= {"prompt": given} if isinstance(given, str) else given
        lines.append(json.dumps(row) + "\n")
    (folder / "prompts.jsonl").write_text("".join(lines))
    return Prompts(key=folder.name, path=folder)


@dataclass(frozen=True)
class Result:
    """What the step made: the rows that stayed, the rows of dropped.parquet, the artifact."""

    kept: list[Chat]
    dropped: list[dict[str, Any]]
    made: Chats

    @property
    def places(self) -> set[tuple[str, str]]:
        """Where the rows that stayed come from."""
        return {(row.source, row.where) for row in self.kept}


def result_of(made: Chats) -> Result:
    """Read what a run has written."""
    return Result(list(read_chats(made)), parquet.read_table(made.path / "dropped.parquet").to_pylist(), made)


def deduplicated(
    root: Path,
    chats: Sequence[Chat] | list[Chats],
    keep_out: list[Prompts] | None = None,
    *,
    mapper: Mapper | None = None,
    rows_per_part: int = 1000,
    **settings: Any,
) -> Result:
    """Run the step over rows (or artifacts) in a new folder under `root`."""
    number = len(list(root.glob("out-*")))
    given = [one for one in chats if isinstance(one, Chats)]
    if not given:
        given = [written(root / f"in-{number}", [row for row in chats if isinstance(row, Chat)], rows_per_part)]
    for place in ("out", "scratch"):
        (root / f"{place}-{number}").mkdir()
    ctx = Context(f"k{number}", root / f"out-{number}", root / f"scratch-{number}", mapper=mapper)
    return result_of(deduplicate(given, keep_out, ctx=ctx, **settings))


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file of an artifact."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()}
