"""What cost cells decode: contexts of any length and number, made of test prompts and the target's own answers.

A cell at KV length L decodes `tokens` tokens after a context that ends half as many before L, so that L is the mean. In
a batch the lengths spread evenly by an eighth to both sides of that: served requests are never of one length, and a
ragged batch is other work (other masks, other writes) than an aligned one. Contexts longer than a text have other
texts before it; real tokens all, since random ones flatter or punish kernels and drafters alike.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST_ANSWER = 512  # tokens generated for one text; longer contexts are put together
SPREAD = 1 / 8  # of the KV length, to each side, in a batch


def longest_context(kv_lengths: Sequence[int], batch_sizes: Sequence[int], tokens: int) -> int:
    """Positions that the longest sequence of any cell takes, before drafts."""
    longest = max(kv_lengths)
    return longest + tokens + (round(longest * SPREAD) if max(batch_sizes) > 1 else 0)


def contexts(texts: Sequence[Sequence[int]], block: int, batch_size: int, kv_len: int, tokens: int) -> list[list[int]]:
    """The contexts of one cell: `batch_size` of them, other ones in every block."""
    middle = max(1, kv_len - tokens // 2)
    found = []
    for row in range(batch_size):
        share = 0.0 if batch_size == 1 else 2 * row / (batch_size - 1) - 1
        found.append(_cut(texts, block + row, max(1, middle + round(share * SPREAD * kv_len))))
    return found


def _cut(texts: Sequence[Sequence[int]], first: int, length: int) -> list[int]:
    """The beginning of a text, or, where it is too short, the whole of it after others."""
    text = list(texts[first % len(texts)])
    if len(text) >= length:
        return text[:length]
    before = first - 1
    while len(text) < length:
        text = [*texts[before % len(texts)], *text]
        before -= 1
    return text[-length:]
