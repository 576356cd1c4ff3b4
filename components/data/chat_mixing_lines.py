"""Writes `prompts.jsonl` in any order of rows in bounded memory: lines go into buckets by place, sorted one at a time.

Rows are read in their stored order. A bucket holds about 64 MB of lines, and only one bucket is in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from components.contract import Chats, Context
from components.data.chat_mixing_rows import prompt_of_chat
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
"""Reasons that say nothing about the row itself: `dropped.parquet` gets its location and no excerpt."""


@dataclass(frozen=True)
class Lines:
    """The lines of the file in their order.

    rows: [lines] row index, in the order read. repeats: [lines] how many copies of that row precede this one.
    splits: [lines] train, validation, test or warm_up. ordered_from: the first line of a declared training order; None
    where none was declared.
    """

    rows: NDArray[Any]
    repeats: NDArray[Any]
    splits: Sequence[str]
    ordered_from: int | None


def write_lines(
    chats: Sequence[Chats],
    lines: Lines,
    reasons: NDArray[Any],
    size: int,
    workload: str,
    ctx: Context,
    report_progress: Callable[[int], None],
) -> dict[str, int]:
    """Write `prompts.jsonl` and `dropped.parquet`; returns the rows left out by reason.

    reasons: [rows] an index into REASONS. size: of all lines, in characters, estimated. workload: the column by which
    results are grouped. report_progress: called with the number of rows read so far.
    """
    import numpy

    num_buckets = min(_MAX_BUCKETS, max(1, -(-2 * size // _BUCKET_CHARACTERS)))
    per_bucket = max(1, -(-len(lines.rows) // num_buckets))
    by_row = numpy.argsort(lines.rows, kind="stable")
    starts = numpy.searchsorted(lines.rows[by_row], numpy.arange(len(reasons) + 1))
    bucket_files = [ctx.scratch / f"bucket-{number:05d}.jsonl" for number in range(-(-len(lines.rows) // per_bucket))]
    num_read = 0
    with ExitStack() as stack:
        buckets = [stack.enter_context(file.open("w", encoding="utf-8", newline="\n")) for file in bucket_files]
        dropped = stack.enter_context(DroppedWriter(ctx.out))
        for batch in (batch for artifact in chats for batch in iter_batches(artifact)):
            batch_reasons = reasons[num_read : num_read + batch.num_rows]
            needs_content = numpy.isin(batch_reasons, _UNTOUCHED, invert=True)  # the others are not even parsed
            for reason, source, location in zip(
                batch_reasons[~needs_content],
                *(batch.column(name).filter(~needs_content).to_pylist() for name in _PLACE),
                strict=True,
            ):
                dropped.write(REASONS[reason], source, location, "")
            rows = num_read + numpy.flatnonzero(needs_content)
            for row, chat in zip(rows, batch_chats(batch.filter(needs_content)), strict=True):
                if reasons[row]:
                    dropped.write(REASONS[reasons[row]], chat.source, chat.where, chat.as_text())
                for place in by_row[starts[row] : starts[row + 1]]:
                    line = _line(chat, lines, int(place), workload)
                    buckets[place // per_bucket].write(f"{place:0{_PLACE_DIGITS}d}{line}\n")
            num_read += batch.num_rows
            report_progress(num_read)
    assert num_read == len(reasons), "the input changed between two readings"
    with (ctx.out / "prompts.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for bucket_file in bucket_files:
            with bucket_file.open(encoding="utf-8", newline="\n") as bucket:
                file.writelines(line[_PLACE_DIGITS:] for line in sorted(bucket))
            bucket_file.unlink()
    return most_first(dropped.counts)


def _line(chat: Chat, lines: Lines, place: int, workload: str) -> str:
    split, repeat = lines.splits[place], int(lines.repeats[place])
    prompt = prompt_of_chat(chat, split)
    assert prompt is not None, chat.where
    label = str(getattr(chat, workload)) or "unknown"
    prompt_id = f"{chat.row_id}-{repeat + 1}" if repeat else chat.row_id
    training_place = place - lines.ordered_from if lines.ordered_from is not None and split == "train" else None
    named = replace(prompt, workload=label, prompt_id=prompt_id, place=training_place)
    return json.dumps(named.as_json(), ensure_ascii=False)
