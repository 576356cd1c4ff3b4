"""What a draft vocabulary leaves out is told by language and domain, counted over answer tokens only."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from components.data.features.format import StoredFeatures
from components.data.formats.responses import AnswerRow, Conversation, write_shard
from components.drafts.network.vocabulary import choose_vocabulary, coverage, coverage_by, describe_vocabulary

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
