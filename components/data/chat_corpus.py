"""Step `data.corpus_from_chats`: makes a pre-training corpus of chats in chat markup, held out by question.

A target trained on these documents learns whose turn it is and when an answer ends. The documents of one language form
a group (`en/...`), so that the held-out loss is reported for each language.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from components.contract import Chats, Context, Corpus, UserError

if TYPE_CHECKING:
    from components.data.chats import Chat


def corpus_from_chats(
    chats: Chats,
    *,
    held_out_percent: Annotated[int, Field(ge=1, le=50)] = 5,
    min_characters: Annotated[int, Field(ge=0)] = 16,
    ctx: Context,
) -> Corpus:
    """Write `train.jsonl` and `held_out.jsonl`, one {"id", "source", "text"} a line, a document a chat.

    A chat is held out by a hash of its first question alone: the same question is never on both sides, whatever the
    answer. Plain documents stay plain text. Chats without an answer, chats with tool calls (which are not text), equal
    documents and short ones are left out and counted. Rows are read one by one; only their ids stay in memory.

    Args:
        held_out_percent: of a hundred questions, how many are never trained on (in expectation).
        min_characters: documents with fewer characters are left out.
    """
    from components.data.chats import read_chats
    from components.data.choosing import hash_number
    from components.targets.chat_markup import MARKUP

    counts: Counter[str] = Counter()
    documents: dict[str, Counter[str]] = {"train": Counter(), "held_out": Counter()}
    characters: Counter[str] = Counter()
    seen_ids: set[int] = set()
    with ExitStack() as stack:
        files = {
            side: stack.enter_context((ctx.out / f"{side}.jsonl").open("w", encoding="utf-8")) for side in documents
        }
        for chat in read_chats(chats):
            counts["read"] += 1
            text, question = document_of(chat)
            reason = _rejection_reason(text, min_characters, seen_ids, chat)
            if reason:
                counts[reason] += 1
                continue
            language = chat.language or "unknown"
            side = "held_out" if hash_number(f"held out:{question}") % 100 < held_out_percent else "train"
            document = {"id": chat.row_id, "source": f"{language}/{chat.source}", "text": text}
            files[side].write(json.dumps(document, ensure_ascii=False) + "\n")
            documents[side][language] += 1
            characters[side] += len(text)
    left_out = {reason: counts[reason] for reason in ("no_answer", "calls_tools", "short", "duplicate")}
    for side in documents:
        if not documents[side]:
            summary = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items())
            raise UserError(
                f"chats ({chats.key[:12]}): no document for {side.replace('_', '-')} of {counts['read']} rows "
                f"({summary}); give more chats"
            )
    return Corpus.of_step(
        ctx,
        {
            "source": "chats",
            "markup": MARKUP,
            "held_out_percent": held_out_percent,
            **{f"{side}_documents": documents[side].total() for side in documents},
            **{f"{side}_characters": characters[side] for side in documents},
            "languages": {side: dict(documents[side].most_common()) for side in documents},
            "read": counts["read"],
            "left_out": left_out,
        },
    )


def document_of(chat: Chat) -> tuple[str, str]:
    """(text, first question with white space normalised) of a document; ("", "") for a chat without a text answer.

    Turns after the last answer are cut off.
    """
    from components.targets.chat_markup import chat_text, without_markup

    if not chat.messages:
        return without_markup(chat.text), " ".join(chat.text.split())
    answered = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    turns = chat.messages[: answered[-1] + 1] if answered else ()
    if not turns or not all(message.get("content") for message in turns):
        return "", ""
    question = next((message["content"] for message in turns if message["role"] == "user"), "")
    return chat_text(turns), " ".join(question.split())


def _rejection_reason(text: str, min_characters: int, seen_ids: set[int], chat: Chat) -> str:
    """The reason to leave a document out, or ""; the id of a kept document is added to `seen_ids`."""
    if any(message.get("tool_calls") for message in chat.messages):
        return "calls_tools"
    if not text:
        return "no_answer"
    if len(text) < min_characters:
        return "short"
    identity = int(chat.row_id, 16)
    if identity in seen_ids:
        return "duplicate"
    seen_ids.add(identity)
    return ""
