"""Markdown of Conversations for the Prefect UI: counts, and a few chats that show which pieces are trained on.

Markdown has no colours, so a black square in a table marks these pieces; `sample.html` beside the shards has colours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from components.contract import Conversations
from components.escapes import in_markdown
from components.report.tables import Table

SHOWN_ROWS = 3
SHOWN_PIECES = 16
PIECE_CHARACTERS = 240


def answers_card(answers: Conversations) -> str:
    """Counts and a sample; "" where the artifact has no sample."""
    file = answers.path / "sample.json"
    if not file.is_file():
        return ""
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    info = answers.info
    lines = [f"{info.get('num_answer_tokens', 0):,} answer tokens of {info.get('num_tokens', 0):,}"]
    for name in ("languages", "domains"):
        if info.get(name):
            lines.append(f"{name}: " + ", ".join(f"{in_markdown(k)} {v:,}" for k, v in info[name].items()))
    if info.get("mask_methods"):
        lines.append("masks agreed by " + ", ".join(f"{k} ({v})" for k, v in info["mask_methods"].items()))
    if info.get("set_aside"):
        lines.append("set aside: " + ", ".join(f"{v} x {in_markdown(k)}" for k, v in info["set_aside"].items()))
    parts = ["\n".join(f"- {line}" for line in lines), *(_sample_row(row) for row in rows[:SHOWN_ROWS])]
    parts.append(f"In colour, and more of them:\n\n```\n{(answers.path / 'sample.html').as_uri()}\n```")
    return "\n\n".join(parts) + "\n"


def _sample_row(row: Mapping[str, Any]) -> str:
    title = " · ".join(str(row[name]) for name in ("row_id", "workload", "split", "language") if row[name])
    lines = [
        ["■" if piece["masked"] else "", str(piece["role"]), _short_piece(str(piece["text"]))]
        for piece in row["pieces"][:SHOWN_PIECES]
    ]
    return f"**{in_markdown(title)}**\n\n{Table(['trained on', 'role', 'text'], lines).markdown()}"


def _short_piece(text: str) -> str:
    one_liner = text.replace("\n", "⏎")
    return one_liner if len(one_liner) <= PIECE_CHARACTERS else f"{one_liner[:PIECE_CHARACTERS]}..."
