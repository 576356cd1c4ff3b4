"""No question is on both sides of a split, whatever else is in the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from collected_chats import write_lines

from components.contract import Context, Prompts
from components.data import collect_prompts
from components.data.formats import splits as prompt_splits
from components.data.formats.prompts import SPLITS, Prompt, read_prompts
from components.data.formats.splits import question_of


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder)


def questions(number: int) -> list[dict[str, str]]:
    return [{"question": f"What is {index} plus {index}?", "answer": str(2 * index)} for index in range(number)]


def by_split(prompts: Prompts) -> dict[str, set[str]]:
    return {
        split: {" ".join(str(prompt.text or prompt.messages).split()) for prompt in read_prompts(prompts, split)}
        for split in SPLITS
    }


def test_no_prompt_is_in_two_splits_even_with_other_white_space(tmp_path: Path) -> None:
    rows = questions(200)
    respaced = [{"question": row["question"].replace(" ", "  ")} for row in rows]
    file = write_lines(tmp_path / "rows.jsonl", [*rows, *respaced, *rows])
    prompts = collect_prompts(source=str(file), num_train=300, num_test=10, ctx=context(tmp_path / "out"))
    splits = by_split(prompts)
    assert sum(len(part) for part in splits.values()) == len(set().union(*splits.values()))
    for split in SPLITS:
        assert len(read_prompts(prompts, split)) == len(splits[split])
    assert prompts.info["duplicates_across_splits"] + prompts.info["duplicates_within_split"] >= 200


def test_adding_rows_moves_no_training_prompt_to_the_evaluation(tmp_path: Path) -> None:
    def split(number: int) -> dict[str, set[str]]:
        file = write_lines(tmp_path / f"{number}.jsonl", questions(number))
        return by_split(collect_prompts(source=str(file), num_train=999, ctx=context(tmp_path / str(number))))

    few, many = split(100), split(200)
    assert few["train"] <= many["train"]
    assert not few["train"] & (many["test"] | many["validation"] | many["warm_up"])


def test_a_question_is_on_one_side_whatever_the_system_prompt_and_the_file(tmp_path: Path) -> None:
    def chats(system: str) -> list[dict[str, Any]]:
        turns = [[{"role": "user", "content": row["question"]}] for row in questions(150)]
        return [{"messages": [{"role": "system", "content": system}, *turn]} for turn in turns]

    folder = tmp_path / "rows"
    folder.mkdir()
    write_lines(folder / "a.jsonl", chats("Be brief."))
    write_lines(folder / "b.jsonl", chats("Be kind."))
    write_lines(folder / "c.jsonl", [{"prompt": row["question"]} for row in questions(150)])
    prompts = collect_prompts(source=str(folder), num_train=999, num_test=9, ctx=context(tmp_path / "out"))
    asked = {split: {question_of(prompt) for prompt in read_prompts(prompts, split)} for split in SPLITS}
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))
    assert prompts.info["num_train"] == 3 * len(asked["train"]) > 300


def test_memory_follows_the_need_and_the_choice_is_that_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Prompt(f"{number}", "train", "w", "s", f"ask {number}", None) for number in range(400)]
    wanted = {"test": 3, "warm_up": 1, "validation": 3, "train": 9}

    def chosen(prune_above: int) -> dict[str, list[Prompt]]:
        monkeypatch.setattr(prompt_splits, "_PRUNE_ABOVE", prune_above)
        dealt = prompt_splits.split_prompts(rows, wanted, Counter(), seed=3, evaluation_percent=20)
        return prompt_splits.select_prompts(dealt, wanted, Counter(), 3)

    assert chosen(0) == chosen(10**9)
