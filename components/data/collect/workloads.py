"""Step `data.collect_workloads`: benchmark prompts of named workloads and languages; none of them is for training.

Each source gives up to `num_prompts` prompts of each of its workloads, selected by the hash of the question, so that
adding a source or a row changes no other choice. Warm-up prompts come from the rest, so no question is in both splits.
With a target, second turns are prompts too, each after the target's greedy answer to the first turn. Rows are read one
by one, so that a bad one is set aside alone; CSV, also inside a zip, is read because CMMLU and C-Eval come so.
"""

from __future__ import annotations

import fnmatch
import functools
import lzma
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import huggingface_hub

from components.contract import Context, Prompts, Target, UserError
from components.data.collect.prompts import Table, prompt_of, read_items, select_prompts, split_prompts
from components.data.formats.control_marks import HoldsControlMark
from components.data.formats.prompts import Prompt, encode_prompt, write_prompts
from components.data.settings import WorkloadSource, workload_source
from components.data.sources.addresses import PREFIX, HubSource, parse_hub_source
from components.data.sources.bad_rows import BadRow, Row, SetAside
from components.data.sources.files import read_rows, stem_of
from components.data.sources.listing import local_files
from components.data.sources.presets import WorkloadPreset
from components.data.sources.shapes import Question, read_functions, read_label, read_shape
from components.data.sources.streams import bounded_stream, suffix_of
from components.data.sources.tables import csv_rows, hub_rows
from components.outside_json import JsonObject
from components.targets.generate import continue_batch
from components.targets.load import open_target, open_tokenizer
from components.text import as_utf8, message_of

_BATCH: Final = 8
"""Number of first turns that are answered in one batch."""


@dataclass(frozen=True)
class Candidate:
    """A prompt and the later turns of its user."""

    prompt: Prompt
    later: tuple[str, ...] = ()


def collect_workloads(
    target: Target | None,
    *,
    sources: list[str | WorkloadSource],
    num_prompts: int,
    num_warm_up: int,
    max_prompt_characters: int,
    max_answer_tokens: int,
    max_rows: int,
    ctx: Context,
) -> Prompts:
    """The step `data.collect_workloads`; its settings are explained in components/data/steps.py."""
    (ctx.out / "set_aside.jsonl").unlink(missing_ok=True)  # left by a killed attempt
    counts: Counter[str] = Counter()
    candidates: list[Candidate] = []
    licences: dict[str, str] = {}
    for number, setting in enumerate(sources):
        source = workload_source(setting)
        candidates += _select(source, num_prompts, num_warm_up, max_prompt_characters, max_rows, counts, ctx)
        if source.resolved_preset is not None:
            licences[source.resolved_preset.name] = source.resolved_preset.licence
        ctx.progress(number + 1, len(sources), "sources")
    prompts = _drop_repeats([candidate.prompt for candidate in candidates], counts)
    prompt_ids = {prompt.prompt_id for prompt in prompts}
    multi_turn = [candidate for candidate in candidates if candidate.later and candidate.prompt.prompt_id in prompt_ids]
    if multi_turn and target is None:
        number = len(multi_turn)
        ctx.note(f"{number} prompts go on in a second turn, left out: give `target`, whose answers they follow")
    elif multi_turn and target is not None:
        prompts = _drop_repeats([*prompts, *_ask_later_turns(target, multi_turn, max_answer_tokens, ctx)], counts)
    write_prompts(ctx.out, prompts)
    if counts["set_aside"]:
        ctx.note(f"{counts['set_aside']} malformed rows set aside, see set_aside.jsonl")
    test = [prompt for prompt in prompts if prompt.split == "test"]
    return Prompts.of_step(
        ctx,
        {
            "num_test": len(test),
            "num_warm_up": len(prompts) - len(test),
            **{name: counts[name] for name in ("rows", "set_aside", "too_long", "duplicates")},
            "workloads": dict(Counter(prompt.workload for prompt in test)),
            "languages": dict(Counter(prompt.language for prompt in test)),
            "sources": dict(Counter(prompt.source for prompt in test)),
            "licences": licences,
        },
    )


