"""Step `data.write_given_answers`: token ids and masks of a source's own answers, rendered with the target's template.

The target is not run. Three methods must agree on which tokens belong to an answer (assistant_mask.py); a chat on which
they disagree is set aside with the reason, and too many of those stop the step. Work is cut into parts of a fixed
number of lines, which any worker can make and a kill does not lose; the parts are regrouped into shards of equal size.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.chat_sample import Piece, SampleRow, cut_in_middle
from components.contract import Context, Conversations, Prompts, ReportProgress, Target, UserError
from components.data.formats.prompts import Prompt, parse_prompt
from components.data.formats.responses import (
    ANSWERED_SPLITS,
    MAX_CHARACTERS,
    Conversation,
    read_notes,
    read_shard,
    sample_row,
    shard_name,
    summarise,
    write_manifest,
    write_sample,
    write_shard,
)
from components.data.responses.assistant_mask import (
    ChatRow,
    LeftOut,
    MaskedChat,
    ThinkingStyle,
    can_write_thinking,
    mask_chat,
    refuse_template_without_mask,
    roles_in,
    rows_of_chat,
    thinking_style,
)
from components.data.responses.generate import conversation_of, measure_test_prompts
from components.data.settings import Thinking, Turns
from components.data.sources.turns import Message
from components.outside_json import JsonObject
from components.targets.load import open_tokenizer, target_facts

LINES_PER_PART = 1024
SAMPLES_PER_PART = 3
"""The most chats of a part that enter the sample."""


def write_given_answers(
    target: Target,
    prompts: Prompts,
    *,
    thinking: Thinking,
    turns: Turns,
    max_tokens: int,
    shard_size: int,
    max_set_aside: float,
    ctx: Context,
) -> Conversations:
    """The step `data.write_given_answers`; its settings are explained in components/data/steps.py."""
    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    if not getattr(tokenizer, "chat_template", None) or not tokenizer.is_fast:
        raise UserError(
            "target: its tokenizer has no chat template or no offsets, so answers cannot be told from prompts; "
            "take data.write_answers"
        )
    style = thinking_style(tokenizer)
    refuse_template_without_mask(tokenizer, style, str(target.info.get("model", "target")))
    limit = min(max_tokens, int(facts["shape"]["max_position_embeddings"]))
    parts = [
        ChatPart(
            file=ctx.scratch / f"part-{number:05d}.safetensors",
            prompts=prompts.path / "prompts.jsonl",
            start=start,
            num_lines=num_lines,
            target=target.path,
            thinking=thinking,
            turns=turns,
            style=style,
            max_tokens=limit,
        )
        for number, (start, num_lines) in enumerate(_line_blocks(prompts))
    ]
    for _ in ctx.map(mask_part, parts, what="parts of chats"):
        pass
    notes = [PartNotes(**read_notes(part.file)) for part in parts]
    counts = _count_outcomes(notes, max_set_aside, ctx)
    measure_test_prompts(prompts, tokenizer, ctx)
    names = _regroup([part.file for part in parts], shard_size, ctx)
    about = f"The source's own answers, thinking: {thinking}, turns: {turns}. Masks agreed by {_method_names(counts)}."
    write_sample(ctx.out, [row for note in notes for row in note.sample], about)
    write_manifest(ctx, target.key, names, shard_size)
    info = {"target_key": target.key, "thinking": thinking, "turns": turns, **counts, **summarise(ctx, names)}
    ctx.note(f"{counts['num_kept']} of {counts['num_read']} chats kept; masks agreed by {_method_names(counts)}")
    return Conversations.of_step(ctx, info)


@dataclass(frozen=True)
class ChatPart:
    """The inputs of one part, and its output file. start: byte offset of its first line."""

    file: Path
    prompts: Path
    start: int
    num_lines: int
    target: Path
    thinking: Thinking
    turns: Turns
    style: ThinkingStyle
    max_tokens: int


@dataclass(frozen=True)
class PartNotes:
    """What happened to the chats of one part.

    counts: read, kept, "no answer" and "too long". agreed: method -> rows. impossible: method -> reason.
    aside: {"source", "reason", "why", "row"} of each chat set aside. sample: rows for `write_sample`.
    """

    counts: Counter[str] = field(default_factory=Counter)
    agreed: Counter[str] = field(default_factory=Counter)
    impossible: dict[str, str] = field(default_factory=dict)
    aside: list[dict[str, str]] = field(default_factory=list)
    sample: list[SampleRow] = field(default_factory=list)


def mask_part(part: ChatPart, report_progress: ReportProgress) -> int:
    """Mask the chats of one part and write its file, on any machine with these paths; returns the number of rows."""
    tokenizer = open_tokenizer(Target("", part.target))
    conversations: list[Conversation] = []
    notes = PartNotes()
    for number, prompt in enumerate(_prompts_of(part)):
        notes.counts["read"] += 1
        report_progress(number / part.num_lines)
        try:
            rows = _masked_rows(tokenizer, prompt, part)
        except LeftOut as reason:
            notes.aside.append(
                {"source": prompt.source, "reason": reason.reason, "why": str(reason), "row": prompt.prompt_id}
            )
            continue
        notes.counts[rows if isinstance(rows, str) else "kept"] += 1
        for masked_chat in () if isinstance(rows, str) else rows:
            conversations.append(_conversation(tokenizer, prompt, masked_chat))
            notes.agreed.update(masked_chat.agreed)
            notes.impossible.update(masked_chat.impossible)
            if len(notes.sample) < SAMPLES_PER_PART:
                notes.sample.append(sample_row(conversations[-1].row, pieces_of_chat(masked_chat)))
    write_shard(part.file, conversations, vars(notes))
    return len(conversations)


def _masked_rows(tokenizer: Any, prompt: Prompt, part: ChatPart) -> list[MaskedChat] | str:
    """The rows of one chat that fit max_tokens, or a reason why it has none."""
    chat = answered_chat(prompt)
    if chat is None:
        return "no answer"
    try:
        rows = rows_of_chat(tokenizer, chat, prompt.tools, thinking=part.thinking, turns=part.turns, style=part.style)
        written = [row.text for row in rows]  # cached; a template that refuses the chat says so here
    except UserError as error:
        raise LeftOut("the chat template refuses it", str(error)) from error
    if not written:
        return "no answer"
    if not all(can_write_thinking(row, part.style) for row in rows):
        raise LeftOut("the chat template writes no thinking", "thinking: drop leaves it out")
    fitting = [masked for masked in (_fitted(row, part.max_tokens) for row in rows) if masked is not None]
    return fitting or "too long"


def _fitted(row: ChatRow, max_tokens: int) -> MaskedChat | None:
    """The masked row with as many of its answers as fit; None where not even the first answer fits."""
    masked = mask_chat(row)
    if len(masked.ids) <= max_tokens:
        return masked
    shorter = row.without_last_answer()
    return None if shorter is None else _fitted(shorter, max_tokens)


def answered_chat(prompt: Prompt) -> tuple[Message, ...] | None:
    """The chat with its source's answers; None where the source has none."""
    if prompt.conversation is not None:
        return prompt.conversation
    if prompt.messages is not None and prompt.reference.strip():
        return (*prompt.messages, {"role": "assistant", "content": prompt.reference})
    return None


