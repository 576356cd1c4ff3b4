"""The pruned draft vocabulary: the target tokens a drafter can guess, and how others write that down.

Most answers use a small part of the target's vocabulary, and the draft's LM head is most of what a draft step costs, so
the head keeps only the N most frequent answer tokens (EAGLE-3, FR-Spec). Counted over answer tokens only: prompts hold
words the target never says. Ids ascend. Engines read offsets: target id = i + d2t[i]; t2d[v] says whether v is in it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DraftVocabulary(NamedTuple):
    """ids: int64 [N] target ids, ascending. num_padded: how many never occurred (lowest unused ids fill the size)."""

    ids: Tensor
    num_padded: int


def default_size(vocab_size: int) -> int:
    """A quarter of the target's vocabulary, at least 256 and at most 32000 (the size published EAGLE-3 drafts use)."""
    return min(vocab_size, max(256, min(32000, vocab_size // 4)))


def choose_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """The `size` most frequent tokens of int64 counts [V]; ties go to the lower id."""
    size = min(size, counts.numel())
    ranked = counts.argsort(descending=True, stable=True)[:size]
    return DraftVocabulary(ranked.sort().values, int((counts[ranked] == 0).sum()))


def coverage(counts: Tensor, ids: Tensor) -> float:
    """Share of the counted tokens [V] that lie inside the draft vocabulary: a bound on greedy acceptance. Empty: 0."""
    return int(counts[ids].sum()) / max(1, int(counts.sum()))


def offsets_of(ids: Tensor) -> Tensor:
    """d2t, int64 [N]: target id minus draft id."""
    return ids - torch.arange(ids.numel())


def membership_of(ids: Tensor, vocab_size: int) -> Tensor:
    """t2d, bool [V]."""
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[ids] = True
    return member


def ids_of(offsets: Tensor) -> Tensor:
    """The target ids that d2t offsets stand for."""
    return offsets + torch.arange(offsets.numel())
