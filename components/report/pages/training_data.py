"""The section of a page about training data: counts, and a few conversations with the answers in colour.

It shows the training mask, which numbers cannot show. It reads `sample.json`, which every step that makes Conversations
writes (components/data/formats/responses.py). Its text is untrusted and is escaped by the template.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from components.chat_sample import SAMPLE, SampleRow, cut_in_middle, read_sample_rows
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
        if not (one.path / SAMPLE).is_file():
            continue
        rows = read_sample_rows(one.path)
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


def _sample_row(row: SampleRow) -> JsonObject:
    facts = (row["workload"], row["split"], row["language"], row["domain"])
    return {
        "title": " · ".join(one_line(fact) for fact in facts if fact),
        "pieces": [
            {**piece, "text": visible(cut_in_middle(piece["text"], SHOWN_CHARACTERS))} for piece in row["pieces"]
        ],
    }
