"""Step `data.collect_traffic`: the new conversations in files of served traffic, for nightly retraining.

A conversation is new if no drafter in the champion's line has used its content. The split follows the hash of the
question, so that a question is in the same split every night and no evaluation question is trained on. A night with too
few new conversations ends the run as NothingNew; they are collected on a later night.

What has been used stands in `seen.txt` of the Prompts artifact: one content digest a line (16 hex digits, ascending) of
every conversation that it or an artifact before it holds, and of those that can never be used. The next night reads the
file of the champion's prompts. So what is beyond a night's limits waits for the next one, a killed night reads the same
rows again, conversations of a refused challenger stay new, files may be renamed, moved or read twice, and nothing
depends on clocks.

Where more is new than a night takes, chance draws from all of it, and draws anew once anything has arrived: a fixed
order would give the night after a refusal nearly the same conversations, and so nearly the same drafter, again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from components.contract import Context, NothingNew, Prompts, UserError
from components.data.collect.prompts import (
    Table,
    prompt_of,
    questions_of_source,
    read_items,
    select_prompts,
    split_prompts,
)
from components.data.formats.prompts import (
    SPLITS,
    Prompt,
    content_of,
    hash_number,
    question_of,
    read_prompts,
    write_prompts,
)
from components.data.sources.bad_rows import BadRow, SetAside
from components.data.sources.files import SUFFIXES, read_rows
from components.data.sources.listing import traffic_files
from components.data.sources.shapes import read_label, read_shape, unwrap_row
from components.text import as_utf8

FILE: Final = "seen.txt"
EVALUATION: Final = ("test", "validation", "warm_up")


def collect_traffic(
    seen: Prompts | None,
    *,
    source: str,
    num_train: int,
    num_validation: int,
    num_test: int,
    num_warm_up: int,
    min_new: int,
    evaluation_percent: int,
    keep_out: str,
    workload: str,
    workload_field: str,
    min_prompt_characters: int,
    max_prompt_characters: int,
    max_new: int,
    ctx: Context,
) -> Prompts:
    """The step `data.collect_traffic`; its settings are explained in components/data/steps.py."""
    sizes = {"test": num_test, "warm_up": num_warm_up, "validation": num_validation, "train": num_train}
    counts: Counter[str] = Counter()
    forbidden = questions_in(seen, *EVALUATION)
    if keep_out:
        forbidden |= questions_of_source(keep_out, max_new, counts, ctx)
    used = read_seen(seen)
    files = _files_of(source, ctx)
    draw = hash_number(f"{ctx.seed}:{sum(file.stat().st_size for file in files)}")
    rows = _read_prompts(source, files, workload, workload_field, counts, ctx)
    length_limits = (min_prompt_characters, max_prompt_characters)
    new_prompts = _new_prompts(rows, used, length_limits, forbidden, max_new, counts)
    sides = {"train": num_train, "test": num_test + num_warm_up + num_validation, "warm_up": 0, "validation": 0}
    pools = split_prompts(new_prompts, sides, counts, seed=draw, evaluation_percent=evaluation_percent)
    trained_on = questions_in(seen, "train")
    unusable = [prompt for prompt in pools["test"] if hash_number(question_of(prompt)) in trained_on]
    counts["trained_on"] = len(unusable)
    used.update(map(digest_of, unusable))
    untrained = [prompt for prompt in pools["test"] if hash_number(question_of(prompt)) not in trained_on]
    share = min(1.0, num_train / max(1, len(pools["train"])))
    pools = {"train": pools["train"], **_to_judge_on(untrained, sizes, share)}
    selected = select_prompts(pools, sizes, counts, draw)
    _stop_if_too_few(selected, counts, source, min_new)
    taken = [prompt for split in sizes for prompt in selected[split]]
    counts["waiting"] = counts["new"] - counts["trained_on"] - len(taken)
    write_prompts(ctx.out, taken)
    write_seen(ctx.out, used.union(map(digest_of, taken)))
    counts["waiting_to_judge"] = counts["waiting"] - (counts["train_side"] - len(selected["train"]))
    waits = _waiting_text(counts, num_train)
    ctx.note(f"{counts['new']} new conversations ({_counts_text(counts)}); {_sizes_text(selected)} taken{waits}")
    reasons = ("seen", "duplicates", "kept_out", "trained_on", "too_short", "too_long", "set_aside")
    return Prompts.of_step(
        ctx,
        {
            "source": source,
            **{f"num_{split}": len(selected[split]) for split in sizes},
            **{name: counts[name] for name in ("rows", "new", "waiting", "waiting_to_judge", *reasons)},
            "num_seen_in_all": len(used) + len(taken),
            "workloads": dict(Counter(prompt.workload for split in sizes for prompt in selected[split])),
        },
    )


def _files_of(source: str, ctx: Context) -> list[Path]:
    """The files of a source, in the order of their names."""
    files, num_skipped = traffic_files(source)
    if num_skipped:
        reason = f"none of {', '.join(SUFFIXES)}, or links out of the folder"
        ctx.note(f"{source}: {num_skipped} files left alone: {reason}")
    return files


def _read_prompts(
    source: str, files: Sequence[Path], workload: str, field: str, counts: Counter[str], ctx: Context
) -> Iterator[Prompt]:
    """The prompts of all usable rows of a source's files; other rows are set aside and counted."""

    def rows_of(file: Path, set_aside: SetAside) -> Iterator[tuple[int, Any]]:
        """A file among others that cannot be read further ends there: it must not stop every night to come."""
        try:
            yield from read_rows(file, set_aside)
        except UserError as fault:
            if Path(source).is_file():  # it was named: a mistake
                raise
            set_aside(str(file), 0, BadRow(str(fault)), "")
            ctx.note(f"left alone from where it cannot be read: {fault}")

    def tables(set_aside: SetAside) -> Iterator[Table]:
        for number, file in enumerate(files, start=1):
            yield str(file), as_utf8(file.name), rows_of(file, set_aside)
            ctx.progress(number, len(files), "files")

    def read(row: Any, _: str, name: str) -> Prompt:
        inner = unwrap_row(row) if isinstance(row, Mapping) else row
        question = read_shape(inner)
        return prompt_of(question, "train", read_label({**inner, **row}, field) if field else workload, name)

    return read_items(tables, read, counts, ctx, label=source)


