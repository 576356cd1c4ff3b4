"""The step that trains on answers which a source already has: no target is run, but its chat template decides the text.

Whether a token is an answer's is found by three methods that must agree (chat_masks.py); a chat on which they do not is
set aside with the reason, and the step stops where that happens to too many. Work is cut into parts of fixed lines, so
what a kill leaves is gone on from, and parts may be made anywhere; from parts, shards of equal size are made in order.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from components.contract import Context, Conversations, Prompts, Target, Tell, UserError
from components.data.answer_summary import ANSWERED_SPLITS, summarise, write_manifest
from components.data.chat_masks_turns import Thinking, ThinkingStyle, Turns

if TYPE_CHECKING:
    from components.data.answers import Conversation
    from components.data.chat_masks import MaskedChat
    from components.data.chat_masks_turns import ChatRow
    from components.data.prompts import Prompt

LINES_OF_A_PART = 1024
SHOWN_OF_A_PART = 3
"""Chats of a part that may come into the sample to look at."""


def write_given_answers(
    target: Target,
    prompts: Prompts,
    *,
    thinking: Thinking = "drop",
    turns: Turns = "all",
    max_tokens: Annotated[int, Field(ge=16)] = 2048,
    shard_size: Annotated[int, Field(ge=1)] = 256,
    max_set_aside: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2,
    ctx: Context,
) -> Conversations:
    """Turn the train and validation chats, with the answers that their source has, into token ids and answer masks.

    Args:
        target: Its tokenizer and chat template are used; its weights are not.
        prompts: Those with a `conversation`, or with a chat and a `reference`; others have no answer and are counted.
        thinking: Of reasoning answers: keep all of it, drop it, or keep that of the last answer of a row only. Where a
            template writes earlier answers without their thinking, each answer becomes a row of its own.
        turns: Learn from all answers of a chat, or from the last one only.
        max_tokens: Tokens of a row at most; a longer chat loses its last turns, and is left out if no answer remains.
        shard_size: Rows of a shard.
        max_set_aside: Share of the chats with answers that may be set aside; above it the step stops and says why.
    """
    from components.data.answer_sample import write_sample
    from components.data.answers import read_notes
    from components.data.chat_masks_turns import thinking_style
    from components.targets.load import open_tokenizer, target_facts

    facts = target_facts(target)
    tokenizer = open_tokenizer(target)
    if not getattr(tokenizer, "chat_template", None) or not tokenizer.is_fast:
        raise UserError(
            "target: its tokenizer has no chat template or no offsets, so answers cannot be told from prompts; "
            "take data.write_answers"
        )
    style = thinking_style(tokenizer)
    limit = min(max_tokens, int(facts["shape"]["max_position_embeddings"]))
    parts = [
        GivenPart(
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
        for number, (start, num_lines) in enumerate(_blocks(prompts))
    ]
    for _ in ctx.map(mask_part, parts, what="parts of chats"):
        pass
    notes = [read_notes(part.file) for part in parts]
    counts = _account(notes, max_set_aside, ctx)
    names = _regroup([part.file for part in parts], shard_size, ctx)
    about = f"The source's own answers, thinking: {thinking}, turns: {turns}. Masks agreed by {_methods(counts)}."
    write_sample(ctx.out, [row for note in notes for row in note["sample"]], about)
    write_manifest(ctx, target.key, names, shard_size)
    info = {"target_key": target.key, "thinking": thinking, "turns": turns, **counts, **summarise(ctx, names)}
    ctx.note(f"{counts['num_kept']} of {counts['num_read']} chats kept; masks agreed by {_methods(counts)}")
    return Conversations.made(ctx, info)


@dataclass(frozen=True)
class GivenPart:
    """Everything that one part depends on, and the file it becomes. start: byte offset of its first line."""

    file: Path
    prompts: Path
    start: int
    num_lines: int
    target: Path
    thinking: Thinking
    turns: Turns
    style: ThinkingStyle
    max_tokens: int


def mask_part(part: GivenPart, tell: Tell) -> int:
    """Mask the chats of one part and write its file; gives the rows. Runs in any process that sees the paths."""
    from components.data.answer_sample import pieces_of_chat, sample_row
    from components.data.answers import write_shard
    from components.data.chat_masks import LeftOut
    from components.targets.load import open_tokenizer

    tokenizer = open_tokenizer(Target("", part.target))
    kept: list[Conversation] = []
    counts: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    impossible: dict[str, str] = {}
    aside: list[dict[str, Any]] = []
    sample: list[dict[str, Any]] = []
    for number, prompt in enumerate(_prompts_of(part)):
        counts["read"] += 1
        tell(number / part.num_lines)
        try:
            rows = _masked_rows(tokenizer, prompt, part)
        except LeftOut as reason:
            aside.append(
                {"source": prompt.source, "reason": reason.reason, "why": str(reason), "row": prompt.prompt_id}
            )
            continue
        counts[rows if isinstance(rows, str) else "kept"] += 1
        for found in () if isinstance(rows, str) else rows:
            kept.append(_conversation(tokenizer, prompt, found))
            agreed.update(found.agreed)
            impossible.update(found.impossible)
            if len(sample) < SHOWN_OF_A_PART:
                sample.append(sample_row(kept[-1].row, pieces_of_chat(found)))
    told = {"counts": counts, "agreed": agreed, "impossible": impossible, "aside": aside, "sample": sample}
    write_shard(part.file, kept, told)
    return len(kept)


def _masked_rows(tokenizer: Any, prompt: Prompt, part: GivenPart) -> list[MaskedChat] | str:
    """The rows of one chat that fit; or why it has none, in a word."""
    from components.data.chat_masks import LeftOut
    from components.data.chat_masks_turns import rows_of_chat, shown_thinking

    chat = given_chat(prompt)
    if chat is None:
        return "no answer"
    try:
        rows = rows_of_chat(tokenizer, chat, prompt.tools, thinking=part.thinking, turns=part.turns, style=part.style)
        written = [row.text for row in rows]  # cached; a template that refuses the chat says so here
    except UserError as error:
        raise LeftOut("the chat template refuses it", str(error)) from error
    if not written:
        return "no answer"
    if not all(shown_thinking(row, part.style) for row in rows):
        raise LeftOut("the chat template writes no thinking", "thinking: drop leaves it out")
    fitting = [masked for masked in (_fitted(row, part.max_tokens) for row in rows) if masked is not None]
    return fitting or "too long"


def _fitted(row: ChatRow, max_tokens: int) -> MaskedChat | None:
    """The row masked, with as many of its answers as fit; None where not even the first does."""
    from components.data.chat_masks import mask_chat

    masked = mask_chat(row)
    if len(masked.ids) <= max_tokens:
        return masked
    shorter = row.without_last_answer()
    return None if shorter is None else _fitted(shorter, max_tokens)


def given_chat(prompt: Prompt) -> tuple[dict[str, Any], ...] | None:
    """The chat with its source's answers; None where it has none."""
    if prompt.conversation is not None:
        return prompt.conversation
    if prompt.messages is not None and prompt.reference.strip():
        return (*prompt.messages, {"role": "assistant", "content": prompt.reference})
    return None