def _select(
    source: WorkloadSource,
    num_prompts: int,
    num_warm_up: int,
    max_characters: int,
    max_rows: int,
    counts: Counter[str],
    ctx: Context,
) -> list[Candidate]:
    """The selected prompts of one source, workload by workload; raises UserError when it has none."""
    by_workload: dict[str, list[Candidate]] = {}
    num_rows, first = 0, dict[str, str]()
    tables, read = functools.partial(_tables, source), functools.partial(_candidate_of_row, source)
    for candidate in read_items(tables, read, counts, ctx, label=source.label, max_rows=max_rows, first=first):
        num_rows += 1
        if candidate.prompt.num_characters > max_characters:
            counts["too_long"] += 1
        else:
            by_workload.setdefault(candidate.prompt.workload, []).append(candidate)
    if not by_workload:
        reason = "".join(f"; the first: {as_utf8(at)}, {fault}" for at, fault in list(first.items())[:1])
        reason = f"all {num_rows} are longer than {max_characters} characters" if num_rows else f"no usable row{reason}"
        raise UserError(f"sources: {source.label}: no prompt in it ({reason}); give other rows or limits")
    sizes = {"test": source.num_prompts or num_prompts, "warm_up": num_warm_up, "validation": 0, "train": 0}
    selected: list[Candidate] = []
    for workload in sorted(by_workload):
        later = {candidate.prompt.prompt_id: candidate.later for candidate in by_workload[workload]}
        workload_counts: Counter[str] = Counter()
        rows = (candidate.prompt for candidate in by_workload[workload])
        pools = split_prompts(rows, sizes, workload_counts, seed=ctx.seed, evaluation_percent=100)
        by_split = select_prompts(pools, sizes, workload_counts, ctx.seed)
        counts["duplicates"] += workload_counts["duplicates_within_split"] + workload_counts["duplicates_across_splits"]
        if not by_split["test"]:
            raise UserError(f"sources: {source.label}: too few {workload} rows for a test prompt; lower num_warm_up")
        prompts = by_split["test"] + by_split["warm_up"]
        selected += [Candidate(prompt, later[prompt.prompt_id]) for prompt in prompts]
    return selected


def _candidate_of_row(source: WorkloadSource, row: Any, _: str, table: str) -> Candidate:
    """The prompt of one row; raises BadRow where it has no question."""
    if not isinstance(row, Mapping):
        raise BadRow("a row must be an object with fields")
    preset = source.resolved_preset
    turns = _turns_of_row(row, preset.turns if preset is not None else ("turns",))
    if preset is not None and preset.placeholder and any(turn.startswith(preset.placeholder) for turn in turns):
        raise BadRow("its text is in another data set; fill it in with the publisher's program and give `path:`")
    template = source.template or (preset.template if preset is not None else "")
    reference = source.reference or (preset.reference if preset is not None else "")
    if turns:
        answers = row.get("reference")
        first = answers[0] if isinstance(answers, list) and answers and isinstance(answers[0], str) else ""
        question = Question(None, ({"role": "user", "content": turns[0]},), first)
    elif preset is not None and preset.messages and not template:
        question = _first_turn(row, preset.messages)
    elif template:
        chat, optional = (True, ()) if preset is None else (preset.chat, preset.optional)
        question = _fill_template(template, row, reference, chat=chat, optional=optional)
    else:
        question = read_shape(row)
    prompt = prompt_of(question, "test", _workload_of_row(source, preset, row, table), source.label)
    language = source.language
    if preset is not None and not language:
        language = preset.language_of(_category_of_row(preset, row, table)) if preset.languages else preset.language
    tools = read_functions(row, preset.tools) if preset is not None and preset.tools else None
    return Candidate(replace(prompt, language=language, tools=tools), tuple(turns[1:]))


def _workload_of_row(source: WorkloadSource, preset: WorkloadPreset | None, row: Row, table: str) -> str:
    if source.workload_field:
        return read_label(row, source.workload_field)
    if source.workload or preset is None:
        return source.workload
    return preset.workload_of(_category_of_row(preset, row, table))


def _category_of_row(preset: WorkloadPreset, row: Row, table: str) -> str:
    return read_label(row, preset.category) if preset.category else table


def _first_turn(row: Row, field: str) -> Question:
    """The messages of the first turn in a field that holds a list of turns, each a list of messages."""
    turns = row.get(field)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{field} must be a list of turns, each a list of messages")
    return read_shape({"messages": turns[0]})