def _new_prompts(
    prompts: Iterator[Prompt],
    used: set[int],
    length_limits: tuple[int, int],
    forbidden: frozenset[int],
    max_new: int,
    counts: Counter[str],
) -> Iterator[Prompt]:
    """Prompts whose content is not in `used`, each once, of a suitable length and not forbidden."""
    tonight: set[int] = set()
    for prompt in prompts:
        digest = digest_of(prompt)
        if digest in tonight or digest in used:
            counts["duplicates" if digest in tonight else "seen"] += 1
            continue
        size = prompt.num_characters
        if not length_limits[0] <= size <= length_limits[1]:
            counts["too_short" if size < length_limits[0] else "too_long"] += 1
        elif hash_number(question_of(prompt)) in forbidden:
            counts["kept_out"] += 1
        else:
            counts["new"] += 1
            tonight.add(digest)
            yield prompt
            if counts["new"] == max_new:
                return


def _to_judge_on(prompts: Iterable[Prompt], sizes: Mapping[str, int], share: float) -> dict[str, list[Prompt]]:
    """Tonight's test, validation and warm-up prompts; prompts with equal questions are in the same of the three.

    share: of the training prompts that tonight takes. As much is taken of these, so that those left over are not left
    without anything to judge on.
    """
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(question_of(prompt), []).append(prompt)
    number = min(math.ceil(share * len(groups)), sum(sizes[split] for split in EVALUATION))
    taken: dict[str, list[list[Prompt]]] = {split: [] for split in EVALUATION if sizes[split]}
    for group in itertools.islice(groups.values(), number):
        furthest_behind = min(taken, key=lambda split: len(taken[split]) / sizes[split])
        taken[furthest_behind].append(group)
    return {
        split: [replace(prompt, split=split) for group in taken.get(split, []) for prompt in group]
        for split in EVALUATION
    }


def _stop_if_too_few(selected: Mapping[str, list[Prompt]], counts: Counter[str], source: str, min_new: int) -> None:
    """Raise NothingNew where there is too little to train or evaluate on."""
    new = counts["new"]
    if not new:
        raise NothingNew(f"{source} holds no conversation that the champion has not had ({_counts_text(counts)})")
    if new < min_new:
        raise NothingNew(f"{source} holds {new} new conversations, fewer than min_new {min_new}; they wait")
    for split in ("train", "test"):
        if not selected[split]:
            raise NothingNew(f"{source}: of {new} new conversations none falls to the {split} split; they wait")


def _counts_text(counts: Counter[str]) -> str:
    words = ("seen", "duplicates", "kept_out", "trained_on", "too_short", "too_long", "set_aside")
    parts = [f"{counts[word]} {word.replace('_', ' ')}" for word in words if counts[word]]
    return ", ".join([f"{counts['rows']} rows", *parts])


def _waiting_text(counts: Counter[str], num_train: int) -> str:
    """What waits for the next night, and what to do where that is more than one takes."""
    if not counts["waiting"]:
        return ""
    to_judge, to_train = counts["waiting_to_judge"], counts["waiting"] - counts["waiting_to_judge"]
    parts = [f"{to_train} to train on"] * (to_train > 0) + [f"{to_judge} to judge on"] * (to_judge > 0)
    advice = "; a night takes less than arrives: raise num_train" if to_train > num_train else ""
    return f"; {counts['waiting']} wait for the next night ({', '.join(parts)}){advice}"


def _sizes_text(selected: Mapping[str, list[Prompt]]) -> str:
    return ", ".join(f"{len(prompts)} {split.replace('_', ' ')}" for split, prompts in selected.items())


def digest_of(prompt: Prompt) -> int:
    """A digest of a conversation's content below 2**64; white space does not count."""
    return hash_number(content_of(prompt))


def read_seen(prompts: Prompts | None) -> set[int]:
    """Digests of all conversations that these prompts and those before them have used; empty for None."""
    if prompts is None:
        return set()
    digests = {digest_of(prompt) for split in SPLITS for prompt in read_prompts(prompts, split)}
    file = prompts.path / FILE
    if file.is_file():
        try:
            digests.update(int(line, 16) for line in file.read_text(encoding="ascii").splitlines())
        except ValueError as error:
            raise UserError(f"{file}: not a list of digests ({error}); run the pipeline that made it again") from error
    return digests


def write_seen(directory: Path, digests: Iterable[int]) -> None:
    """Write `seen.txt` into the directory of a Prompts artifact."""
    lines = "".join(f"{digest:016x}\n" for digest in sorted(digests))
    (directory / FILE).write_text(lines, encoding="ascii")


def questions_in(prompts: Prompts | None, *splits: str) -> frozenset[int]:
    """Hashes of the questions in some splits; empty for None."""
    if prompts is None:
        return frozenset()
    return frozenset(hash_number(question_of(prompt)) for split in splits for prompt in read_prompts(prompts, split))