def _conversation(tokenizer: Any, prompt: Prompt, found: MaskedChat) -> Conversation:
    import torch

    from components.data.answers import AnswerRow, Conversation, distinct_bigram_ratio

    answer = [token for token, masked in zip(found.ids, found.mask, strict=True) if masked]
    row = AnswerRow(
        row_id=prompt.prompt_id + found.row.suffix,
        split=prompt.split,
        workload=prompt.workload,
        temperature=None,
        num_prompt_tokens=len(found.ids) - len(answer),
        num_answer_tokens=len(answer),
        ended=answer[-1] in tokenizer.all_special_ids,
        distinct_bigrams=distinct_bigram_ratio(answer),
        language=prompt.language,
        domain=prompt.domain,
        answered_by="source",
        place=prompt.place,
    )
    return Conversation(row, torch.tensor(found.ids), torch.tensor(found.mask))


def _account(notes: Sequence[dict[str, Any]], max_set_aside: float, ctx: Context) -> dict[str, Any]:
    """What became of every chat. Raises UserError where none is kept, or too many are set aside."""
    counts: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    impossible: dict[str, str] = {}
    for note in notes:
        counts.update(note["counts"])
        agreed.update(note["agreed"])
        impossible.update(note["impossible"])
        for line in note["aside"]:
            ctx.set_aside(line["source"], 0, line["why"], line["row"])
    reasons = Counter(line["reason"] for note in notes for line in note["aside"])
    aside, kept = reasons.total(), counts["kept"]
    assert counts["read"] == kept + aside + counts["no answer"] + counts["too long"]
    said = "; ".join(f"{number} x {reason}" for reason, number in reasons.most_common(3))
    if aside > max_set_aside * (kept + aside):
        first = next(line["why"] for note in notes for line in note["aside"])
        raise UserError(
            f"prompts: {aside} of {kept + aside} chats are set aside ({said}; the first: {first}); max_set_aside says "
            "how many may be"
        )
    if not kept:
        raise UserError(
            f"prompts: none of {counts['read']} for train and validation has an answer of its own that fits max_tokens;"
            " mix chats with answers, or let the target answer (data.write_answers)"
        )
    return {
        "num_read": counts["read"],
        "num_kept": kept,
        "num_without_answer": counts["no answer"],
        "num_too_long": counts["too long"],
        "num_set_aside": aside,
        "set_aside": dict(reasons.most_common()),
        "mask_methods": dict(sorted(agreed.items())),
        "mask_methods_impossible": impossible,
    }


def _methods(counts: dict[str, Any]) -> str:
    return ", ".join(counts["mask_methods"])


def _blocks(prompts: Prompts) -> list[tuple[int, int]]:
    """(byte offset, lines) of each part of the prompts' file."""
    file = prompts.path / "prompts.jsonl"
    if not file.is_file():
        raise UserError(f"{prompts.path}: no prompts.jsonl: not a Prompts artifact; make one with data.mix_chats")
    blocks, at = [], 0
    with file.open("rb") as lines:
        start, count = 0, 0
        for line in lines:
            at, count = at + len(line), count + 1
            if count == LINES_OF_A_PART:
                blocks.append((start, count))
                start, count = at, 0
    return [*blocks, (start, count)] if count else blocks


def _prompts_of(part: GivenPart) -> Iterator[Prompt]:
    """The prompts of one part that are for train and validation."""
    from components.data.prompts import prompt_of

    with part.prompts.open("rb") as lines:
        lines.seek(part.start)
        for _ in range(part.num_lines):
            prompt = prompt_of(json.loads(lines.readline()))
            if prompt.split in ANSWERED_SPLITS:
                yield prompt


def _regroup(parts: Sequence[Path], shard_size: int, ctx: Context) -> list[str]:
    """Shards of equal size from the parts, in order; gives their names."""
    from components.data.answers import read_shard, shard_name, write_shard

    names: list[str] = []
    held: list[Conversation] = []

    def write() -> None:
        names.append(shard_name(len(names)))
        write_shard(ctx.out / names[-1], held[:shard_size])
        del held[:shard_size]

    for part in parts:
        held += read_shard(part)
        while len(held) >= shard_size:
            write()
    if held:
        write()
    return names
