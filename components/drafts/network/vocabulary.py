"""The pruned draft vocabulary: the target tokens a drafter can draft, and its file format.

Most answers use a small part of the target's vocabulary, and the draft's LM head is most of the cost of a draft step,
so the head keeps only the N most frequent answer tokens (EAGLE-3, FR-Spec). Prompts are not counted: they hold words
the target never generates. Other tokens can never be drafted, so the share of answer tokens covered bounds acceptance;
it is reported by language and domain, since a vocabulary of one language drafts nothing in another. Ids ascend. Engines
read offsets: target id = i + d2t[i]; t2d[v]: whether v is in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from components.data.features.format import FeatureSource


class DraftVocabulary(NamedTuple):
    """ids: int64 [N] target ids, ascending. num_padded: how many never occurred (lowest unused ids fill the size)."""

    ids: Tensor
    num_padded: int


LOW_COVERAGE = 0.9
"""Coverage of held-out answers below which a larger draft vocabulary is suggested."""


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

    Rows of unknown language or domain are not counted there.
    """
    member = membership_of(ids, int(data.manifest["vocab_size"]))
    counted: dict[str, dict[str, list[int]]] = {"language": {}, "domain": {}, "workload": {}}
    for row in data.rows(split):
        answer_ids = data.answer_ids(row)
        inside = int(member[answer_ids].sum())
        for field, names in counted.items():
            if name := getattr(row, field):
                pair = names.setdefault(name, [0, 0])
                pair[0] += inside
                pair[1] += answer_ids.numel()
    return {
        field: {name: round(inside / max(1, total), 6) for name, (inside, total) in sorted(names.items())}
        for field, names in counted.items()
    }


def describe_vocabulary(
    vocabulary: DraftVocabulary, covered: float, coverage_by_field: Mapping[str, Mapping[str, float]]
) -> str:
    """Describe size, padding and coverage of held-out answers, by language and domain where there are several."""
    size, padded = vocabulary.ids.numel(), vocabulary.num_padded
    text = f"draft vocabulary {size}"
    if padded:
        text += f" ({padded} of it padding: the answers hold only {size - padded} different tokens)"
    text += f" covers {covered:.2%} of held-out answer tokens"
    if covered < LOW_COVERAGE and not padded:
        text += " (no other token is ever accepted: a larger draft_vocab_size may pay)"
    for field in ("language", "domain"):
        if len(names := coverage_by_field.get(field, {})) > 1:
            text += f"; {field} " + ", ".join(f"{name} {share:.2%}" for name, share in names.items())
    return text


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
