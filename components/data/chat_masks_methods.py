"""Which characters of a rendered chat the assistant said, found in three ways that know nothing of each other.

  prefixes    what a template adds for a turn: rendered up to the turn with its generation prompt, and with the turn;
  generation  what the template itself marks with {% generation %}, where it does (transformers counts the tokens);
  spans       where the contents lie: a copy of the chat in which every content is a word of its own is rendered, and
              the text between those words leads through the real rendering.
Each gives one span for each answer, or says why this template does not let it. White space after the last token of a
turn belongs to nobody: templates write it, models do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from components.data.prompts import render_chat, same_day_template

Messages = Sequence[dict[str, Any]]


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
    """This method cannot say for this template and chat, in words that go into the report."""


@dataclass(frozen=True)
class Rendering:
    """A tokenizer's chat template with all that it is told besides messages."""

    tokenizer: Any
    tools: tuple[dict[str, Any], ...] | None
    options: Mapping[str, Any]

    def text(self, messages: Messages, *, generation_prompt: bool = False) -> str:
        """The chat as text; raises UserError where the template refuses it."""
        return render_chat(
            self.tokenizer, messages, tools=self.tools, generation_prompt=generation_prompt, options=self.options
        )

    def encoded(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of a rendered text, and the characters (start, stop) of each."""
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return list(out["input_ids"]), [(int(start), int(stop)) for start, stop in out["offset_mapping"]]


def trimmed(text: str, start: int, stop: int) -> Span:
    """The span without white space at its end."""
    return Span(start, start + len(text[start:stop].rstrip()))


def by_prefixes(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """From where the text before a turn ends, its generation prompt included, to where the text with the turn ends."""
    found = []
    for turn in answers:
        after = rendering.text(messages[: turn + 1]) if turn + 1 < len(messages) else text
        if not text.startswith(after.rstrip()):
            raise NotPossible("the template writes earlier turns otherwise once others follow")
        opening = _opening(rendering, messages[:turn])
        before = _longest(opening, after.startswith)
        if before is None:
            raise NotPossible("the template writes what stands before an answer otherwise once the answer is there")
        found.append(trimmed(text, len(before), len(after)))
    return found


def by_generation_marks(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """The template's own marks, as transformers turns them into a token mask."""
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
    _, offsets = rendering.encoded(text)
    marks = list(out["assistant_masks"])
    assert len(marks) == len(offsets), "the same text has the same tokens"
    runs: list[Span] = []
    for index, mark in enumerate(marks):
        if mark and index and marks[index - 1]:
            runs[-1] = Span(runs[-1].start, offsets[index][1])
        elif mark:
            runs.append(Span(*offsets[index]))
    said = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    if len(runs) != len(said):
        raise Disagreement(f"the template marks {len(runs)} generations in a chat of {len(said)} answers")
    of_turn = dict(zip(said, runs, strict=True))
    ends = tuple(rendering.tokenizer.all_special_tokens)
    found = []
    for turn in answers:
        start, stop = trimmed(text, *of_turn[turn])
        after = next((end for end in ends if text.startswith(end, stop)), "")
        found.append(Span(start, stop + len(after)))  # some templates leave the token that ends the turn unmarked
    return found


def by_spans(rendering: Rendering, messages: Messages, text: str, answers: Sequence[int]) -> list[Span]:
    """Between the end of the turn before (and the generation prompt) and the end of what closes the answer."""
    slots = find_slots(rendering, messages, text)
    skeleton, words = _skeleton(messages)
    found = []
    for turn in answers:
        place = max((slot.stop for slot in slots if slot.turn < turn), default=0)
        said = [word for word in words if word.turn < turn]
        header = _header(rendering, skeleton[:turn], said, text, place)
        own = [slot.stop for slot in slots if slot.turn == turn]
        here = [word for word in words if word.turn <= turn]
        closing = _after_last_word(rendering.text(skeleton[: turn + 1]), here).rstrip()
        stop = max(own, default=place)
        if not text.startswith(closing, stop):
            raise NotPossible("what closes an answer is written otherwise once other turns follow")
        found.append(trimmed(text, header, stop + len(closing)))
    return found


METHODS: Mapping[str, Callable[[Rendering, Messages, str, Sequence[int]], list[Span]]] = {
    "prefixes": by_prefixes,
    "generation": by_generation_marks,
    "spans": by_spans,
}


class Disagreement(Exception):
    """The methods do not say the same of this chat: it is set aside."""


class _Word(NamedTuple):
    """The word that stands for a content in the skeleton, and the content."""

    turn: int
    word: str
    content: str


def _skeleton(messages: Messages) -> tuple[list[dict[str, Any]], list[_Word]]:
    """The chat with a word of its own in place of every content; what a template writes is what is left."""
    skeleton: list[dict[str, Any]] = []
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
        where = bare.find(word.word, at)
        if where < 0 or bare.count(word.word) != 1:
            raise NotPossible("the template writes contents twice, or in another order")
        literal = bare[at:where]
        at = where + len(word.word)
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


def _header(rendering: Rendering, before: Messages, said: Sequence[_Word], text: str, place: int) -> int:
    """Where generation begins in `text`, whose last content before the answer ends at `place`."""
    bare = rendering.text(before)
    closed = _after_last_word(bare, said)
    opening = [part[len(bare) :] for part in _opening(rendering, before) if part.startswith(bare)]
    lead = _longest([closed + part for part in opening], lambda part: text.startswith(part, place))
    if lead is None:
        raise NotPossible("what stands before an answer is written otherwise once the answer is there")
    return place + len(lead)


def _after_last_word(bare: str, words: Sequence[_Word]) -> str:
    return bare[max((bare.rfind(word.word) + len(word.word) for word in words if word.word in bare), default=0) :]


def _opening(rendering: Rendering, before: Messages) -> list[str]:
    """The text before an answer, ever less of its generation prompt: some prompts begin the answer (R1's <think>).

    It is shortened by whole control tokens only, so that a content which happens to begin alike is not mistaken.
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


def _longest(parts: Sequence[str], fits: Callable[[str], bool]) -> str | None:
    return next((part for part in sorted(set(parts), key=len, reverse=True) if fits(part)), None)
