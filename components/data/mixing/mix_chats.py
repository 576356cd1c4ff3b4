"""Step `data.mix_chats`: mixes conversations of any sources with declared shares, split so that nothing leaks.

The rows are read twice: the first time a few numbers of each are kept (row_index.py), the second time the selected rows
are written. The selection depends on the rows' content, the settings and the seed alone, not on the order of the rows
or the number of files or workers; a larger limit contains all rows of a smaller one.

`prompts.jsonl` has its rows in any order, and is written in bounded memory: lines go into buckets by place, each of
about 64 MB, which are sorted one at a time. `mix.json` has the requested and the actual share of every source, language
and domain. Where the strata are sources, no share was requested for a language: its requested share is then computed
from those of the sources, so that a mix that leans to one language becomes visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from components.contract import Chats, Context, Prompts, Target, UserError
from components.data.formats.chats import Chat, DroppedWriter, batch_chats, iter_batches, most_first, read_manifest
from components.data.mixing.row_index import (
    DIMENSIONS,
    Rows,
    count_by_tokenizer,
    estimate_by_characters,
    prompt_of_chat,
    read_rows,
)
from components.data.mixing.selection import (
    EVALUATION,
    LEFT_OUT,
    REASONS,
    Plan,
    Splits,
    TrainingSplit,
    assign_splits,
    line_order,
    order_keys,
    reasons_text,
)
from components.data.settings import Order, Strata, TooSmall, Unit
from components.outside_json import JsonObject

_NUMBERS: Final = ("rows_read", "tokens_read", "asked", "got", "rows", "tokens", "test", "warm_up", "validation")
_BUCKET_CHARACTERS: Final = 48 << 20
_MAX_BUCKETS: Final = 200
_PLACE_DIGITS: Final = 12
_PLACE: Final = ("source", "where")
_UNTOUCHED: Final = [REASONS.index(name) for name in LEFT_OUT[1:]]
"""Reasons that say nothing about the row itself: `dropped.parquet` gets its location and no excerpt."""


def mix_chats(
    chats: list[Chats],
    target: Target | None,
    *,
    strata: Strata,
    weights: dict[str, float],
    by: Unit,
    temperature: float,
    caps: dict[str, int],
    limit_tokens: int | None,
    limit_rows: int | None,
    too_small: TooSmall,
    max_turns: int,
    order: Order,
    ask_once: bool,
    num_validation: int,
    num_test: int,
    num_warm_up: int,
    evaluation_percent: int,
    evaluation_weights: dict[str, float],
    workload: Strata,
    chars_per_token: dict[str, float],
    ctx: Context,
) -> Prompts:
    """The step `data.mix_chats`; its settings are explained in components/data/steps.py."""
    limit = limit_tokens if by == "tokens" else limit_rows
    plan = Plan(strata, weights, by, temperature, caps, limit, too_small, max_turns)
    quotas = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation}
    rows = _read(chats, target, chars_per_token, ctx)
    keys = order_keys(rows.row, f"choose:{ctx.seed}")
    shares = plan.shares(rows, slice(None), evaluation_weights or weights)
    splits = assign_splits(rows, keys, quotas, evaluation_percent, rows.labels[strata], shares, ask_once)
    _check_evaluation(splits, quotas, ctx)
    training = plan.select_rows(rows, keys, splits)
    lines = _order_lines(rows, splits, training, order, ctx.seed)
    total, size = len(rows.row), int(rows.characters[lines.rows].sum())
    dropped = write_lines(
        chats, lines, training.reasons, size, workload, ctx, lambda done: ctx.progress(total + done, 2 * total, "rows")
    )
    return _report(rows, plan, splits, training, dropped, target is not None, ctx)


def _read(chats: Sequence[Chats], target: Target | None, chars_per_token: Mapping[str, float], ctx: Context) -> Rows:
    total = sum(int(read_manifest(artifact)["num_rows"]) for artifact in chats)
    if not total:
        raise UserError("chats: there are no rows in them; collect some, or clean less strictly")
    counted = count_by_tokenizer(target) if target is not None else estimate_by_characters(chars_per_token)
    return read_rows(chats, counted, lambda done: ctx.progress(done, 2 * total, "rows"))


def _check_evaluation(splits: Splits, quotas: Mapping[str, int], ctx: Context) -> None:
    for split, need in quotas.items():
        got = len(splits.evaluation[split])
        if need and not got:
            raise UserError(
                f"num_{split}: no row is left for split {split} ({reasons_text(splits.reasons)}); "
                f"raise evaluation_percent, give more rows, or num_{split}: 0"
            )
        if got < need:
            ctx.note(f"{got} {split.replace('_', ' ')} prompts of the {need} asked for; evaluation_percent gives more")


def _order_lines(rows: Rows, splits: Splits, training: TrainingSplit, order: Order, seed: int) -> Lines:
    """The lines of `prompts.jsonl`: test, warm-up and validation first, as in data.collect_prompts."""
    evaluation = numpy.concatenate([splits.evaluation[split] for split in EVALUATION])
    order_of_lines = line_order(rows, training.rows, training.repeats, order, seed)
    return Lines(
        numpy.concatenate([evaluation, training.rows[order_of_lines]]),
        numpy.concatenate([numpy.zeros(len(evaluation), dtype=numpy.int64), training.repeats[order_of_lines]]),
        [split for split in EVALUATION for _ in splits.evaluation[split]] + ["train"] * len(order_of_lines),
        None if order == "random" else len(evaluation),
    )


def _report(
    rows: Rows, plan: Plan, splits: Splits, training: TrainingSplit, dropped: dict[str, int], exact: bool, ctx: Context
) -> Prompts:
    """Write mix.json, log the mix, and return the artifact."""
    table = strata_table(rows, training, splits.evaluation, plan.strata, plan.unit(rows))
    tokens = int(rows.tokens[training.rows].sum())
    num_kept = len(rows.row) - sum(dropped.values())
    mix = {
        "num_read": len(rows.row),
        "num_kept": num_kept,
        "num_train": len(training.rows),
        **{f"num_{split}": len(splits.evaluation[split]) for split in EVALUATION},
        "num_train_tokens": tokens,
        "tokens_are": "counted by the target" if exact else "estimated from characters",
        "by": plan.by,
        "strata": plan.strata,
        "seed": ctx.seed,
        "dropped": dropped,
        "said": list(training.notes),
        "mix": table,
    }
    assert num_kept == int((training.reasons == 0).sum()), "a row was lost"
    (ctx.out / "mix.json").write_text(json.dumps(mix, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    about = "" if exact else " (estimated)"
    repeats = len(training.rows) - len(set(training.rows.tolist()))
    again = f", {repeats:,} of them repeats" if repeats else ""
    ctx.note(f"{len(training.rows):,} rows to train on{again}, {tokens:,} tokens{about}, of {len(rows.row):,} read")
    for sentence in (*training.notes, *sentences(table, plan.strata, plan.by)):
        ctx.note(sentence)
    if dropped:
        ctx.note(f"left out: {reasons_text(training.reasons)}")
    return Prompts.of_step(ctx, mix)


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


def strata_table(
    rows: Rows, training: TrainingSplit, evaluation: Mapping[str, NDArray[Any]], strata: str, unit: NDArray[Any]
) -> list[JsonObject]:
    """One entry for every source, language and domain (`of`): shares requested (`asked`) and actual (`got`), counts.

    unit: [rows] the size by which shares are computed: tokens, or 1.
    """
    table: list[JsonObject] = []
    candidates, train, shares = training.candidates, training.rows, training.shares
    of_strata = rows.labels[strata]
    available = numpy.bincount(of_strata[candidates], weights=unit[candidates], minlength=len(shares))
    # the requested share of one unit
    worth = numpy.divide(shares, available, out=numpy.zeros_like(shares), where=available > 0)
    total = max(1.0, float(unit[train].sum()))
    for dimension in DIMENSIONS:
        labels, count = rows.labels[dimension], len(rows.names[dimension])

        def totals(of: Any, weights: NDArray[Any] | None, labels: Any = labels, count: int = count) -> NDArray[Any]:
            return numpy.bincount(labels[of], weights=None if weights is None else weights[of], minlength=count)

        requested = shares if dimension == strata else totals(candidates, worth[of_strata] * unit)
        everything = slice(None)
        counts = {
            "rows_read": totals(everything, None),
            "tokens_read": totals(everything, rows.tokens),
            "rows": totals(train, None),
            "tokens": totals(train, rows.tokens),
            **{split: totals(evaluation[split], None) for split in EVALUATION},
        }
        sizes = {"asked": requested, "got": totals(train, unit) / total}
        for number, name in enumerate(rows.names[dimension]):
            numbers: JsonObject = {key: int(values[number]) for key, values in counts.items()}
            numbers |= {key: round(float(values[number]), 6) for key, values in sizes.items()}
            table.append({"of": dimension, "name": name} | {key: numbers[key] for key in _NUMBERS})
    return table


def sentences(table: Sequence[JsonObject], strata: str, by: str) -> list[str]:
    """A line each for sources, languages and domains: actual shares, largest first, and requested ones that differ."""
    lines = []
    for dimension in DIMENSIONS:
        entries = [entry for entry in table if entry["of"] == dimension and (entry["rows"] or entry["asked"])]
        if len(entries) < 2 and not (entries and entries[0]["name"]):
            continue
        entries.sort(key=lambda entry: (-entry["got"], entry["name"]))
        word = "asked" if dimension == strata else "expected"  # what the asked shares bring of it
        parts = [_share_text(entry, word) for entry in entries[:8]]
        if len(entries) > 8:
            parts.append(f"{len(entries) - 8} more {sum(entry['got'] for entry in entries[8:]):.1%}")
        lines.append(f"{dimension}s by {by}: {', '.join(parts)}")
    return lines


def _share_text(entry: JsonObject, word: str) -> str:
    name = entry["name"] or "unknown"
    got, requested = f"{entry['got']:.1%}", f"{entry['asked']:.1%}"
    return f"{name} {got}" if got == requested else f"{name} {got} ({word} {requested})"
