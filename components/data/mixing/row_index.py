"""The table of rows that a mix is planned with: a few numbers a row, 60 MB for 1,000,000 rows of any length.

It holds hashes of the row, of its first question and of its later questions; source, language and domain as numbers;
and the row's size. The conversations themselves are read a second time, by the writer.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy
from numpy.typing import NDArray

from components.contract import Chats, Target
from components.data.formats.chats import Chat, batch_chats, iter_batches
from components.data.formats.prompts import Prompt, content_of, hash_number, question_of
from components.data.sources.bad_rows import BadRow
from components.data.sources.shapes import read_shape
from components.data.sources.turns import Message
from components.outside_json import JsonObject
from components.targets.load import open_tokenizer

DIMENSIONS: Final = ("source", "language", "domain")
CHARS_PER_TOKEN: Final = {"": 4.0, "zh": 1.6, "ja": 1.6, "ko": 1.8}
"""Rough averages of current tokenizers by language; "" is every other language."""
NO_QUESTION: Final = 255
"""In `Rows.percent`: the row asks nothing (no user's turn, or a text too short to be cut)."""


@dataclass(frozen=True)
class Rows:
    """One entry a row, in the order read.

    row:      uint64, the row's id. content: uint64, hash of the whole prompt. question: uint64, hash of what the user
        asks first, as in collect/prompts.py. percent: uint8, question % 100: the side of the split; or NO_QUESTION.
    labels:   source, language, domain -> int32, an index into names[...], which are in alphabetical order.
    tokens:   int64. characters: int64.
    later_row, later_question: what users ask in later turns: the row's index, the hash.
    """

    row: NDArray[Any]
    content: NDArray[Any]
    question: NDArray[Any]
    percent: NDArray[Any]
    labels: dict[str, NDArray[Any]]
    names: dict[str, list[str]]
    tokens: NDArray[Any]
    characters: NDArray[Any]
    later_row: NDArray[Any]
    later_question: NDArray[Any]


def prompt_of_chat(chat: Chat, split: str = "train") -> Prompt | None:
    """The prompt made from a row; None where the row asks nothing.

    A chat's prompt is its turns before the first answer, and its `conversation` is the whole chat. A text's prompt is
    its beginning, as data.collect_prompts cuts it. The prompt has the row's id: equal conversations have equal ids.
    """
    labels: JsonObject = {name: getattr(chat, name) for name in DIMENSIONS} | {"workload": chat.source}
    if chat.text:
        try:
            cut = read_shape({"text": chat.text})
        except BadRow:
            return None
        return Prompt(chat.row_id, split, text=cut.text, messages=None, reference=cut.reference, **labels)
    question_turns: list[Message] = []
    for message in chat.messages:
        if message["role"] not in ("system", "user") and any(turn["role"] == "user" for turn in question_turns):
            break
        question_turns.append(message)
    if not any(turn["role"] == "user" for turn in question_turns):
        return None
    answered = len(question_turns) < len(chat.messages)
    return Prompt(
        chat.row_id,
        split,
        text=None,
        messages=tuple(question_turns),
        reference=str(chat.messages[len(question_turns)].get("content") or "") if answered else "",
        tools=tuple(json.loads(chat.tools)) if chat.tools else None,
        conversation=chat.messages if answered else None,
        **labels,
    )


def read_rows(chats: Sequence[Chats], count_tokens: CountTokens, report_progress: Callable[[int], None]) -> Rows:
    """Read every row of every input once. report_progress: called with the number of rows read so far."""
    ids = {name: array("Q") for name in ("row", "content", "question", "later_question")}
    numbers = {name: array("q") for name in ("tokens", "characters", "later_row", *DIMENSIONS)}
    percent = array("B")
    codes: dict[str, dict[str, int]] = {dimension: {} for dimension in DIMENSIONS}
    for batch in (batch for artifact in chats for batch in iter_batches(artifact)):
        rows = list(batch_chats(batch))
        numbers["tokens"].extend(count_tokens(rows))
        for chat in rows:
            at = len(ids["row"])
            ids["row"].append(int(chat.row_id, 16))
            numbers["characters"].append(chat.num_chars)
            for dimension in DIMENSIONS:
                code_of = codes[dimension]
                numbers[dimension].append(code_of.setdefault(getattr(chat, dimension), len(code_of)))
            prompt = prompt_of_chat(chat)
            question = hash_number(f"split:{question_of(prompt)}") if prompt is not None else 0
            content = content_of(prompt) + chat.tools if prompt is not None else ""
            ids["question"].append(question)
            ids["content"].append(hash_number(content))
            percent.append(question % 100 if prompt is not None else NO_QUESTION)
            for later in _later_questions(chat, prompt):
                ids["later_question"].append(later)
                numbers["later_row"].append(at)
        report_progress(len(ids["row"]))
    read = {name: numpy.frombuffer(values, dtype=numpy.uint64) for name, values in ids.items()}
    sizes = {name: numpy.frombuffer(values, dtype=numpy.int64) for name, values in numbers.items()}
    labels, names = {}, {}
    for dimension in DIMENSIONS:  # renumbered in alphabetical order, so that the order of rows does not matter
        names[dimension] = sorted(codes[dimension])
        place = {name: number for number, name in enumerate(names[dimension])}
        renumbered = numpy.array([place[name] for name in codes[dimension]], dtype=numpy.int32)
        labels[dimension] = renumbered[sizes[dimension]] if len(renumbered) else numpy.zeros(0, dtype=numpy.int32)
    return Rows(
        row=read["row"],
        content=read["content"],
        question=read["question"],
        percent=numpy.frombuffer(percent, dtype=numpy.uint8),
        labels=labels,
        names=names,
        tokens=sizes["tokens"],
        characters=sizes["characters"],
        later_row=sizes["later_row"],
        later_question=read["later_question"],
    )


def _later_questions(chat: Chat, prompt: Prompt | None) -> Iterable[int]:
    """Hashes of the user turns after the first answer, each hashed like a first question."""
    if prompt is None or prompt.messages is None:
        return
    for message in chat.messages[len(prompt.messages) :]:
        if message["role"] == "user" and message.get("content"):
            yield hash_number(f"split:{question_of(replace(prompt, messages=(message,)))}")


CountTokens = Callable[[Sequence[Chat]], list[int]]
"""Rows -> the number of tokens of each."""


def estimate_by_characters(chars_per_token: Mapping[str, float]) -> CountTokens:
    """A counter that estimates tokens from characters, by language."""
    ratios = {**CHARS_PER_TOKEN, **chars_per_token}
    return lambda rows: [max(1, round(row.num_chars / ratios.get(row.language, ratios[""]))) for row in rows]


def count_by_tokenizer(target: Target) -> CountTokens:
    """A counter that uses the target's tokenizer; it leaves out what a chat template puts between the turns."""
    tokenizer = open_tokenizer(target)

    def count(rows: Sequence[Chat]) -> list[int]:
        token_ids = tokenizer([row.as_text() for row in rows], add_special_tokens=False, verbose=False)["input_ids"]
        return [max(1, len(ids)) for ids in token_ids]

    return count
