"""No question is on both sides of a mix, whatever is mixed."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixed_rows import WORDS, mixed, row, stored, trained

from components.data.formats.chats import read_dropped
from components.data.formats.prompts import SPLITS, read_prompts
from components.data.formats.splits import question_of


@settings(max_examples=8)
@given(st.integers(0, 1000))
def test_no_question_is_on_both_sides_and_every_row_is_counted(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    rows = []
    for number in range(120):
        asked = f"What  about {chance.randrange(40)}?".replace("  ", chance.choice([" ", "  "]))
        before = chance.choice([[], [{"role": "system", "content": f"Be {chance.choice(WORDS)}."}]])
        later = {"role": "user", "content": f"What about {chance.randrange(40)}?"}
        after = chance.choice([[], [later, {"role": "assistant", "content": "Well."}]])
        rows.append(row(chance.choice("ab"), number, question=asked, before=before, after=after))
    rows += rows[:7]
    root = tmp_path_factory.mktemp("mix")
    for ask_once in (True, False):
        found = mixed(root, stored(root, rows), seed=seed, ask_once=ask_once, limit=60, by="rows")
        judged = {question_of(p) for split in SPLITS if split != "train" for p in read_prompts(found, split)}
        for prompt in trained(found):
            for message in prompt.conversation or ():
                assert message["role"] != "user" or " ".join(message["content"].split()) not in judged
        kept = sum(len(read_prompts(found, split)) for split in SPLITS)
        dropped = Counter(entry["reason"] for entry in read_dropped(found.path))
        assert kept + sum(dropped.values()) == len(rows) == found.info["num_read"]
        assert dict(dropped) == found.info["dropped"] and kept == found.info["num_kept"]
        ids = [prompt.prompt_id for split in SPLITS for prompt in read_prompts(found, split)]
        assert len(set(ids)) == len(ids)


def test_another_seed_chooses_others_and_the_sides_stay(tmp_path: Path) -> None:
    chats = stored(tmp_path, [row("a", number) for number in range(200)])
    one, other = (mixed(tmp_path, chats, seed=seed, limit=50, by="rows") for seed in (0, 1))
    assert {p.prompt_id for p in trained(one)} != {p.prompt_id for p in trained(other)}
    judged = {question_of(p) for split in SPLITS if split != "train" for p in read_prompts(one, split)}
    assert not judged & {question_of(p) for p in trained(other)}


def test_a_further_source_moves_no_question_to_the_other_side(tmp_path: Path) -> None:
    first = [row("a", number) for number in range(100)]
    alone = mixed(tmp_path, stored(tmp_path, first), num_test=99)
    together = mixed(tmp_path, stored(tmp_path, [*first, *(row("b", n) for n in range(100))]), num_test=99)
    judged = {question_of(p) for p in read_prompts(alone, "test")}
    assert judged and not judged & {question_of(p) for p in trained(together)}


def test_evaluation_follows_its_own_weights_in_every_split(tmp_path: Path) -> None:
    rows = [row(name, number) for name in "ab" for number in range(200)]
    settings_ = {"weights": {"a": 1.0, "b": 0.0}, "evaluation_weights": {"a": 1.0, "b": 1.0}, "num_warm_up": 4}
    found = mixed(tmp_path, stored(tmp_path, rows), num_test=10, num_validation=20, **settings_)
    assert {prompt.source for prompt in trained(found)} == {"a"}
    for split, each in (("test", 5), ("validation", 10), ("warm_up", 2)):
        counted = Counter(prompt.source for prompt in read_prompts(found, split))
        assert abs(counted["a"] - each) <= 1 and abs(counted["b"] - each) <= 1
