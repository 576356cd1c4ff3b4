"""Steps `data.collect_corpus` and `data.corpus_from_chats`: text documents to pre-train on, and a held-out part.

`collect_corpus` takes the standard library's files and holds out those of `python_stdlib.is_held_out`; prompts cut from
the same files for evaluation use the same function, so that nothing leaks. `corpus_from_chats` writes chats in chat
markup and holds them out by question: a target trained on them learns whose turn it is and when an answer ends. The
documents of one language form a group (`en/...`), so that the held-out loss is reported for each language.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections import Counter
from contextlib import ExitStack

from components.contract import Chats, Context, Corpus, UserError
from components.data.formats.chats import Chat, read_chats
from components.data.formats.prompts import hash_number
from components.data.settings import CorpusSource
from components.data.sources.python_stdlib import HELD_OUT_PERCENT, stdlib_files
from components.targets.pretraining.tokenizer import MARKUP, chat_text, without_markup


def collect_corpus(*, source: CorpusSource, with_tests: bool, min_characters: int, ctx: Context) -> Corpus:
    """The step `data.collect_corpus`; its settings are explained in components/data/steps.py."""
    held_out: list[dict[str, str]] = []
    train: list[dict[str, str]] = []
    seen_digests: set[str] = set()
    counts: Counter[str] = Counter()
    files = [file for file in stdlib_files() if with_tests or not file.source.startswith("stdlib-tests/")]
    for file in sorted(files, key=lambda file: not file.held_out):  # held-out first: its copies must not be trained on
        try:
            text = file.read()
        except (UnicodeError, SyntaxError) as error:
            ctx.set_aside(file.source, 1, f"cannot be decoded: {error}")
            counts["unreadable"] += 1
            continue
        digest = hashlib.sha256("\n".join(line.rstrip() for line in text.splitlines()).encode("utf-8")).hexdigest()
        if len(text) < min_characters or digest in seen_digests:
            counts["short_or_duplicate"] += 1
            continue
        seen_digests.add(digest)
        document = {"id": digest[:16], "source": file.source, "text": text}
        (held_out if file.held_out else train).append(document)
    if not train or not held_out:
        raise UserError(
            f"source {source}: no readable Python files in this interpreter's library; install python3 in full"
        )
    for name, documents in (("train", train), ("held_out", held_out)):
        with (ctx.out / f"{name}.jsonl").open("w", encoding="utf-8") as out:
            for document in sorted(documents, key=lambda document: document["source"]):
                out.write(json.dumps(document) + "\n")
    return Corpus.of_step(
        ctx,
        {
            "source": source,
            "licence": "PSF-2.0",
            "python_version": platform.python_version(),
            "held_out_percent": HELD_OUT_PERCENT,
            "train_documents": len(train),
            "held_out_documents": len(held_out),
            "train_characters": sum(len(document["text"]) for document in train),
            "held_out_characters": sum(len(document["text"]) for document in held_out),
            **counts,
        },
    )


def corpus_from_chats(chats: Chats, *, held_out_percent: int, min_characters: int, ctx: Context) -> Corpus:
    """The step `data.corpus_from_chats`; its settings are explained in components/data/steps.py."""
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
