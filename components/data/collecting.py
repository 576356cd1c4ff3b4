"""The step that gathers prompts and splits them, so that nothing a drafter is judged on was ever trained on.

Python's standard library is split by source file: training prompts come from the files the built-in target was trained
on, all others from files that it never saw. Other sources are split by a hash of the prompt. Prompts that are equal up
to white space are kept once, on the side of the evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from components.contract import Context, Prompts, UserError
from components.data.prompts import Prompt
from components.data.row_files import find_files, read_rows, stem_of
from components.data.row_shapes import Ask, BadRow, read_shape
from components.data.stdlib_files import stdlib_files
from components.data.stdlib_prompts import functions_in

STDLIB: Final = "python-stdlib"
EVALUATION_PERCENT: Final = 20
"""Of a hundred prompts from files of rows, how many are for evaluation (in expectation)."""

_FILE_SHARES: Final = (("test", 60), ("validation", 90), ("warm_up", 100))
"""Of a hundred held-out stdlib files, the first 60 give test prompts, the next 30 validation, the last 10 warm-up."""


def collect_prompts(
    *,
    source: Annotated[str, Field(min_length=1)] = STDLIB,
    num_train: Annotated[int, Field(ge=1)] = 640,
    num_validation: Annotated[int, Field(ge=1)] = 48,
    num_test: Annotated[int, Field(ge=1)] = 24,
    num_warm_up: Annotated[int, Field(ge=1)] = 4,
    workload: str = "",
    workload_field: str = "",
    min_prompt_characters: Annotated[int | None, Field(ge=1)] = None,
    max_prompt_characters: Annotated[int | None, Field(ge=1)] = None,
    ctx: Context,
) -> Prompts:
    """Write `prompts.jsonl` with the splits train, validation, test and warm_up.

    Args:
        source: "python-stdlib" (signature and docstring in, body out), or a path, folder or pattern of JSONL, JSON or
            Parquet files with chats or texts. Malformed rows are set aside and counted.
        num_train: Training prompts at most; the target answers them.
        num_validation: Prompts at most that choose a drafter's checkpoint; the target answers them too.
        num_test: Prompts at most for the benchmarks.
        num_warm_up: Prompts at most that warm a benchmark up and are never counted.
        workload: The label that results are grouped by; empty is the file's name without its suffix.
        workload_field: A field of the rows that holds the label instead (for Spec-Bench: category).
        min_prompt_characters: Shorter prompts are left out, characters; null is 40 for python-stdlib, 1 for files.
        max_prompt_characters: Longer prompts are left out, characters; null is 400 for python-stdlib, 4000 for files.
    """
    wanted = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation, "train": num_train}
    counts: Counter[str] = Counter()
    found = _from_stdlib(workload) if source == STDLIB else _from_files(source, workload, workload_field, counts, ctx)
    shortest = min_prompt_characters or (40 if source == STDLIB else 1)
    longest = max_prompt_characters or (400 if source == STDLIB else 4000)
    pools: dict[str, list[Prompt]] = {split: [] for split in wanted}
    for prompt in found:
        size = _characters(prompt)
        counts["found"] += 1
        if size < shortest:
            counts["too_short"] += 1
        elif size > longest:
            counts["too_long"] += 1
        else:
            pools[prompt.split].append(prompt)
    if source != STDLIB:
        pools = _deal_evaluation(pools, wanted, ctx.seed)
    chosen = _choose(pools, wanted, counts, ctx.seed)
    _check(chosen, wanted, counts, source, ctx)
    with (ctx.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for split in wanted:
            for prompt in chosen[split]:
                file.write(json.dumps(prompt.as_json(), ensure_ascii=False) + "\n")
    return Prompts.made(
        ctx,
        {
            "source": source,
            **{f"num_{split}": len(chosen[split]) for split in wanted},
            **{name: counts[name] for name in ("found", "set_aside", "too_short", "too_long")},
            "duplicates_within_split": counts["duplicates_within_split"],
            "duplicates_across_splits": counts["duplicates_across_splits"],
            "workloads": dict(Counter(prompt.workload for split in wanted for prompt in chosen[split])),
        },
    )


def collect_prompts_fingerprint(settings: Mapping[str, Any]) -> dict[str, str]:
    """The content behind `source`, for the step's key: file name -> sha256."""
    from components.targets.file_digests import sha256_of

    source = str(settings.get("source", STDLIB))
    if source == STDLIB:
        total = hashlib.sha256()
        for entry in stdlib_files():
            total.update(f"{entry.source}\0{sha256_of(entry.path)}\n".encode())
        return {STDLIB: total.hexdigest()}
    return {str(file): sha256_of(file) for file in find_files(source)}


def _from_stdlib(workload: str) -> Iterable[Prompt]:
    for entry in stdlib_files():
        if not entry.source.startswith("stdlib/"):  # test suites: assertions, not code that people complete
            continue
        try:
            text = entry.read()
        except (UnicodeError, SyntaxError):  # odd encodings: not a prompt source, and not the user's data
            continue
        split = "train"
        if entry.held_out:
            bucket = _hash_number(f"split:{entry.relative_path}") % 100
            split = next(name for name, below in _FILE_SHARES if bucket < below)
        for function in functions_in(text):
            ask = Ask(function.head, None, function.body)
            yield _prompt(ask, split, workload or STDLIB, entry.source)


