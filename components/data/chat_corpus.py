"""The step that makes a corpus to pre-train on out of chats: whole conversations in chat markup, held out by question.

A target that has learnt from these documents knows turns: whose turn it is, and when an answer ends. The documents of
one language are a group (`en/...`), so that the held-out loss is told for each language by itself.
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

    A chat is held out by a hash of its first question alone: the same question never stands on both sides, whatever
    was answered. Plain documents stay plain text. Left out and counted: chats without an answer, chats that call
    tools (their calls are not text), equal documents, and short ones. Rows are read one by one; of those read before
    only their ids stay in memory.

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
    seen: set[int] = set()
    with ExitStack() as stack:
        files = {
            side: stack.enter_context((ctx.out / f"{side}.jsonl").open("w", encoding="utf-8")) for side in documents
        }
        for chat in read_chats(chats):
            counts["read"] += 1
            text, question = document_of(chat)
            why = _why_left_out(text, min_characters, seen, chat)
            if why:
                counts[why] += 1
                continue
            language = chat.language or "unknown"
            side = "held_out" if hash_number(f"held out:{question}") % 100 < held_out_percent else "train"
            document = {"id": chat.row_id, "source": f"{language}/{chat.source}", "text": text}
            files[side].write(json.dumps(document, ensure_ascii=False) + "\n")
            documents[side][language] += 1
            characters[side] += len(text)
    left_out = {why: counts[why] for why in ("no_answer", "calls_tools", "short", "duplicate")}
    for side in documents:
        if not documents[side]:
            said = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in left_out.items())
            raise UserError(
                f"chats ({chats.key[:12]}): no document for {side.replace('_', '-')} of {counts['read']} rows "
                f"({said}); give more chats"
            )
    return Corpus.made(
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
    """(text of the document, its first question up to white space); ("", "") for a chat that has no answer as text.

    What follows the last answer is cut off: nobody has answered it.
    """
    from components.targets.chat_markup import chat_text, without_markup

    if not chat.messages:
        return without_markup(chat.text), " ".join(chat.text.split())
    answered = [number for number, message in enumerate(chat.messages) if message["role"] == "assistant"]
    kept = chat.messages[: answered[-1] + 1] if answered else ()
    if not kept or not all(message.get("content") for message in kept):
        return "", ""
    asked = next((message["content"] for message in kept if message["role"] == "user"), "")
    return chat_text(kept), " ".join(asked.split())


def _why_left_out(text: str, min_characters: int, seen: set[int], chat: Chat) -> str:
    """The reason to leave a document out, or ""; what is kept is remembered in `seen`."""
    if any(message.get("tool_calls") for message in chat.messages):
        return "calls_tools"
    if not text:
        return "no_answer"
    if len(text) < min_characters:
        return "short"
    identity = int(chat.row_id, 16)
    if identity in seen:
        return "duplicate"
    seen.add(identity)
    return ""
