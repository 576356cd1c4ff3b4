"""Step `data.collect_workloads`: benchmark prompts of named workloads and languages; nothing here is for training.

Each source gives up to `num_prompts` prompts of each of its workloads, chosen by the hash of what is asked, so that
adding a source or a row changes no other choice. Warm-up prompts come from the rest: no question is both timed and
warmed up on. With a target, a second turn is asked too: after the target's own greedy answer to the first.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from pydantic import Field

from components.contract import Context, Prompts, Target, UserError
from components.data.choosing import choose, deal_rows
from components.data.collecting import prompt_of
from components.data.prompts import Prompt
from components.data.row_files import printable
from components.data.row_shapes import Ask, BadRow, read_label, read_shape
from components.data.workload_presets import Preset
from components.data.workload_rows import WorkloadSource, local_files, source_of, tables

_BATCH: Final = 8
"""Answers to first turns written side by side."""


@dataclass(frozen=True)
class Candidate:
    """A prompt, and what its user says after the answer."""

    prompt: Prompt
    later: tuple[str, ...] = ()


def collect_workloads(
    target: Target | None = None,
    *,
    sources: Annotated[list[str | WorkloadSource], Field(min_length=1)],
    num_prompts: Annotated[int, Field(ge=1)] = 40,
    num_warm_up: Annotated[int, Field(ge=0)] = 1,
    max_prompt_characters: Annotated[int, Field(ge=1)] = 8000,
    max_answer_tokens: Annotated[int, Field(ge=1)] = 256,
    max_rows: Annotated[int, Field(ge=1)] = 200_000,
    ctx: Context,
) -> Prompts:
    """Write `prompts.jsonl` with the splits test and warm_up, each prompt with its workload, language and source.

    Args:
        target: answers the first turns, where a source asks in several; without it only first turns are asked.
        sources: presets by name (mt-bench, spec-bench, gsm8k, math-500, humaneval, ceval, cmmlu), or sources with
            preset, path, revision, workload, workload_field, language, template, reference and num_prompts. A preset
            without a path is read from the hub, which needs `draftsmith run --online`.
        num_prompts: test prompts of each workload of each source, at most; second turns come on top.
        num_warm_up: warm-up prompts of each workload of each source, at most.
        max_prompt_characters: longer prompts are left out and counted, characters.
        max_answer_tokens: tokens of the target's answer that a second turn may follow on, at most.
        max_rows: rows looked at in each source, at most.
    """
    (ctx.out / "set_aside.jsonl").unlink(missing_ok=True)  # of an attempt that was killed
    counts: Counter[str] = Counter()
    chosen: list[Candidate] = []
    licences: dict[str, str] = {}
    for number, given in enumerate(sources):
        source = source_of(given)
        chosen += _chosen(source, num_prompts, num_warm_up, max_prompt_characters, max_rows, counts, ctx)
        if source.known is not None:
            licences[source.known.name] = source.known.licence
        ctx.progress(number + 1, len(sources), "sources")
    prompts = _without_repeats([candidate.prompt for candidate in chosen], counts)
    kept = {prompt.prompt_id for prompt in prompts}
    several = [candidate for candidate in chosen if candidate.later and candidate.prompt.prompt_id in kept]
    if several and target is None:
        ctx.note(f"{len(several)} prompts go on in a second turn, left out: give `target`, whose answers they follow")
    elif several and target is not None:
        prompts = _without_repeats([*prompts, *_later_turns(target, several, max_answer_tokens, ctx)], counts)
    with (ctx.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps(prompt.as_json(), ensure_ascii=False) + "\n")
    if counts["set_aside"]:
        ctx.note(f"{counts['set_aside']} malformed rows set aside, see set_aside.jsonl")
    test = [prompt for prompt in prompts if prompt.split == "test"]
    return Prompts.made(
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


def collect_workloads_fingerprint(settings: Mapping[str, Any]) -> dict[str, str]:
    """The content behind every source that lies here, for the step's key: file -> sha256.

    Planning never asks the network, so a preset on the hub counts by its name and revision alone.
    """
    from components.targets.file_digests import sha256_of

    given = [item if isinstance(item, str) else WorkloadSource.model_validate(item) for item in settings["sources"]]
    return {str(file): sha256_of(file) for item in given for file in local_files(source_of(item))}


def _chosen(
    source: WorkloadSource,
    num_prompts: int,
    num_warm_up: int,
    longest: int,
    max_rows: int,
    counts: Counter[str],
    ctx: Context,
) -> list[Candidate]:
    """The prompts of one source, workload by workload; raises UserError when it has none."""
    by_workload: dict[str, list[Candidate]] = {}
    seen = 0
    for candidate in _candidates(source, max_rows, counts, ctx):
        seen += 1
        if Ask(candidate.prompt.text, candidate.prompt.messages, "").characters > longest:
            counts["too_long"] += 1
        else:
            by_workload.setdefault(candidate.prompt.workload, []).append(candidate)
    if not by_workload:
        why = f"all {seen} are longer than {longest} characters" if seen else "no usable row"
        raise UserError(f"sources: {source.label}: no prompt in it ({why}); give other rows or limits")
    wanted = {"test": source.num_prompts or num_prompts, "warm_up": num_warm_up, "validation": 0, "train": 0}
    kept: list[Candidate] = []
    for workload in sorted(by_workload):
        later = {candidate.prompt.prompt_id: candidate.later for candidate in by_workload[workload]}
        of_it: Counter[str] = Counter()
        rows = (candidate.prompt for candidate in by_workload[workload])
        pools = deal_rows(rows, wanted, of_it, seed=ctx.seed, evaluation_percent=100)
        dealt = choose(pools, wanted, of_it, ctx.seed)
        counts["duplicates"] += of_it["duplicates_within_split"] + of_it["duplicates_across_splits"]
        if not dealt["test"]:
            raise UserError(f"sources: {source.label}: too few {workload} rows for a test prompt; lower num_warm_up")
        kept += [Candidate(prompt, later[prompt.prompt_id]) for split in ("test", "warm_up") for prompt in dealt[split]]
    return kept


def _candidates(source: WorkloadSource, max_rows: int, counts: Counter[str], ctx: Context) -> Iterator[Candidate]:
    """Every usable row of a source; the others are set aside and counted."""

    def set_aside(where: str, line: int, why: str, row: str) -> None:
        counts["set_aside"] += 1
        ctx.set_aside(printable(where), line, why, row)

    looked_at = 0
    for where, name, rows in tables(source, set_aside):
        for line, row in rows:
            if looked_at == max_rows:
                ctx.note(f"{source.label}: stopped after {max_rows} rows (max_rows); raise it to look at more")
                return
            looked_at += 1
            counts["rows"] += 1
            try:
                yield _candidate(source, row, name)
            except BadRow as error:
                set_aside(where, line, str(error), json.dumps(row, ensure_ascii=True, default=str)[:400])


def _candidate(source: WorkloadSource, row: Any, table: str) -> Candidate:
    """One row as a prompt; raises BadRow when it asks nothing."""
    if not isinstance(row, Mapping):
        raise BadRow("a row must be an object with fields")
    preset = source.known
    turns = _turns(row, preset.turns if preset is not None else ("turns",))
    template = source.template or (preset.template if preset is not None else "")
    reference = source.reference or (preset.reference if preset is not None else "")
    if turns:
        answers = row.get("reference")
        first = answers[0] if isinstance(answers, list) and answers and isinstance(answers[0], str) else ""
        ask = Ask(None, ({"role": "user", "content": turns[0]},), first)
    elif template:
        ask = _filled(template, row, reference, chat=preset is None or preset.chat)
    else:
        ask = read_shape(row)
    prompt = prompt_of(ask, "test", _workload(source, preset, row, table), source.label)
    language = source.language or (preset.language if preset is not None else "")
    return Candidate(replace(prompt, language=language), tuple(turns[1:]))


def _workload(source: WorkloadSource, preset: Preset | None, row: Mapping[str, Any], table: str) -> str:
    if source.workload_field:
        return read_label(row, source.workload_field)
    if source.workload or preset is None:
        return source.workload
    return preset.workload_of(read_label(row, preset.category) if preset.category else table)


def _turns(row: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """What the user says, turn by turn; empty where the row does not ask in turns."""
    for field in fields:
        turns = row.get(field)
        if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
            if not all(turn.strip() for turn in turns):
                raise BadRow(f"{field} holds an empty turn")
            return list(turns)
    return []


def _filled(template: str, row: Mapping[str, Any], reference: str, *, chat: bool) -> Ask:
    """The template with the row's fields in it; a field that is absent, empty or no text is refused."""
    fields = {str(name).strip().lower().replace(" ", "_"): value for name, value in row.items()}
    texts = _Fields({name: str(value) if isinstance(value, int | float) else value for name, value in fields.items()})
    asked = template.format_map(texts)
    answer = fields.get(reference) if reference else None
    known = answer if isinstance(answer, str) else ""
    if chat:
        return Ask(None, ({"role": "user", "content": asked},), known)
    head = asked.rstrip()  # "newline and indentation" is one token: cut before the line break
    return Ask(head, None, asked[len(head) :] + known)


