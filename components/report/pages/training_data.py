"""The section of a page about training data: counts, and a few conversations with the answers in colour.

It shows the training mask, which numbers cannot show. It reads `sample.json`, which every step that makes Conversations
writes (components/data/responses/preview.py). Its text is untrusted and is escaped by the template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from components.contract import Conversations
from components.outside_json import JsonObject
from components.text import one_line, visible

SHOWN_ROWS: Final = 3
SHOWN_CHARACTERS: Final = 700
"""Largest length of a piece; longer ones are cut in the middle."""
_LABELS: Final = {
    "languages": "languages",
    "domains": "domains",
    "mask_methods": "masks agreed by",
    "set_aside": "set aside",
}
"""Key of the artifact's info -> its label here."""


def trained_on(answers: Sequence[Conversations]) -> list[JsonObject]:
    """{"summary", "rows"} of each artifact that has a sample; summary: facts in words; rows: {"title", "pieces"}."""
    samples = []
    for one in answers:
        file = one.path / "sample.json"
        if not file.is_file():
            continue
        rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
        step = max(1, -(-len(rows) // SHOWN_ROWS))
        samples.append({"summary": _describe(one), "rows": [_sample_row(row) for row in rows[::step]]})
    return samples


def _describe(answers: Conversations) -> str:
    info = answers.info
    parts = [f"{info.get('num_answer_tokens', 0):,} answer tokens of {info.get('num_tokens', 0):,}"]
    parts += [
        f"{label}: " + ", ".join(f"{one_line(key)} {number:,}" for key, number in info[name].items())
        for name, label in _LABELS.items()
        if info.get(name)
    ]
    return "; ".join(parts) + "."


def _sample_row(row: JsonObject) -> JsonObject:
    names = ("workload", "split", "language", "domain")
    return {
        "title": " · ".join(one_line(row[name]) for name in names if row[name]),
        "pieces": [{**piece, "text": visible(_shorten(str(piece["text"])))} for piece in row["pieces"]],
    }


def _shorten(text: str) -> str:
    if len(text) <= SHOWN_CHARACTERS:
        return text
    half = SHOWN_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
