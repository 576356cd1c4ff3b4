"""Three independent methods that locate the assistant's answers in a rendered chat, as character spans.

  prefixes    renders the chat up to a turn with its generation prompt, and with the turn; the answer is the difference;
  generation  uses the template's own {% generation %} marks, where it has them (transformers counts the tokens);
  spans       renders a copy of the chat in which a unique word replaces every content; the text between those words
              then locates the contents in the real rendering.
Each method gives one span for each answer, or raises NotPossible for this template. White space after the last token
of a turn belongs to no answer: templates write it, models do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from components.data.formats.prompts import render_chat, same_day_template
from components.data.sources.turns import Message

Messages = Sequence[Message]
Tools = tuple[dict[str, Any], ...]
"""The offered tools in OpenAI's form."""


class Span(NamedTuple):
    """Characters start .. stop - 1 of the rendered chat."""

    start: int
    stop: int


class Slot(NamedTuple):
    """Where a content of message `turn` lies in the rendered chat."""

    turn: int
    start: int
    stop: int


class NotPossible(Exception):
    """The method does not work for this template and chat; str() goes into the report."""


@dataclass(frozen=True)
class Rendering:
    """A tokenizer's chat template with all of its arguments except the messages."""

    tokenizer: Any
    tools: Tools | None
    options: Mapping[str, Any]

    def text(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        """The chat as text; raises UserError where the template refuses it."""
        return render_chat(
            self.tokenizer, messages, tools=self.tools, generation_prompt=generation_prompt, options=self.options
        )

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered text, and the characters (start, stop) of each."""
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), [(int(start), int(stop)) for start, stop in out["offset_mapping"]]


def trim_span(text: str, start: int, stop: int) -> Span:
    """The span without white space at its end."""
    return Span(start, start + len(text[start:stop].rstrip()))


def by_prefixes(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """Spans from the end of the text before a turn, with its generation prompt, to the end of the text with it."""
    spans = []
    for turn in answers:
        after = rendering.text(messages[: turn + 1]) if turn + 1 < len(messages) else text
        if not text.startswith(after.rstrip()):
            raise NotPossible("the template writes earlier turns otherwise once others follow")
        openings = _openings(rendering, messages[:turn])
        before = _longest_fitting(openings, after.startswith)
        if before is None:
            raise NotPossible("the template writes what stands before an answer otherwise once the answer is there")
        spans.append(trim_span(text, len(before), len(after)))
    return spans


def by_generation_marks(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """Spans from the template's own marks, as transformers turns them into a token mask."""
    if "{% generation" not in (template := same_day_template(rendering.tokenizer, rendering.tools)) and (
        "{%- generation" not in template
    ):
        raise NotPossible("the template has no generation marks")
    out = rendering.tokenizer.apply_chat_template(
        list(messages),
        tools=None if rendering.tools is None else list(rendering.tools),
        chat_template=template,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"verbose": False},
        **rendering.options,
    )
    _, offsets = rendering.encode(text)
    marks = list(out["assistant_masks"])
    assert len(marks) == len(offsets), "the same text has the same tokens"
    runs: list[Span] = []
    for index, mark in enumerate(marks):
        if mark and index and marks[index - 1]:
            runs[-1] = Span(runs[-1].start, offsets[index][1])
        elif mark:
            runs.append(Span(*offsets[index]))
    answer_turns = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if len(runs) != len(answer_turns):
        raise Disagreement(f"the template marks {len(runs)} generations in a chat of {len(answer_turns)} answers")
    run_of_turn = dict(zip(answer_turns, runs, strict=True))
    ends = tuple(rendering.tokenizer.all_special_tokens)
    spans = []
    for turn in answers:
        start, stop = trim_span(text, *run_of_turn[turn])
        after = next((end for end in ends if text.startswith(end, stop)), "")
        spans.append(Span(start, stop + len(after)))  # some templates leave the token that ends the turn unmarked
    return spans


