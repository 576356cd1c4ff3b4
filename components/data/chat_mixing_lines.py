"""`prompts.jsonl` in any order of rows, in bounded memory: lines go into buckets by their place, each sorted by itself.

The rows are read in the order in which they are stored; a bucket holds about 64 MB of lines, and only one is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from components.contract import Chats, Context
from components.data.chat_mixing_rows import ask_of
from components.data.chat_mixing_shares import LEFT_OUT
from components.data.chat_mixing_splits import REASONS
from components.data.chats import Chat, DroppedWriter, batch_chats, iter_batches, most_first

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BUCKET_CHARACTERS: Final = 48 << 20
_MAX_BUCKETS: Final = 200
_PLACE_DIGITS: Final = 12
_PLACE: Final = ("source", "where")
_UNTOUCHED: Final = [REASONS.index(name) for name in LEFT_OUT[1:]]
"""Reasons that say nothing about the row itself: where it stands is kept, and no excerpt."""


@dataclass(frozen=True)
class Lines:
    """The lines of the file in their order. rows: [lines] rows in the order read. turns: [lines] repeats before it.

    splits: [lines] train, validation, test or warm_up. ordered_from: the line with which a declared order of training
    begins; None where none was declared.
    """

    rows: NDArray[Any]
    turns: NDArray[Any]
    splits: Sequence[str]
    ordered_from: int | None


def write_lines(
    chats: Sequence[Chats],
    lines: Lines,
    why: NDArray[Any],
    characters: int,
    workload: str,
    ctx: Context,
    told: Callable[[int], None],
) -> dict[str, int]:
    """Write `prompts.jsonl` and `dropped.parquet`; returns the rows left out by reason.

    why: [rows] an index into REASONS. characters: of all lines, about. workload: the column by which
    results are grouped.
    """
    import numpy

    number = min(_MAX_BUCKETS, max(1, -(-2 * characters // _BUCKET_CHARACTERS)))
    per_bucket = max(1, -(-len(lines.rows) // number))
    by_row = numpy.argsort(lines.rows, kind="stable")
    starts = numpy.searchsorted(lines.rows[by_row], numpy.arange(len(why) + 1))
    names = [ctx.scratch / f"bucket-{one:05d}.jsonl" for one in range(-(-len(lines.rows) // per_bucket))]
    at = 0
    with ExitStack() as stack:
        buckets = [stack.enter_context(name.open("w", encoding="utf-8", newline="\n")) for name in names]
        dropped = stack.enter_context(DroppedWriter(ctx.out))
        for batch in (batch for one in chats for batch in iter_batches(one)):
            reasons = why[at : at + batch.num_rows]
            looked_at = numpy.isin(reasons, _UNTOUCHED, invert=True)  # the others are not even parsed
            for reason, source, where in zip(
                reasons[~looked_at],
                *(batch.column(name).filter(~looked_at).to_pylist() for name in _PLACE),
                strict=True,
            ):
                dropped.write(REASONS[reason], source, where, "")
            for row, chat in zip(at + numpy.flatnonzero(looked_at), batch_chats(batch.filter(looked_at)), strict=True):
                if why[row]:
                    dropped.write(REASONS[why[row]], chat.source, chat.where, chat.as_text())
                for place in by_row[starts[row] : starts[row + 1]]:
                    line = _line(chat, lines, int(place), workload)
                    buckets[place // per_bucket].write(f"{place:0{_PLACE_DIGITS}d}{line}\n")
            at += batch.num_rows
            told(at)
    assert at == len(why), "the input changed between two readings"
    with (ctx.out / "prompts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for name in names:
            with name.open(encoding="utf-8", newline="\n") as bucket:
                file.writelines(line[_PLACE_DIGITS:] for line in sorted(bucket))
            name.unlink()
    return most_first(dropped.counts)


def _line(chat: Chat, lines: Lines, place: int, workload: str) -> str:
    split, turn = lines.splits[place], int(lines.turns[place])
    prompt = ask_of(chat, split)
    assert prompt is not None, chat.where
    label = str(getattr(chat, workload)) or "unknown"
    prompt_id = f"{chat.row_id}-{turn + 1}" if turn else chat.row_id
    in_order = place - lines.ordered_from if lines.ordered_from is not None and split == "train" else None
    named = replace(prompt, workload=label, prompt_id=prompt_id, place=in_order)
    return json.dumps(named.as_json(), ensure_ascii=False)