class _Fields(dict[str, Any]):
    """What a template may name; anything unusable is a bad row."""

    def __missing__(self, field: str) -> str:
        raise BadRow(f"no field {field} (has: {', '.join(sorted(self)[:8]) or 'none'})")

    def __getitem__(self, field: str) -> str:
        value = super().__getitem__(field) if field in self else self.__missing__(field)
        return read_label({field: value}, field)


def _without_repeats(prompts: Sequence[Prompt], counts: Counter[str]) -> list[Prompt]:
    """Each prompt once; of two sources that ask the same under the same workload the first counts."""
    kept = {prompt.prompt_id: prompt for prompt in reversed(prompts)}
    counts["duplicates"] += len(prompts) - len(kept)
    return [prompt for prompt in prompts if kept.pop(prompt.prompt_id, None) is prompt]


def _later_turns(target: Target, several: Sequence[Candidate], max_answer_tokens: int, ctx: Context) -> list[Prompt]:
    """Every later turn as a chat of its own that holds the target's greedy answers so far."""
    from components.data.control_marks import HoldsControlMark
    from components.data.prompts import encode_prompt
    from components.targets.generate import continue_batch
    from components.targets.load import open_target, open_tokenizer

    opened, tokenizer = open_target(target, device=ctx.device, kernel="plain"), open_tokenizer(target)
    room = opened.shape.max_position_embeddings - max_answer_tokens
    made: list[Prompt] = []
    open_turns = list(several)
    while open_turns:
        asked: list[Candidate] = []
        for first in range(0, len(open_turns), _BATCH):
            fitting = []
            for number, one in enumerate(open_turns[first : first + _BATCH], start=first + 1):
                try:
                    ids = encode_prompt(tokenizer, one.prompt)
                    why = f"{len(ids)} tokens, and only {room} fit before an answer of {max_answer_tokens}"
                except HoldsControlMark as error:
                    ids, why = [], str(error)
                if ids and len(ids) <= room:
                    fitting.append((one, ids))
                else:
                    ctx.set_aside(f"{one.prompt.source}: later turn", number, why, one.prompt.prompt_id)
            answers = (
                continue_batch(opened, [ids for _, ids in fitting], max_new_tokens=max_answer_tokens) if fitting else []
            )
            for (one, _), answer in zip(fitting, answers, strict=True):
                text = tokenizer.decode(answer.ids, skip_special_tokens=True).strip()
                asked.append(_next_turn(one, text))
            ctx.progress(min(first + _BATCH, len(open_turns)), len(open_turns), "answers to earlier turns")
        made += [candidate.prompt for candidate in asked]
        open_turns = [candidate for candidate in asked if candidate.later]
    return made


def _next_turn(one: Candidate, answer: str) -> Candidate:
    messages = (
        *(one.prompt.messages or ()),
        {"role": "assistant", "content": answer},
        {"role": "user", "content": one.later[0]},
    )
    asked = prompt_of(Ask(None, messages, ""), one.prompt.split, one.prompt.workload, one.prompt.source)
    return Candidate(replace(asked, language=one.prompt.language), one.later[1:])
