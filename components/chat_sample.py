"""The sample of conversations beside a Conversations artifact: what a person looks at to check the mask.

`sample.json` holds {"rows": [...]}. The step that makes the answers writes it (components/data/formats/responses.py),
and reports show a few of its rows. Its text comes from models and strangers, so whoever shows it escapes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypedDict

SAMPLE: Final = "sample.json"


class Piece(TypedDict):
    """A run of text of one role; masked: it is an answer, which the drafter learns to predict."""

    role: str
    masked: bool
    text: str


class SampleRow(TypedDict):
    """One conversation. answered_by: target, server or source."""

    row_id: str
    split: str
    workload: str
    language: str
    domain: str
    answered_by: str
    pieces: list[Piece]


def write_sample_rows(folder: Path, rows: Sequence[SampleRow]) -> None:
    """Write `sample.json`."""
    (folder / SAMPLE).write_text(json.dumps({"rows": list(rows)}) + "\n", encoding="utf-8")


def read_sample_rows(folder: Path) -> list[SampleRow]:
    """The rows of `sample.json`; none where the artifact has no sample."""
    file = folder / SAMPLE
    rows: list[SampleRow] = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    return rows


def cut_in_middle(text: str, most: int) -> str:
    """The text, of which the middle is left out where it has more than `most` characters."""
    half = most // 2
    return text if len(text) <= most else f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
