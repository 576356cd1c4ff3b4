"""Step `data.collect_prompts`: collects prompts and splits them, so that no evaluation prompt is ever trained on.

Python's standard library is split by source file: training prompts come from the files that the built-in target was
trained on, all others from files that it never saw. Other sources are rows, checked one by one and split by a hash of
the question alone: the same question under another system prompt, with other white space or in another file is on the
same side, and adding rows moves none. Prompts that are equal up to white space are kept once; where a source is already
split (by file), the copy on the evaluation side is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from components.contract import Context, Prompts, UserError
from components.data.formats.prompts import Prompt, content_of, hash_number, question_of, write_prompts
from components.data.sources.addresses import PREFIX, parse_hub_source
from components.data.sources.bad_rows import BadRow, SetAside, row_excerpt
from components.data.sources.files import read_rows, stem_of
from components.data.sources.listing import find_files
from components.data.sources.python_stdlib import STDLIB, functions_in, stdlib_files
from components.data.sources.shapes import Question, read_label, read_shape
from components.data.sources.tables import hub_rows
from components.text import as_utf8

Table = tuple[str, str, Iterator[tuple[int, Any]]]
"""(location, name, rows with their lines)."""
Item = TypeVar("Item")
LONGEST_IN_ROWS: Final = 4000
"""Characters of the longest prompt of rows, where the setting says nothing."""
_FILE_SHARES: Final = (("test", 60), ("validation", 90), ("warm_up", 100))
"""Of a hundred held-out stdlib files, 60 give test prompts, the next 30 validation, the last 10 warm-up."""
_EVALUATION: Final = ("test", "warm_up", "validation")
_FEWEST_BYTES: Final = 100
"""Of a row that is counted ahead, roughly: a packed file may hold any number of them."""
_PRUNE_ABOVE: Final = 1000
"""How many candidates beyond twice the quota are held before the last are dropped, so that memory stays bounded."""


def collect_prompts(
    *,
    source: str,
    num_train: int,
    num_validation: int,
    num_test: int,
    num_warm_up: int,
    evaluation_percent: int,
    keep_out: str,
    workload: str,
    workload_field: str,
    min_prompt_characters: int | None,
    max_prompt_characters: int | None,
    max_rows: int,
    ctx: Context,
) -> Prompts:
    """The step `data.collect_prompts`; its settings are explained in components/data/steps.py."""
    quotas = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation, "train": num_train}
    counts: Counter[str] = Counter()
    from_rows = source != STDLIB
    if from_rows:
        prompts = _row_prompts(source, workload, workload_field, max_rows, counts, ctx)
    else:
        prompts = _stdlib_prompts(workload)
    shortest = min_prompt_characters or (1 if from_rows else 40)
    longest = max_prompt_characters or (LONGEST_IN_ROWS if from_rows else 400)
    forbidden = questions_of_source(keep_out, max_rows, counts, ctx) if keep_out else frozenset[int]()
    candidates = _allowed(prompts, shortest, longest, forbidden, counts)
    if from_rows:
        pools = split_prompts(candidates, quotas, counts, seed=ctx.seed, evaluation_percent=evaluation_percent)
    else:
        pools = {split: [] for split in quotas}
        for prompt in candidates:
            pools[prompt.split].append(prompt)
    selected = select_prompts(pools, quotas, counts, ctx.seed)
    _check_counts(selected, quotas, counts, source, ctx)
    write_prompts(ctx.out, (prompt for split in quotas for prompt in selected[split]))
    return Prompts.of_step(
        ctx,
        {
            "source": source,
            **{f"num_{split}": len(selected[split]) for split in quotas},
            **{name: counts[name] for name in ("found", "set_aside", "too_short", "too_long", "kept_out")},
            "duplicates_within_split": counts["duplicates_within_split"],
            "duplicates_across_splits": counts["duplicates_across_splits"],
            "workloads": dict(Counter(prompt.workload for split in quotas for prompt in selected[split])),
        },
    )


def _stdlib_prompts(workload: str) -> Iterator[Prompt]:
    for entry in stdlib_files():
        if not entry.source.startswith("stdlib/"):  # test suites: assertions, not code that people complete
            continue
        try:
            text = entry.read()
        except (UnicodeError, SyntaxError):  # odd encodings: not a prompt source, and not the user's data
            continue
        split = "train"
        if entry.held_out:
            bucket = hash_number(f"split:{entry.relative_path}") % 100
            split = next(name for name, below in _FILE_SHARES if bucket < below)
        for function in functions_in(text):
            question = Question(function.head, None, function.body)
            yield prompt_of(question, split, workload or STDLIB, entry.source)


def _tables(source: str, set_aside: SetAside) -> Iterator[Table]:
    """Each file of a source, or the one split of a data set."""
    if source.startswith(PREFIX):
        hub_source = parse_hub_source(source)
        yield source, hub_source.label, hub_rows(hub_source)
        return
    for file in find_files(source):
        yield str(file), stem_of(file), read_rows(file, set_aside)


def bytes_of_first_prompts(source: str, most: int, max_prompt_characters: int | None) -> list[int]:
    """Bytes as UTF-8 of each of the first `most` usable questions of files of this machine, but for those too long.

    System prompts count. [] for the standard library and for a data set on a hub.

    Raises:
        UserError: the files cannot be read.
    """
    if source == STDLIB or source.startswith(PREFIX):
        return []
    prompts = _first_prompts(source, most)
    longest = max_prompt_characters or LONGEST_IN_ROWS
    texts = (
        prompt.text or "".join(message["content"] for message in prompt.messages or ())
        for prompt in prompts
        if prompt.num_characters <= longest
    )
    return [len(text.encode("utf-8", "replace")) for text in texts]


def count_test_prompts(settings: Mapping[str, Any], most_bytes: int) -> int | None:
    """How many test prompts a step with these settings would collect from files of this machine.

    A source `keep_out` is not read, and takes more of them away. None for what is not in such files, and where they
    have more than `most_bytes` or that many rows: then there are enough for any verdict.

    Raises:
        UserError: the files cannot be read.
    """
    source, most_rows = settings["source"], min(settings["max_rows"], most_bytes // _FEWEST_BYTES)
    if source == STDLIB or source.startswith(PREFIX) or sum(f.stat().st_size for f in find_files(source)) > most_bytes:
        return None
    prompts = _first_prompts(source, most_rows)
    if len(prompts) == most_rows:
        return None
    quotas = {split: settings[f"num_{split}"] for split in (*_EVALUATION, "train")}
    longest, counts = settings["max_prompt_characters"] or LONGEST_IN_ROWS, Counter[str]()
    allowed = _allowed(prompts, settings["min_prompt_characters"] or 1, longest, frozenset(), counts)
    pools = split_prompts(allowed, quotas, counts, seed=0, evaluation_percent=settings["evaluation_percent"])
    return len(select_prompts(pools, quotas, counts, 0)["test"])


def _first_prompts(source: str, most: int) -> list[Prompt]:
    """The first `most` usable questions of files of this machine."""
    prompts: list[Prompt] = []
    rows = (row for _, _, rows in _tables(source, lambda *_: None) for _, row in rows)
    while len(prompts) < most and (row := next(rows, None)) is not None:
        with suppress(BadRow):  # the step sets it aside, and counts it
            prompts.append(prompt_of(read_shape(row), "train", "", ""))
    return prompts


def read_items(
    tables: Callable[[SetAside], Iterable[Table]],
    read: Callable[[Any, str, str], Item],
    counts: Counter[str],
    ctx: Context,
    *,
    label: str,
    max_rows: int | None = None,
    refuse_unusable: bool = False,
    first: dict[str, str] | None = None,
) -> Iterator[Item]:
    """What `read` makes of every usable row; increments rows, usable and set_aside in `counts`.

    read: takes a row, the location and the name of its table; raises BadRow. label: the source, in messages.
    refuse_unusable: whether a table without a usable row is an error. first: takes location -> line and fault of its
    first row that is set aside.
    """
    first = {} if first is None else first

    def set_aside(location: str, line: int, fault: BadRow, row: str) -> None:
        counts["set_aside"] += 1
        first.setdefault(location, f"line {line}, {fault}")
        ctx.set_aside(as_utf8(location), line, str(fault), row)

    num_rows = 0
    for location, name, rows in tables(set_aside):
        usable_before, bad_before = counts["usable"], counts["set_aside"]
        for line, row in rows:
            if num_rows == max_rows:
                ctx.note(f"{label}: stopped after {max_rows} rows (max_rows); raise it to look at more")
                return
            num_rows += 1
            counts["rows"] += 1
            try:
                item = read(row, location, name)
            except BadRow as fault:
                set_aside(location, line, fault, row_excerpt(row))
                continue
            counts["usable"] += 1
            yield item
        if refuse_unusable and counts["usable"] == usable_before:
            if bad := counts["set_aside"] - bad_before:
                raise UserError(
                    f"source: {location}: no usable row, {bad} set aside; the first: {first[location]}; mend the rows"
                )
            raise UserError(f"source: {location}: there are no rows in it; remove it or fill it")


def _row_prompts(
    source: str, workload: str, workload_field: str, max_rows: int, counts: Counter[str], ctx: Context
) -> Iterator[Prompt]:
    """Every usable row as a prompt."""

    def read(row: Any, file: str, name: str) -> Prompt:
        question = read_shape(row)
        label = read_label(row, workload_field) if workload_field else workload or name
        return prompt_of(question, "train", label, as_utf8(file.rsplit("/", 1)[-1]))

    tables = functools.partial(_tables, source)
    return read_items(tables, read, counts, ctx, label=source, max_rows=max_rows, refuse_unusable=True)


def questions_of_source(keep_out: str, max_rows: int, counts: Counter[str], ctx: Context) -> frozenset[int]:
    """Hashes of the questions of another source; its malformed rows are counted with the others."""
    if keep_out == STDLIB:
        raise UserError("keep_out: python-stdlib: give a source of rows; the library is kept apart by file anyway")
    its_counts: Counter[str] = Counter()
    try:
        prompts = _row_prompts(keep_out, "", "", max_rows, its_counts, ctx)
        questions = frozenset(hash_number(question_of(prompt)) for prompt in prompts)
    except UserError as error:
        raise UserError(f"keep_out: {str(error).removeprefix('source: ')}") from error
    counts["set_aside"] += its_counts["set_aside"]
    return questions


def _allowed(
    prompts: Iterable[Prompt], shortest: int, longest: int, forbidden: frozenset[int], counts: Counter[str]
) -> Iterator[Prompt]:
    """The prompts of a suitable length that are not forbidden; the others are counted."""
    for prompt in prompts:
        size = prompt.num_characters
        counts["found"] += 1
        if size < shortest:
            counts["too_short"] += 1
        elif size > longest:
            counts["too_long"] += 1
        elif forbidden and hash_number(question_of(prompt)) in forbidden:
            counts["kept_out"] += 1
        else:
            yield prompt


def prompt_of(question: Question, split: str, workload: str, source: str) -> Prompt:
    """The prompt of a row; its id is a hash of its label and content."""
    identity = question.text if question.text is not None else json.dumps(question.messages, ensure_ascii=False)
    digest = hashlib.sha256(f"{workload}\0{identity}".encode()).hexdigest()
    return Prompt(digest[:16], split, workload, source, question.text, question.messages, question.reference)


def _check_counts(
    selected: dict[str, list[Prompt]], quotas: dict[str, int], counts: Counter[str], source: str, ctx: Context
) -> None:
    left_out = ", ".join(f"{counts[name]} {name.replace('_', ' ')}" for name in ("too_short", "too_long", "kept_out"))
    for split, need in quotas.items():
        got = len(selected[split])
        if got == 0 and need > 0:
            raise UserError(
                f"source: {source}: no prompt for split {split} ({counts['found']} found, {left_out}); "
                f"give more rows or other limits, or num_{split}: 0"
            )
        if got < need:
            ctx.note(f"{source}: {got} {split} prompts of the {need} asked for")
    if source != STDLIB and any(counts[name] for name in ("too_short", "too_long", "kept_out")):
        ctx.note(f"{source}: of {counts['found']} prompts {left_out}")
    if counts["set_aside"]:
        ctx.note(f"{source}: {counts['set_aside']} malformed rows set aside, see set_aside.jsonl")


def split_prompts(
    prompts: Iterable[Prompt], quotas: Mapping[str, int], counts: Counter[str], *, seed: int, evaluation_percent: int
) -> dict[str, list[Prompt]]:
    """Split the prompts of a source of rows; each content is kept once, from its first row.

    quotas: split -> most prompts.
    evaluation_percent: of a hundred questions, how many are for test, warm_up and validation (in expectation).
    """
    num_evaluation = sum(quotas[split] for split in _EVALUATION)
    contents: set[bytes] = set()
    train: list[Prompt] = []
    evaluation: dict[str, list[Prompt]] = {}  # by question: equal questions go together
    for prompt in prompts:
        content = hashlib.sha256(content_of(prompt).encode("utf-8")).digest()
        if content in contents:
            counts["duplicates_within_split"] += 1
            continue
        contents.add(content)
        question = question_of(prompt)
        if hash_number(f"split:{question}") % 100 < evaluation_percent:
            evaluation.setdefault(question, []).append(prompt)
            if len(evaluation) > 2 * num_evaluation + _PRUNE_ABOVE:
                evaluation = dict(_in_order(evaluation, seed)[:num_evaluation])
        else:
            counts["train_side"] += 1
            train.append(prompt)
            if len(train) > 2 * quotas["train"] + _PRUNE_ABOVE:
                train = sorted(train, key=lambda prompt: _order(prompt, seed))[: quotas["train"]]
    return {"train": train, **_split_evaluation_groups([group for _, group in _in_order(evaluation, seed)], quotas)}


def select_prompts(
    pools: Mapping[str, list[Prompt]], quotas: Mapping[str, int], counts: Counter[str], seed: int
) -> dict[str, list[Prompt]]:
    """Select the first prompts of every pool in hash order, each content once; evaluation splits select first."""
    split_of_content: dict[str, str] = {}
    selected: dict[str, list[Prompt]] = {}
    for split in quotas:
        selected[split] = []
        for prompt in sorted(pools[split], key=lambda prompt: _order(prompt, seed)):
            content = content_of(prompt)
            if content in split_of_content:
                side = "within_split" if split_of_content[content] == split else "across_splits"
                counts[f"duplicates_{side}"] += 1
                continue
            split_of_content[content] = split
            selected[split].append(prompt)
    return {split: selected[split][: quotas[split]] for split in quotas}


def _split_evaluation_groups(groups: list[list[Prompt]], quotas: Mapping[str, int]) -> dict[str, list[Prompt]]:
    """Share groups of equal questions among test, warm_up and validation, by quota and in their order."""
    sizes = {split: quotas[split] for split in _EVALUATION}
    total = sum(sizes.values())
    if len(groups) < total:  # every split gets its share, at least one
        sizes = {split: max(1, len(groups) * size // total) if size else 0 for split, size in sizes.items()}
    splits: dict[str, list[Prompt]] = {split: [] for split in _EVALUATION}
    for split, size in sizes.items():
        for group in groups[:size]:
            splits[split].extend(dataclasses.replace(prompt, split=split) for prompt in group)
        groups = groups[size:]
    return splits


def _in_order(evaluation: Mapping[str, list[Prompt]], seed: int) -> list[tuple[str, list[Prompt]]]:
    return sorted(evaluation.items(), key=lambda entry: (hash_number(f"order:{seed}:{entry[0]}"), entry[0]))


def _order(prompt: Prompt, seed: int) -> tuple[int, str]:
    return (hash_number(f"order:{seed}:{prompt.prompt_id}"), prompt.prompt_id)