def _conversation(tokenizer: Any, prompt: Prompt, chat: MaskedChat) -> Conversation:
    last = next(token for token, masked in zip(reversed(chat.ids), reversed(chat.mask), strict=True) if masked)
    ended = last in tokenizer.all_special_ids
    return conversation_of(
        prompt, chat.ids, chat.mask, temperature=None, ended=ended, answered_by="source", suffix=chat.row.suffix
    )


def pieces_of_chat(chat: MaskedChat) -> list[Piece]:
    """A masked chat cut where the role or the mask changes."""
    text = chat.row.text
    role_at = ["template"] * len(text)
    for slot in roles_in(chat.row):
        role_at[slot.start : slot.stop] = [chat.row.messages[slot.turn]["role"]] * (slot.stop - slot.start)
    masked_at = [False] * len(text)
    for (start, stop), masked in zip(chat.row.rendering.encode(text)[1], chat.mask, strict=True):
        masked_at[start:stop] = [masked] * (stop - start)
    pieces: list[Piece] = []
    for (role, masked), run in itertools.groupby(range(len(text)), key=lambda at: (role_at[at], masked_at[at])):
        indices = list(run)
        pieces.append(
            {"role": role, "masked": masked, "text": cut_in_middle(text[indices[0] : indices[-1] + 1], MAX_CHARACTERS)}
        )
    return pieces