def _turns_of_row(row: Row, fields: Sequence[str]) -> list[str]:
    """The user's turns in the first of these fields that holds a list of texts, or of {"content": text}; else empty."""
    for field in fields:
        turns = row.get(field)
        if not isinstance(turns, list):
            continue
        texts = [turn["content"] if isinstance(turn, Mapping) and set(turn) == {"content"} else turn for turn in turns]
        if texts and all(isinstance(text, str) for text in texts):
            if not all(text.strip() for text in texts):
                raise BadRow(f"{field} holds an empty turn")
            return texts
    return []


def _fill_template(template: str, row: Row, reference: str, *, chat: bool, optional: Sequence[str] = ()) -> Question:
    """The template with the row's fields in it; raises BadRow for a field that is absent, empty or not a text.

    optional: fields at the template's end that may be empty.
    """
    fields = {str(name).strip().lower().replace(" ", "_"): value for name, value in row.items()}
    for name in optional:
        if fields.get(name) in ("", None):
            template = template.replace(f"{{{name}}}", "").rstrip()
    question = template.format_map(_Fields({name: _as_text(value) for name, value in fields.items()}))
    answer = fields.get(reference) if reference else None
    reference_text = answer if isinstance(answer, str) else ""
    if chat:
        return Question(None, ({"role": "user", "content": question},), reference_text)
    head = question.rstrip()  # cut before the line break: "newline and indentation" is one token
    return Question(head, None, question[len(head) :] + reference_text)


def _as_text(value: Any) -> Any:
    """A number as text, a list of texts as its lines; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    return str(value) if isinstance(value, int | float) else value


class _Fields(JsonObject):
    """The fields that a template may name; raises BadRow for a missing or unusable one."""

    def __missing__(self, field: str) -> str:
        raise BadRow(f"no field {field} (has: {', '.join(sorted(self)[:8]) or 'none'})")

    def __getitem__(self, field: str) -> str:
        value = super().__getitem__(field) if field in self else self.__missing__(field)
        return read_label({field: value}, field)


def _drop_repeats(prompts: Sequence[Prompt], counts: Counter[str]) -> list[Prompt]:
    """Each prompt once, by its id: the first of several sources wins."""
    first_by_id = {prompt.prompt_id: prompt for prompt in reversed(prompts)}
    counts["duplicates"] += len(prompts) - len(first_by_id)
    return [prompt for prompt in prompts if first_by_id.pop(prompt.prompt_id, None) is prompt]


def _ask_later_turns(
    target: Target, candidates: Sequence[Candidate], max_answer_tokens: int, ctx: Context
) -> list[Prompt]:
    """One prompt for every later turn: a chat that holds the target's greedy answers to the earlier turns."""
    model, tokenizer = open_target(target, device=ctx.device, kernel="plain"), open_tokenizer(target)
    room = model.shape.max_position_embeddings - max_answer_tokens
    prompts: list[Prompt] = []
    open_turns = list(candidates)
    while open_turns:
        next_turns: list[Candidate] = []
        for first in range(0, len(open_turns), _BATCH):
            fitting = []
            for number, candidate in enumerate(open_turns[first : first + _BATCH], start=first + 1):
                try:
                    ids = encode_prompt(tokenizer, candidate.prompt)
                    reason = f"{len(ids)} tokens, and only {room} fit before an answer of {max_answer_tokens}"
                except HoldsControlMark as error:
                    ids, reason = [], str(error)
                if ids and len(ids) <= room:
                    fitting.append((candidate, ids))
                else:
                    ctx.set_aside(f"{candidate.prompt.source}: later turn", number, reason, candidate.prompt.prompt_id)
            batch = [ids for _, ids in fitting]
            answers = continue_batch(model, batch, max_new_tokens=max_answer_tokens) if batch else []
            for (candidate, _), answer in zip(fitting, answers, strict=True):
                text = tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
                next_turns.append(_append_turn(candidate, text))
            ctx.progress(min(first + _BATCH, len(open_turns)), len(open_turns), "answers to earlier turns")
        prompts += [candidate.prompt for candidate in next_turns]
        open_turns = [candidate for candidate in next_turns if candidate.later]
    return prompts


def _append_turn(candidate: Candidate, answer: str) -> Candidate:
    before, (turn, *later) = candidate.prompt, candidate.later
    added = ({"role": "assistant", "content": answer}, {"role": "user", "content": turn})
    question = Question(None, (*(before.messages or ()), *added), "")
    prompt = prompt_of(question, before.split, before.workload, before.source)
    return Candidate(replace(prompt, language=before.language), tuple(later))


