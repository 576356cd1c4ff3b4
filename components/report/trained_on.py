"""What a drafter was trained on, as a section of a page: counts, and a few conversations with the answers in colour.

The mask is the one thing that numbers do not show. Read is `sample.json`, which every step that makes Conversations
leaves (components/data/answer_sample.py); the text is of strangers and is escaped by the template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from components.contract import Conversations
from components.escapes import one_line, visible

SHOWN_ROWS: Final = 3
SHOWN_CHARACTERS: Final = 700
"""Of one piece; what is longer is cut in the middle."""
_TOLD: Final = {
    "languages": "languages",
    "domains": "domains",
    "mask_methods": "masks agreed by",
    "set_aside": "set aside",
}
"""Fact of the artifact -> what it is called here."""


def trained_on(answers: Sequence[Conversations]) -> list[dict[str, Any]]:
    """{"told", "rows"} of each artifact that has a sample; told: facts in words; rows: {"title", "pieces"}."""
    shown = []
    for one in answers:
        file = one.path / "sample.json"
        if not file.is_file():
            continue
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        step = max(1, -(-len(rows) // SHOWN_ROWS))
        shown.append({"told": _told(one), "rows": [_row(row) for row in rows[::step]]})
    return shown


def _told(answers: Conversations) -> str:
    info = answers.info
    parts = [f"{info.get('num_answer_tokens', 0):,} answer tokens of {info.get('num_tokens', 0):,}"]
    parts += [
        f"{said}: " + ", ".join(f"{one_line(key)} {number:,}" for key, number in info[name].items())
        for name, said in _TOLD.items()
        if info.get(name)
    ]
    return "; ".join(parts) + "."


def _row(row: dict[str, Any]) -> dict[str, Any]:
    names = ("workload", "split", "language", "domain")
    return {
        "title": " · ".join(one_line(row[name]) for name in names if row[name]),
        "pieces": [{**piece, "text": visible(_short(str(piece["text"])))} for piece in row["pieces"]],
    }


def _short(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
