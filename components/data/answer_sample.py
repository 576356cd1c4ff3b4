"""A few conversations to look at, with what is trained on in colour: the mask is the one thing numbers do not show.

`sample.json` holds {"rows": [{"row_id", "split", "workload", "language", "domain", "answered_by", "pieces": [...]}]},
a piece being {"role", "masked", "text"}; `sample.html` shows the same on one page that fetches nothing. The text is of
strangers: everything is escaped, and marks that turn the direction of reading are shown as what they are.
"""

from __future__ import annotations

import html
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from components.escapes import visible

if TYPE_CHECKING:
    from components.data.answers import AnswerRow, Conversation
    from components.data.chat_masks import MaskedChat

MOST_ROWS: Final = 12
MOST_CHARACTERS: Final = 3000
"""Of one row; what is longer is cut in the middle."""

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


def sample_row(row: AnswerRow, pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One row of `sample.json`."""
    names = ("row_id", "split", "workload", "language", "domain", "answered_by")
    return {**{name: getattr(row, name) for name in names}, "pieces": list(pieces)}


def pieces_of_ids(tokenizer: Any, conversation: Conversation) -> list[dict[str, Any]]:
    """Prompt and answer of a row of which only the tokens are known."""
    pieces = []
    pairs = zip(conversation.ids.tolist(), conversation.mask.tolist(), strict=True)
    for masked, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append({"role": "assistant" if masked else "prompt", "masked": masked, "text": _cut(text)})
    return pieces


def pieces_of_chat(found: MaskedChat) -> list[dict[str, Any]]:
    """A masked chat cut where the role or the mask changes."""
    from components.data.chat_masks import roles_in

    text = found.row.text
    role_at = ["template"] * len(text)
    for slot in roles_in(found.row):
        role_at[slot.start : slot.stop] = [found.row.messages[slot.turn]["role"]] * (slot.stop - slot.start)
    masked_at = [False] * len(text)
    for (start, stop), masked in zip(found.row.rendering.encoded(text)[1], found.mask, strict=True):
        masked_at[start:stop] = [masked] * (stop - start)
    pieces = []
    for (role, masked), run in itertools.groupby(range(len(text)), key=lambda at: (role_at[at], masked_at[at])):
        places = list(run)
        pieces.append({"role": role, "masked": masked, "text": _cut(text[places[0] : places[-1] + 1])})
    return pieces


def sample_of_shards(folder: Path, shards: Sequence[str], tokenizer: Any, about: str) -> None:
    """Write the sample of answers of which the tokens are known; shards are looked at evenly, one row of each."""
    from components.data.answers import read_shard

    rows = []
    for name in shards[:: max(1, -(-len(shards) // MOST_ROWS))]:
        every = read_shard(folder / name)
        step = max(1, len(every) * len(shards) // MOST_ROWS)
        rows += [sample_row(found.row, pieces_of_ids(tokenizer, found)) for found in every[::step]]
    write_sample(folder, rows, about)


def write_sample(folder: Path, rows: Sequence[Mapping[str, Any]], about: str) -> None:
    """Write `sample.json` and `sample.html` of at most MOST_ROWS of these rows, evenly over them."""
    step = max(1, -(-len(rows) // MOST_ROWS))
    chosen = list(rows[::step])
    (folder / "sample.json").write_text(json.dumps({"rows": chosen}) + "\n", encoding="utf-8")
    page = _PAGE.format(about=html.escape(about), rows="\n".join(_shown(row) for row in chosen))
    (folder / "sample.html").write_text(page, encoding="utf-8")


def _shown(row: Mapping[str, Any]) -> str:
    facts = (row[name] for name in ("workload", "split", "language", "domain") if row[name])
    title = html.escape(visible(" · ".join((row["row_id"], *map(str, facts)))))
    return f"<h2>{title}</h2>\n<pre>{''.join(_piece(piece) for piece in row['pieces'])}</pre>"


def _piece(piece: Mapping[str, Any]) -> str:
    text = html.escape(visible(piece["text"]))
    role = html.escape(piece["role"])
    return f'<mark title="{role}">{text}</mark>' if piece["masked"] else f'<span class="{role}">{text}</span>'


def _cut(text: str) -> str:
    if len(text) <= MOST_CHARACTERS:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"
