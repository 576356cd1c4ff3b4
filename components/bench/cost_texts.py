"""The contexts of cost cells, of any length and number, made of test prompts and the target's own answers.

A cell at KV length L decodes `tokens` tokens after a context of L - tokens / 2, so that L is the mean length. In a
batch the lengths spread evenly by an eighth to both sides of that: served requests differ in length, and a ragged batch
needs other masks and writes than an aligned one. Contexts longer than a text have other texts before it; all tokens
are real, since random ones would distort the times of kernels and drafters.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_ANSWER = 512  # tokens generated for one text; longer contexts join several
SPREAD = 1 / 8  # of the KV length, to each side, in a batch


def longest_context(kv_lengths: Sequence[int], batch_sizes: Sequence[int], tokens: int) -> int:
    """Positions that the longest sequence of any cell takes, before drafts."""
    longest = max(kv_lengths)
    return longest + tokens + (round(longest * SPREAD) if max(batch_sizes) > 1 else 0)


def contexts(texts: Sequence[Sequence[int]], block: int, batch_size: int, kv_len: int, tokens: int) -> list[list[int]]:
    """The `batch_size` contexts of one cell, different ones in every block."""
    middle = max(1, kv_len - tokens // 2)
    cell_contexts = []
    for row in range(batch_size):
        share = 0.0 if batch_size == 1 else 2 * row / (batch_size - 1) - 1
        cell_contexts.append(_cut(texts, block + row, max(1, middle + round(share * SPREAD * kv_len))))
    return cell_contexts


def _cut(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """The first `length` tokens of text number `first`; a text that is too short follows others."""
    text = list(texts[first % len(texts)])
    if len(text) >= length:
        return text[:length]
    before = first - 1
    while len(text) < length:
        text = [*texts[before % len(texts)], *text]
        before -= 1
    return text[-length:]