_ZIP_ERRORS: Final = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(OSError, EOFError, RuntimeError, ValueError, OverflowError),
)
"""Errors that a damaged zip, or one with a password, raises where it is opened or read."""


def _tables(source: WorkloadSource, set_aside: SetAside) -> Iterator[Table]:
    """Every table of a source; raises UserError where one cannot be read."""
    preset = source.resolved_preset
    if not source.path:
        assert preset is not None, source
        yield from _preset_tables(preset, source.revision, set_aside)
        return
    if source.path.startswith(PREFIX):
        hub_source = parse_hub_source(source.path)
        yield source.path, hub_source.label, hub_rows(hub_source)
        return
    for file in local_files(source):
        yield from _file_tables(file, preset, set_aside)


def _preset_tables(preset: WorkloadPreset, revision: str, set_aside: SetAside) -> Iterator[Table]:
    for name in preset.files:
        yield from _file_tables(_download(preset, name, revision), preset, set_aside)
    for config in preset.configs or (None,) * (not preset.files):
        location = f"{PREFIX}{preset.repository}" + (f"/{config}" if config else "") + f":{preset.split}"
        source = HubSource(location, None, preset.repository, config, revision or None, preset.split)
        yield location, config or preset.name, hub_rows(source)


def _download(preset: WorkloadPreset, name: str, revision: str) -> Path:
    """A file of the preset's repository, from the hub's cache where it has been downloaded before."""
    try:
        return Path(
            huggingface_hub.hf_hub_download(preset.repository, name, repo_type="dataset", revision=revision or None)
        )
    except Exception as error:  # every kind of network and hub failure ends here, as one line
        location = f"sources: {preset.name}: {preset.repository}/{name}"
        if huggingface_hub.is_offline_mode():
            remedy = "steps may not reach the hub; allow it with `draftsmith run --online`, or give `path:` to a copy"
            raise UserError(f"{location}: {remedy}") from error
        reason = message_of(error)
        raise UserError(f"{location}: the hub did not give it ({reason}); give `path:` to a copy") from error


def _file_tables(file: Path, preset: WorkloadPreset | None, set_aside: SetAside) -> Iterator[Table]:
    split = "" if preset is None else preset.split
    if file.name.endswith(".csv"):
        yield str(file), _category(stem_of(file), split), read_rows(file, set_aside)
    elif file.name.endswith(".zip"):
        members = "" if preset is None else preset.members
        yield from _zip_tables(file, members or "*.csv", split, set_aside)
    else:
        json_lines = preset is not None and preset.json_lines and suffix_of(file.name) == ".json"
        kind = ".jsonl" if json_lines else ""
        yield str(file), stem_of(file), read_rows(file, set_aside, kind=kind)


def _zip_tables(file: Path, members: str, split: str, set_aside: SetAside) -> Iterator[Table]:
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in sorted(archive.namelist()) if fnmatch.fnmatch(name, members)]
            if not names:
                raise UserError(f"source: {file}: holds no {members}; give the archive as it was handed out")
            for name in names:
                location = f"{file}!{name}"
                yield location, _category(stem_of(Path(name)), split), _member_rows(archive, name, location, set_aside)
    except _ZIP_ERRORS as error:
        raise UserError(f"source: {file}: not a readable zip ({message_of(error, 200)}); fetch it again") from error


def _member_rows(archive: zipfile.ZipFile, name: str, location: str, set_aside: SetAside) -> Iterator[tuple[int, Row]]:
    """The rows of a file inside a zip, streamed, because it may expand to any size."""
    try:
        num_stored = archive.getinfo(name).compress_size
        with archive.open(name) as packed:
            read_some = cast(zipfile.ZipExtFile, packed).read1
            yield from csv_rows(location, bounded_stream(read_some, lambda: num_stored), set_aside)
    except _ZIP_ERRORS as error:
        raise UserError(
            f"source: {location}: cannot be read to its end ({message_of(error, 200)}); fetch it again"
        ) from error


def _category(stem: str, split: str) -> str:
    """The category in a file's name: C-Eval names a subject's file SUBJECT_val.csv."""
    return stem.removesuffix(f"_{split}") if split else stem
