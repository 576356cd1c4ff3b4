"""Two origins share rows when they name the same files, or the same split of the same data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from components.data.sources.overlap import Origin, after_split, origins_of, same_rows, share_questions


def test_files_folders_and_patterns_overlap_by_the_files_in_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in ("a/one.jsonl", "a/two.jsonl", "three.jsonl"):
        (tmp_path / name).write_text("{}\n")

    def overlap(one: str, other: str) -> bool:
        origins = [Origin(path, path=str(tmp_path / path)) for path in (one, other)]
        assert same_rows(*origins) == same_rows(*reversed(origins))
        return same_rows(*origins)

    assert overlap("a", "a/one.jsonl") and overlap("a/*.jsonl", "a/two.jsonl") and overlap("a/*.jsonl", "a/t*.jsonl")
    assert not overlap("a", "three.jsonl") and not overlap("a/one.jsonl", "a/two.jsonl") and not overlap("a/o*", "a/t*")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (("o/n", "", "train"), ("o/n", "main", "train"), True),
        (("o/n", "", ""), ("o/n", "", "test"), True),
        (("o/n", "", "train"), ("o/n", "", "test"), False),
        (("o/n", "a", "test"), ("o/n", "b", "test"), False),
        (("o/n", "", "test"), ("o/m", "", "test"), False),
    ],
)
def test_splits_of_a_data_set_are_the_same_where_nothing_tells_them_apart(one: Any, other: Any, same: bool) -> None:
    origins = [Origin("x", repository=name, config=config, split=split) for name, config, split in (one, other)]
    assert same_rows(*origins) is same


def test_two_steps_share_no_question_where_their_splits_agree() -> None:
    settings = {"source": "rows.jsonl", "evaluation_percent": 20}
    (origin,) = origins_of("collect_prompts", settings)
    assert not share_questions(origin, origin)
    (larger,) = origins_of("collect_prompts", {**settings, "evaluation_percent": 30})
    assert share_questions(origin, larger) and not share_questions(larger, origin)
    (benchmark,) = origins_of("collect_prompts", {**settings, "num_train": 0, "evaluation_percent": 100})
    assert benchmark.is_benchmark and share_questions(origin, benchmark)
    (kept_out,) = origins_of("collect_prompts", {"source": "rows.jsonl", "keep_out": "rows.jsonl"})
    assert not share_questions(kept_out, benchmark)


def test_a_mix_splits_the_rows_of_chats_and_a_preset_is_its_repository() -> None:
    (chats,) = origins_of("collect_chats", {"sources": ["ultrachat"]})
    assert chats.repository == "huggingfaceh4/ultrachat_200k" and not chats.held_out_percent
    assert after_split(chats, {"evaluation_percent": 5}).held_out_percent == 5
    (workload,) = origins_of("collect_workloads", {"sources": ["gsm8k"]})
    assert not workload.for_training and workload.repository == "openai/gsm8k"
    assert origins_of("collect_prompts", {"source": "python-stdlib"}) == origins_of("mix_chats", {"x": 1}) == []