def by_spans(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """Spans from the end of the previous turn (and the generation prompt) to the end of what closes the answer."""
    slots = find_slots(rendering, messages, text)
    skeleton, words = _skeleton(messages)
    spans = []
    for turn in answers:
        place = max((slot.stop for slot in slots if slot.turn < turn), default=0)
        words_before = [word for word in words if word.turn < turn]
        header = _answer_start(rendering, skeleton[:turn], words_before, text, place)
        ends = [slot.stop for slot in slots if slot.turn == turn]
        words_so_far = [word for word in words if word.turn <= turn]
        closing = _after_last_word(rendering.text(skeleton[: turn + 1]), words_so_far).rstrip()
        stop = max(ends, default=place)
        if not text.startswith(closing, stop):
            raise NotPossible("what closes an answer is written otherwise once other turns follow")
        spans.append(trim_span(text, header, stop + len(closing)))
    return spans


METHODS: Mapping[str, Callable[[Rendering, Messages, str, Sequence[int]], list[Span]]] = {
    "prefixes": by_prefixes,
    "generation": by_generation_marks,
    "spans": by_spans,
}


class Disagreement(Exception):
    """The methods give different masks for this chat; it is set aside."""


class _Word(NamedTuple):
    """The word that stands for a content in the skeleton, and the content."""

    turn: int
    word: str
    content: str


def _skeleton(messages: Messages) -> tuple[list[Message], list[_Word]]:
    """The chat with a unique word in place of every content, so that the rest is what the template writes."""
    skeleton: list[Message] = []
    words: list[_Word] = []
    for turn, message in enumerate(messages):
        copy = dict(message)
        for field in ("reasoning_content", "content"):  # in the order in which templates write them
            content = message.get(field)
            if isinstance(content, str) and content.strip():
                copy[field] = f"Qz{turn}w{len(words)}zQ"
                words.append(_Word(turn, copy[field], content))
        skeleton.append(copy)
    return skeleton, words


def find_slots(rendering: Rendering, messages: Messages, text: str) -> list[Slot]:
    """Where each content that the template writes lies in the rendered chat, in order."""
    skeleton, words = _skeleton(messages)
    bare = rendering.text(skeleton)
    slots: list[Slot] = []
    written = [word for word in words if word.word in bare]  # earlier thinking is left out by some templates
    at = place = 0
    for number, word in enumerate(written):
        word_at = bare.find(word.word, at)
        if word_at < 0 or bare.count(word.word) != 1:
            raise NotPossible("the template writes contents twice, or in another order")
        literal = bare[at:word_at]
        at = word_at + len(word.word)
        follows = bare[at : bare.find(written[number + 1].word, at)] if number + 1 < len(written) else bare[at:]
        if not text.startswith(literal, place):
            raise NotPossible("what the template writes between contents depends on the contents")
        place += len(literal)
        content = _as_written(word.content, follows, text, place)
        slots.append(Slot(word.turn, place, place + len(content)))
        place += len(content)
    if text[place:] != bare[at:]:
        raise NotPossible("what the template writes after the last content depends on the contents")
    return slots


def _as_written(content: str, follows: str, text: str, place: int) -> str:
    """The content as this template writes it: as it is, or trimmed at either end."""
    for form in (content, content.strip(), content.rstrip(), content.lstrip(), content.strip("\n")):
        if text.startswith(form + follows, place):
            return form
    raise NotPossible("the template rewrites a content")


def _answer_start(rendering: Rendering, before: Messages, words: Sequence[_Word], text: str, place: int) -> int:
    """Where generation begins in `text`, whose last content before the answer ends at `place`."""
    bare = rendering.text(before)
    closed = _after_last_word(bare, words)
    openings = [part[len(bare) :] for part in _openings(rendering, before) if part.startswith(bare)]
    lead = _longest_fitting([closed + part for part in openings], lambda part: text.startswith(part, place))
    if lead is None:
        raise NotPossible("what stands before an answer is written otherwise once the answer is there")
    return place + len(lead)


def _after_last_word(bare: str, words: Sequence[_Word]) -> str:
    return bare[max((bare.rfind(word.word) + len(word.word) for word in words if word.word in bare), default=0) :]


def _openings(rendering: Rendering, before: Messages) -> list[str]:
    """The possible texts before an answer: with all, less and none of its generation prompt.

    Some generation prompts already begin the answer (R1's <think>). They are shortened by whole control tokens only, so
    that a content which happens to begin alike is not mistaken for one.
    """
    if not before:
        raise NotPossible("the chat begins with an answer")
    bare, prompted = rendering.text(before), rendering.text(before, generation_prompt=True)
    parts = [prompted]
    if prompted.startswith(bare):
        cuts = {len(bare)}
        for token in rendering.tokenizer.get_added_vocab():
            at = prompted.find(token, len(bare))
            while at >= 0:
                cuts |= {at, at + len(token)}
                at = prompted.find(token, at + 1)
        parts += [prompted[:cut] for cut in sorted(cuts, reverse=True)]
    return parts


def _longest_fitting(parts: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    return next((part for part in sorted(set(parts), key=len, reverse=True) if fits(part)), None)
