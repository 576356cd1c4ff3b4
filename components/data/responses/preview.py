"""Writes a sample of conversations in which the masked text is coloured, so that a person can check the mask.

`sample.json` holds the rows (components/chat_sample.py); `sample.html` shows the same on one page that fetches nothing.
The text is not trusted: everything is escaped, and marks that change the reading direction are made visible.
"""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from components.chat_sample import Piece, SampleRow, cut_in_middle, write_sample_rows
from components.data.formats.responses import AnswerRow, Conversation, read_shard
from components.data.responses.assistant_mask import MaskedChat, roles_in
from components.text import visible

MAX_ROWS: Final = 12
MAX_CHARACTERS: Final = 3000
"""The most of one row that is shown; longer rows are cut in the middle."""

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>What is trained on</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid #bbb; border-radius: 6px; padding: .8rem; }}
mark {{ background: #ffd54d; color: #111; }}
.system {{ color: #7b3fa0; }} .user {{ color: #1f5fbf; }} .tool {{ color: #8a5a00; }} .template {{ color: #888; }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #16181c; color: #ddd; }}
  .system {{ color: #c79be6; }} .user {{ color: #7fb2ff; }} .tool {{ color: #e0b060; }}
}}
</style></head><body>
<h1>What is trained on</h1>
<p>{about} Text on <mark>yellow</mark> is an answer: the drafter learns to guess it. The rest is only read:
<span class="system">system</span>, <span class="user">user</span>, <span class="tool">tool</span>,
<span class="template">the chat template</span>.</p>
{rows}
</body></html>
"""


def sample_row(row: AnswerRow, pieces: Sequence[Piece]) -> SampleRow:
    """One row of `sample.json`."""
    return {
        "row_id": row.row_id,
        "split": row.split,
        "workload": row.workload,
        "language": row.language,
        "domain": row.domain,
        "answered_by": row.answered_by,
        "pieces": list(pieces),
    }


def pieces_of_ids(tokenizer: Any, conversation: Conversation) -> list[Piece]:
    """Prompt and answer of a row, decoded from its tokens."""
    pieces: list[Piece] = []
    pairs = zip(conversation.ids.tolist(), conversation.mask.tolist(), strict=True)
    for masked, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(
            {"role": "assistant" if masked else "prompt", "masked": masked, "text": cut_in_middle(text, MAX_CHARACTERS)}
        )
    return pieces


def pieces_of_chat(chat: MaskedChat) -> list[Piece]:
    """A masked chat cut where the role or the mask changes."""
    text = chat.row.text
    role_at = ["template"] * len(text)
    for slot in roles_in(chat.row):
        role_at[slot.start : slot.stop] = [chat.row.messages[slot.turn]["role"]] * (slot.stop - slot.start)
    masked_at = [False] * len(text)
    for (start, stop), masked in zip(chat.row.rendering.encode(text)[1], chat.mask, strict=True):
        masked_at[start:stop] = [masked] * (stop - start)
    pieces: list[Piece] = []
    for (role, masked), run in itertools.groupby(range(len(text)), key=lambda at: (role_at[at], masked_at[at])):
        indices = list(run)
        pieces.append(
            {"role": role, "masked": masked, "text": cut_in_middle(text[indices[0] : indices[-1] + 1], MAX_CHARACTERS)}
        )
    return pieces


def sample_of_shards(folder: Path, shards: Sequence[str], tokenizer: Any, about: str) -> None:
    """Write a sample of tokenised answers, with rows spread evenly over the shards."""
    rows = []
    for name in shards[:: max(1, -(-len(shards) // MAX_ROWS))]:
        conversations = read_shard(folder / name)
        step = max(1, len(conversations) * len(shards) // MAX_ROWS)
        rows += [sample_row(one.row, pieces_of_ids(tokenizer, one)) for one in conversations[::step]]
    write_sample(folder, rows, about)


def write_sample(folder: Path, rows: Sequence[SampleRow], about: str) -> None:
    """Write `sample.json` and `sample.html` with at most MAX_ROWS of these rows, spread evenly."""
    step = max(1, -(-len(rows) // MAX_ROWS))
    sample = list(rows[::step])
    write_sample_rows(folder, sample)
    page = _PAGE.format(about=html.escape(about), rows="\n".join(_row_html(row) for row in sample))
    (folder / "sample.html").write_text(page, encoding="utf-8")


def _row_html(row: SampleRow) -> str:
    facts = (row["row_id"], row["workload"], row["split"], row["language"], row["domain"])
    title = html.escape(visible(" · ".join(fact for fact in facts if fact)))
    return f"<h2>{title}</h2>\n<pre>{''.join(_piece_html(piece) for piece in row['pieces'])}</pre>"


def _piece_html(piece: Piece) -> str:
    text = html.escape(visible(piece["text"]))
    role = html.escape(piece["role"])
    return f'<mark title="{role}">{text}</mark>' if piece["masked"] else f'<span class="{role}">{text}</span>'
