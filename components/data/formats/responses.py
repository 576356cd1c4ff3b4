"""File format of Conversations artifacts: answers to train on, written by the target, a server or a source.

`manifest.json` lists the shards. `shard-00000.safetensors` holds N tokens of R conversations, one after the other:
  ids [N] int32, mask [N] bool (x_t is an answer token), offsets [R + 1] int64;
its metadata holds the facts of each row under "rows", so a shard can be read without any other file. The artifact's
info summarises all rows: counts, looping rates, languages and domains.

A sample shows what is masked in, so that people can check it: `sample.json` holds its rows (components/chat_sample.py)
and `sample.html` the same on one page that fetches nothing. The text is not trusted: everything is escaped, and marks
that change the reading direction are made visible.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.chat_sample import Piece, SampleRow, cut_in_middle, write_sample_rows
from components.contract import Context, Conversations, UserError
from components.files import written_whole
from components.outside_json import JsonObject
from components.text import visible

ANSWERED_SPLITS = ("train", "validation")


@dataclass(frozen=True)
class AnswerRow:
    """One conversation without its tokens."""

    row_id: str  # the prompt's id; "-0", "-1", ... follow where a chat became several rows
    split: str  # train | validation
    workload: str
    temperature: float | None  # 0 is greedy; None: a source's answer
    num_prompt_tokens: int  # tokens that are no answer's
    num_answer_tokens: int
    ended: bool  # by an end-of-text token, not by the limit
    distinct_bigrams: float  # different neighbouring pairs over all pairs of the answer; near 0 is a loop
    language: str = ""  # of the answer (en, zh), where known
    domain: str = ""  # what it is about, where known
    answered_by: str = "target"  # target | server | source
    place: int | None = None  # in a declared order of training, 0 first; None where none was declared


class Conversation(NamedTuple):
    """One conversation with its tokens. T = prompt + answer."""

    row: AnswerRow
    ids: Tensor  # [T] int64
    mask: Tensor  # [T] bool: x_t is an answer token


def shard_name(number: int) -> str:
    """The file name of a shard; the same in Conversations and in Features."""
    return f"shard-{number:05d}.safetensors"


def write_shard(file: Path, conversations: Sequence[Conversation], notes: JsonObject | None = None) -> None:
    """Write a shard atomically. notes: JSON facts to store in its metadata; see `read_notes`."""
    lengths = [len(conversation.ids) for conversation in conversations]
    none = torch.zeros(0)  # a shard may turn out empty
    tensors = {
        "ids": torch.cat([none.int(), *(conversation.ids.int() for conversation in conversations)]),
        "mask": torch.cat([none.bool(), *(conversation.mask for conversation in conversations)]),
        "offsets": torch.tensor([0, *lengths]).cumsum(0),
    }
    metadata = {"rows": json.dumps([dataclasses.asdict(conversation.row) for conversation in conversations])}
    if notes is not None:
        metadata["notes"] = json.dumps(notes)
    with written_whole(file) as beside:
        save_file(tensors, beside, metadata=metadata)


def read_notes(file: Path) -> JsonObject:
    """The notes of a shard; {} where it has none."""
    with safe_open(file, framework="pt") as shard:
        notes: JsonObject = json.loads(shard.metadata().get("notes", "{}"))
    return notes


def read_shard(file: Path) -> list[Conversation]:
    """The conversations of one shard."""
    with safe_open(file, framework="pt") as shard:
        rows = [AnswerRow(**row) for row in json.loads(shard.metadata()["rows"])]
        ids, mask = shard.get_tensor("ids").long(), shard.get_tensor("mask")
        offsets = shard.get_tensor("offsets").tolist()
    return [
        Conversation(row, ids[start:stop], mask[start:stop])
        for row, start, stop in zip(rows, offsets[:-1], offsets[1:], strict=True)
    ]


class AnswerSet:
    """The conversations of a Conversations artifact; one shard is in memory at a time."""

    def __init__(self, path: Path, shards: Sequence[str]) -> None:
        self.path = path
        self.shards = list(shards)

    def conversations(self, split: str | None = None) -> Iterator[Conversation]:
        """Every conversation (of one split) in the stored order."""
        for name in self.shards:
            for conversation in read_shard(self.path / name):
                if split is None or conversation.row.split == split:
                    yield conversation


def open_answers(answers: Conversations) -> AnswerSet:
    """Read a Conversations artifact; raises UserError when the directory is not one."""
    file = answers.path / "manifest.json"
    if not file.is_file():
        raise UserError(
            f"{answers.path}: no manifest.json: not a Conversations artifact; make one with data.write_answers"
        )
    return AnswerSet(answers.path, json.loads(file.read_text(encoding="utf-8"))["shards"])


def distinct_bigram_ratio(ids: Sequence[int]) -> float:
    """Different neighbouring token pairs over all pairs; 1.0 for fewer than two tokens."""
    pairs = list(itertools.pairwise(ids))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def write_manifest(ctx: Context, target_key: str, shards: Sequence[str], shard_size: int) -> None:
    """Write the list of the shards; with it the artifact is complete."""
    manifest = {"target_key": target_key, "shards": list(shards), "shard_size": shard_size}
    (ctx.out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def summarise(ctx: Context, shards: Sequence[str]) -> JsonObject:
    """Counts and looping rates over all rows; many identical answers or low bigram ratios mean little variety."""
    rows: list[AnswerRow] = []
    answers: set[bytes] = set()
    for name in shards:
        for row, ids, mask in read_shard(ctx.out / name):
            rows.append(row)
            answers.add(hashlib.sha256(ids[mask].numpy().tobytes()).digest()[:16])
    greedy = [row for row in rows if row.temperature == 0.0]
    sampled = [row for row in rows if row.temperature]
    return {
        "num_rows": {split: sum(row.split == split for row in rows) for split in ANSWERED_SPLITS},
        "num_tokens": sum(row.num_prompt_tokens + row.num_answer_tokens for row in rows),
        "num_answer_tokens": sum(row.num_answer_tokens for row in rows),
        "num_sampled": len(sampled),
        "num_ended": sum(row.ended for row in rows),
        "num_duplicate_answers": len(rows) - len(answers),
        "distinct_bigrams_greedy": _mean(greedy),
        "distinct_bigrams_sampled": _mean(sampled),
        "num_looping": sum(row.distinct_bigrams < 0.3 for row in rows),
        "languages": _tokens_by([(row.language, row.num_answer_tokens) for row in rows]),
        "domains": _tokens_by([(row.domain, row.num_answer_tokens) for row in rows]),
    }


def _tokens_by(pairs: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Answer tokens of each name that is not empty, largest first."""
    counted: Counter[str] = Counter()
    for name, tokens in pairs:
        if name:
            counted[name] += tokens
    return dict(sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def _mean(rows: Sequence[AnswerRow]) -> float | None:
    return round(sum(row.distinct_bigrams for row in rows) / len(rows), 4) if rows else None


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
