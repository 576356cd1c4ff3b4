"""The pruned draft vocabulary: the target tokens a drafter can guess, and how others write that down.

Most answers use a small part of the target's vocabulary, and the draft's LM head is most of what a draft step costs, so
the head keeps only the N most frequent answer tokens (EAGLE-3, FR-Spec). Counted over answer tokens only: prompts hold
words the target never says. What it leaves out can never be guessed, so the share of answer tokens that it covers
bounds acceptance, and it is told by language and domain: a vocabulary of one language guesses nothing in another.
Ids ascend. Engines read offsets: target id = i + d2t[i]; t2d[v] says whether v is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from components.data.features import FeatureSource


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


def coverage_by(data: FeatureSource, split: str, ids: Tensor) -> dict[str, dict[str, float]]:
    """`coverage` of a split's answers by language, domain and workload: {"language": {"en": 0.99, ...}, ...}.

    Rows whose language or domain is not known count under none.
    """
    member = membership_of(ids, int(data.manifest["vocab_size"]))
    counted: dict[str, dict[str, list[int]]] = {"language": {}, "domain": {}, "workload": {}}
    for row in data.rows(split):
        said = data.answer_ids(row)
        inside = int(member[said].sum())
        for field, names in counted.items():
            if name := getattr(row, field):
                pair = names.setdefault(name, [0, 0])
                pair[0] += inside
                pair[1] += said.numel()
    return {
        field: {name: round(inside / max(1, total), 6) for name, (inside, total) in sorted(names.items())}
        for field, names in counted.items()
    }


def described(vocabulary: DraftVocabulary, covered: float, by: Mapping[str, Mapping[str, float]]) -> str:
    """Size, padding and coverage of held-out answers in words; languages and domains where there are several."""
    size, padded = vocabulary.ids.numel(), vocabulary.num_padded
    told = f"draft vocabulary {size}"
    if padded:
        told += f" ({padded} of it padding: the answers hold only {size - padded} different tokens)"
    told += f" covers {covered:.2%} of held-out answer tokens"
    for field in ("language", "domain"):
        if len(names := by.get(field, {})) > 1:
            told += f"; {field} " + ", ".join(f"{name} {share:.2%}" for name, share in names.items())
    return told


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
