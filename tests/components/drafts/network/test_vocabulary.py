"""The pruned vocabulary: which tokens, in which order, and that what engines read leads back to them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.data.features.format import StoredFeatures
from components.data.formats.responses import AnswerRow, Conversation, write_shard
from components.drafts.network.vocabulary import (
    choose_vocabulary,
    coverage,
    coverage_by,
    default_size,
    describe_vocabulary,
    ids_of,
    membership_of,
    offsets_of,
)

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=40)


@given(COUNTS, st.integers(1, 50))
def test_the_most_frequent_tokens_are_kept_and_padding_is_counted(counts: list[int], size: int) -> None:
    found = choose_vocabulary(torch.tensor(counts), size)
    ids = found.ids.tolist()
    assert ids == sorted(set(ids)) and len(ids) == min(size, len(counts))
    kept, dropped = [counts[i] for i in ids], [c for i, c in enumerate(counts) if i not in ids]
    assert not dropped or min(kept) >= max(dropped)
    padded = [i for i in ids if counts[i] == 0]
    assert found.num_padded == len(padded)
    unused = [i for i, c in enumerate(counts) if c == 0]
    assert padded == unused[: len(padded)]  # the lowest unused ids


@given(COUNTS, st.integers(1, 50))
def test_offsets_and_membership_lead_back_to_the_ids(counts: list[int], size: int) -> None:
    ids = choose_vocabulary(torch.tensor(counts), size).ids
    assert torch.equal(ids_of(offsets_of(ids)), ids)
    assert membership_of(ids, len(counts)).nonzero()[:, 0].tolist() == ids.tolist()


def test_coverage_is_the_share_of_occurrences() -> None:
    assert coverage(torch.tensor([6, 0, 3, 1]), torch.tensor([0, 3])) == 0.7
    assert coverage(torch.tensor([0, 0]), torch.tensor([0])) == 0.0


def test_default_size_stays_within_the_vocabulary() -> None:
    assert [default_size(v) for v in (100, 4096, 151_936)] == [100, 1024, 32_000]


VOCAB_SIZE = 12
ANSWERS = {  # language, domain -> prompt, answer
    ("en", "code"): ([9, 9, 9, 9], [1, 1, 1, 2]),
    ("en", "chat"): ([9, 9], [1, 3]),
    ("zh", "chat"): ([9, 9, 9], [7, 8, 7, 1]),
    ("", ""): ([9], [1, 1]),
}


@pytest.fixture
def data(tmp_path: Path) -> StoredFeatures:
    rows, conversations = [], []
    for number, ((language, domain), (prompt, answer)) in enumerate(ANSWERS.items()):
        row = AnswerRow(str(number), "train", "w", 0.0, len(prompt), len(answer), True, 1.0, language, domain)
        ids = torch.tensor([*prompt, *answer])
        conversations.append(Conversation(row, ids, torch.arange(len(ids)) >= len(prompt)))
        facts = dataclasses.asdict(row)
        known = {
            name: facts[name] for name in ("row_id", "workload", "split", "num_answer_tokens", "language", "domain")
        }
        rows.append({**known, "shard": "shard-00000.safetensors", "index": number, "num_tokens": len(ids)})
    write_shard(tmp_path / "shard-00000.safetensors", conversations)
    return StoredFeatures(tmp_path, {"rows": rows, "vocab_size": VOCAB_SIZE})


def test_only_answer_tokens_are_counted(data: StoredFeatures) -> None:
    counts = data.token_counts("train")
    assert counts.tolist() == [0, 7, 1, 1, 0, 0, 0, 2, 1, 0, 0, 0]  # 9 stands in every prompt
    assert choose_vocabulary(counts, 2).ids.tolist() == [1, 7]


def test_coverage_is_told_by_language_domain_and_workload(data: StoredFeatures) -> None:
    counts = data.token_counts("train")
    vocabulary = choose_vocabulary(counts, 3)  # 1, 7 and, of those that occur once, the lowest: 2
    assert vocabulary.ids.tolist() == [1, 2, 7]
    by = coverage_by(data, "train", vocabulary.ids)
    assert by == {
        "language": {"en": round(5 / 6, 6), "zh": 0.75},
        "domain": {"chat": round(4 / 6, 6), "code": 1.0},
        "workload": {"w": round(10 / 12, 6)},
    }
    assert by["workload"]["w"] == round(coverage(counts, vocabulary.ids), 6)
    told = describe_vocabulary(vocabulary, 10 / 12, by)
    assert "language en 83.33%, zh 75.00%" in told and "padding" not in told


def test_padding_is_told(data: StoredFeatures) -> None:
    vocabulary = choose_vocabulary(data.token_counts("train"), 8)
    assert vocabulary.num_padded == 3
    told = describe_vocabulary(vocabulary, 1.0, {})
    assert "draft vocabulary 8 (3 of it padding: the answers hold only 5 different tokens)" in told