def _from_files(
    source: str, workload: str, workload_field: str, counts: Counter[str], ctx: Context
) -> Iterable[Prompt]:
    def set_aside(file: str, line: int, why: str, row: str) -> None:
        counts["set_aside"] += 1
        ctx.set_aside(file, line, why, row)

    for file in find_files(source):
        before, bad_before = counts["found"], counts["set_aside"]
        for line, row in read_rows(file, set_aside):
            try:
                ask = read_shape(row)
                label = _label(row, workload_field) or workload or stem_of(file)
            except BadRow as error:
                set_aside(str(file), line, str(error), json.dumps(row, ensure_ascii=True, default=str)[:400])
                continue
            identity = _identity(ask)
            held_out = _hash_number(f"split:{identity}") % 100 < EVALUATION_PERCENT
            yield _prompt(ask, "test" if held_out else "train", label, file.name)
        if counts["found"] == before:
            if bad := counts["set_aside"] - bad_before:
                why = _first_set_aside(ctx, str(file))
                raise UserError(f"source: {file}: no usable row, {bad} set aside; the first: {why}")
            raise UserError(f"source: {file}: the file has no rows")


def _first_set_aside(ctx: Context, source: str) -> str:
    with (ctx.out / "set_aside.jsonl").open(encoding="utf-8") as file:
        first = next(entry for entry in map(json.loads, file) if entry["source"] == source)
    return f"line {first['line']}, {first['why']}"


def _label(row: Any, field: str) -> str:
    if not field:
        return ""
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise BadRow(f"{field} must be text: workload_field names it as the row's label")
    return value


def _prompt(ask: Ask, split: str, workload: str, source: str) -> Prompt:
    digest = hashlib.sha256(f"{workload}\0{_identity(ask)}".encode()).hexdigest()
    return Prompt(digest[:16], split, workload, source, ask.text, ask.messages, ask.reference)


def _deal_evaluation(pools: dict[str, list[Prompt]], wanted: dict[str, int], seed: int) -> dict[str, list[Prompt]]:
    """Share the evaluation prompts of a source of rows among test, warm_up and validation, by need and by hash."""
    unique: dict[str, list[Prompt]] = {}
    for prompt in sorted(pools["test"], key=lambda prompt: _order(prompt, seed)):
        unique.setdefault(_content(prompt), []).append(prompt)
    groups = list(unique.values())  # equal prompts go together, so that none is on two sides
    needs = {split: wanted[split] for split in ("test", "warm_up", "validation")}
    total = sum(needs.values())
    if len(groups) < total:  # everybody gets a share, at least one
        needs = {split: max(1, len(groups) * need // total) for split, need in needs.items()}
    dealt: dict[str, list[Prompt]] = {**pools, "test": [], "warm_up": [], "validation": []}
    for split, need in needs.items():
        for group in groups[:need]:
            dealt[split].extend(_moved(prompt, split) for prompt in group)
        groups = groups[need:]
    return dealt


def _choose(
    pools: dict[str, list[Prompt]], wanted: dict[str, int], counts: Counter[str], seed: int
) -> dict[str, list[Prompt]]:
    """The first prompts of every pool in hash order, each content once; evaluation splits choose first."""
    everywhere: dict[str, str] = {}
    kept: dict[str, list[Prompt]] = {}
    for split in wanted:
        kept[split] = []
        for prompt in sorted(pools[split], key=lambda prompt: _order(prompt, seed)):
            content = _content(prompt)
            if content in everywhere:
                side = "within_split" if everywhere[content] == split else "across_splits"
                counts[f"duplicates_{side}"] += 1
                continue
            everywhere[content] = split
            kept[split].append(prompt)
    return {split: kept[split][: wanted[split]] for split in wanted}


def _check(
    chosen: dict[str, list[Prompt]], wanted: dict[str, int], counts: Counter[str], source: str, ctx: Context
) -> None:
    for split, need in wanted.items():
        got = len(chosen[split])
        if got == 0:
            left_out = f"{counts['found']} found, {counts['too_short']} too short, {counts['too_long']} too long"
            raise UserError(
                f"source: {source}: no prompt for split {split} ({left_out}); give more rows or other limits"
            )
        if got < need:
            ctx.note(f"{source}: {got} {split} prompts of the {need} asked for")
    if counts["set_aside"]:
        ctx.note(f"{source}: {counts['set_aside']} malformed rows set aside, see set_aside.jsonl")


def _moved(prompt: Prompt, split: str) -> Prompt:
    return Prompt(**{**vars(prompt), "split": split})


def _characters(prompt: Prompt) -> int:
    return Ask(prompt.text, prompt.messages, "").characters


def _identity(ask: Ask) -> str:
    return ask.text if ask.text is not None else json.dumps(ask.messages, ensure_ascii=False)


def _content(prompt: Prompt) -> str:
    """What makes two prompts the same: their text up to white space."""
    return " ".join(_identity(Ask(prompt.text, prompt.messages, "")).split())


def _order(prompt: Prompt, seed: int) -> tuple[int, str]:
    return (_hash_number(f"order:{seed}:{prompt.prompt_id}"), prompt.prompt_id)


def _hash_number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8")).digest()[:8], "big")
