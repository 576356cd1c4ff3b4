"""The assistant mask of a source's own answers: found by three methods; only what they agree on counts.

A wrong mask trains a drafter on the user's words without a word of warning, and every single method is wrong for some
template. So each row is judged by all methods that its template lets (chat_masks_methods.py), at least two of them, and
a row that they see differently is left out with the reason. Where the target answered itself none of this is needed:
there the generator's own token ids are the mask.
"""

from __future__ import annotations

from dataclasses import dataclass

from components.contract import UserError
from components.data.chat_masks_methods import METHODS, Disagreement, NotPossible, Slot, Span, find_slots
from components.data.chat_masks_turns import ChatRow
from components.data.control_marks import HoldsControlMark, ids_of_unmarked_chat

MIN_METHODS = 2


@dataclass(frozen=True)
class MaskedChat:
    """A row with its mask.

    ids, mask: token ids of the whole text, and whether each is an answer token.
    agreed:    the methods that found this mask. impossible: the others, with what this template does not let them do.
    """

    row: ChatRow
    ids: list[int]
    mask: list[bool]
    agreed: tuple[str, ...]
    impossible: dict[str, str]


class LeftOut(Exception):
    """This row is set aside. reason: as it is counted; str() says more of this row."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


def mask_chat(row: ChatRow) -> MaskedChat:
    """The ids and the mask of a row.

    Raises:
        LeftOut: the methods disagree, fewer than two are possible, or a text of the chat holds a control mark.
        UserError: the template refuses the chat; or it has answers, and the agreed mask is all zero.
    """
    _refuse_unsafe_text(row)
    text = row.text
    ids, offsets = row.rendering.encoded(text)
    found: dict[str, list[Span]] = {}
    impossible: dict[str, str] = {}
    for name, method in METHODS.items():
        try:
            found[name] = method(row.rendering, row.messages, text, row.answers)
        except (NotPossible, UserError) as reason:  # UserError: the template takes the chat, but no part of it
            impossible[name] = str(reason)
        except Disagreement as reason:
            raise LeftOut("masks differ", str(reason)) from reason
    if len(found) < MIN_METHODS:
        raise LeftOut("fewer than two methods", "; ".join(f"{k}: {v}" for k, v in impossible.items()))
    masks = {name: _mask_of(spans, offsets) for name, spans in found.items()}
    first, *others = masks
    for other in others:
        if masks[other] != masks[first]:
            at = next(i for i, pair in enumerate(zip(masks[first], masks[other], strict=True)) if pair[0] != pair[1])
            raise LeftOut("masks differ", f"{first} and {other}, first at token {at} of {len(ids)}")
    for start, _ in found[first]:
        if any(begin < start < stop for begin, stop in offsets):
            raise LeftOut("a token lies across the beginning of an answer")
    if not any(masks[first]):
        raise UserError(f"the mask of a chat with {len(row.answers)} answers is all zero: its template hides answers")
    return MaskedChat(row, ids, masks[first], tuple(found), impossible)


def roles_in(row: ChatRow) -> list[Slot]:
    """Where the contents of a row lie in its text, for showing; [] where the template does not let us find them."""
    try:
        return find_slots(row.rendering, row.messages, row.text)
    except NotPossible:
        return []


def _mask_of(spans: list[Span], offsets: list[tuple[int, int]]) -> list[bool]:
    """A token is an answer's if its first character is; several tokens may share a character (bytes of one)."""
    mask, place = [False] * len(offsets), 0
    for start, stop in sorted(spans):
        while place < len(offsets) and offsets[place][0] < start:
            place += 1
        while place < len(offsets) and offsets[place][0] < stop:
            mask[place] = offsets[place][1] > offsets[place][0]
            place += 1
    return mask


def _refuse_unsafe_text(row: ChatRow) -> None:
    """Raises LeftOut where a stranger's text is no valid text, or would end a turn or begin one."""
    try:
        row.text.encode()
    except UnicodeEncodeError as error:
        raise LeftOut("a message is no valid text", "it holds half of a surrogate pair") from error
    try:
        ids_of_unmarked_chat(row.rendering.tokenizer, row.messages, row.rendering.tools, row.rendering.text)
    except HoldsControlMark as error:
        raise LeftOut("a text holds a control mark", str(error)) from error