def _count_outcomes(notes: Sequence[PartNotes], max_set_aside: float, ctx: Context) -> JsonObject:
    """Counts of kept and rejected chats. Raises UserError where none is kept, or too many are set aside."""
    counts: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    impossible: dict[str, str] = {}
    for note in notes:
        counts.update(note.counts)
        agreed.update(note.agreed)
        impossible.update(note.impossible)
        for line in note.aside:
            ctx.set_aside(line["source"], 0, line["why"], line["row"])
    reasons = Counter(line["reason"] for note in notes for line in note.aside)
    num_set_aside, num_kept = reasons.total(), counts["kept"]
    assert counts["read"] == num_kept + num_set_aside + counts["no answer"] + counts["too long"]
    most_frequent = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3))
    if num_set_aside > max_set_aside * (num_kept + num_set_aside) or (num_set_aside and not num_kept):
        first = next(line["why"] for note in notes for line in note.aside)
        raise UserError(
            f"prompts: {num_set_aside} of {num_kept + num_set_aside} chats are set aside ({most_frequent}; "
            f"the first: {first}); max_set_aside says how many may be"
        )
    if not num_kept:
        raise UserError(
            f"prompts: none of {counts['read']} for train and validation has an answer of its own that fits max_tokens;"
            " mix chats with answers, or let the target answer (data.write_answers)"
        )
    return {
        "num_read": counts["read"],
        "num_kept": num_kept,
        "num_without_answer": counts["no answer"],
        "num_too_long": counts["too long"],
        "num_set_aside": num_set_aside,
        "set_aside": dict(reasons.most_common()),
        "mask_methods": dict(sorted(agreed.items())),
        "mask_methods_impossible": impossible,
    }


def _method_names(counts: JsonObject) -> str:
    return ", ".join(counts["mask_methods"])


def _line_blocks(prompts: Prompts) -> list[tuple[int, int]]:
    """(byte offset, lines) of each part of the prompts' file."""
    file = prompts.path / "prompts.jsonl"
    if not file.is_file():
        raise UserError(f"{prompts.path}: no prompts.jsonl: not a Prompts artifact; make one with data.mix_chats")
    blocks, at = [], 0
    with file.open("rb") as lines:
        start, count = 0, 0
        for line in lines:
            at, count = at + len(line), count + 1
            if count == LINES_PER_PART:
                blocks.append((start, count))
                start, count = at, 0
    return [*blocks, (start, count)] if count else blocks


def _prompts_of(part: ChatPart) -> Iterator[Prompt]:
    """The prompts of one part that are for train and validation."""
    with part.prompts.open("rb") as lines:
        lines.seek(part.start)
        for _ in range(part.num_lines):
            prompt = parse_prompt(json.loads(lines.readline()))
            if prompt.split in ANSWERED_SPLITS:
                yield prompt


def _regroup(parts: Sequence[Path], shard_size: int, ctx: Context) -> list[str]:
    """Write shards of equal size from the parts, in order; returns their names."""
    names: list[str] = []
    pending: list[Conversation] = []

    def write() -> None:
        names.append(shard_name(len(names)))
        write_shard(ctx.out / names[-1], pending[:shard_size])
        del pending[:shard_size]

    for part in parts:
        pending += read_shard(part)
        while len(pending) >= shard_size:
            write()
    if pending:
        write()
    return names
