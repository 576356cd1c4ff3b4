"""Killed at any moment, the finished answers are byte for byte those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import STYLES, styled_tokenizer
from killed_step import Step, context, files_of, run_killed
from tiny_targets import VOCAB_SIZE, make_tiny_target

import components.data.answering_given as given
from components.contract import Prompts, Target
from components.data import write_answers, write_given_answers
from components.data.prompts import Prompt
from components.targets import load_target

SETTINGS: dict[str, Any] = {"max_new_tokens": 10, "batch_size": 3, "shard_size": 6, "sampled_share": 0.5}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    root = tmp_path_factory.mktemp("target")
    make_tiny_target("qwen3", root / "model")
    styled_tokenizer(STYLES["chatml_marked"], VOCAB_SIZE).save_pretrained(root / "model")
    return load_target(model=str(root / "model"), ctx=context(root / "artifact"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("prompts")
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as lines:
        for number in range(20):
            ask = {"role": "user", "content": f"Question {number}, {'why ' * (number % 7)}?"}
            chat = (ask, {"role": "assistant", "content": f"Answer {number}." * (1 + number % 3)})
            split = "validation" if number % 5 == 0 else "train"
            prompt = Prompt(f"{number:016x}", split, "chats", "a.jsonl", None, (ask,), conversation=chat)
            lines.write(json.dumps(prompt.as_json()) + "\n")
    return Prompts("p", folder)


def steps(target: Target, prompts: Prompts) -> dict[str, Step]:
    return {
        "target": lambda ctx: write_answers(target, prompts, **SETTINGS, ctx=ctx),
        "source": lambda ctx: write_given_answers(target, prompts, shard_size=4, ctx=ctx),
    }


def killed_until_done(step: Step, out: Path, moments: Callable[[], int]) -> int:
    """Run and kill until a run gets to its end; how often it was killed."""
    kills = 0
    while run_killed(step, out, moments()):
        kills += 1
    return kills


@pytest.mark.parametrize("name", ["target", "source"])
def test_three_kills_change_no_byte(
    name: str, target: Target, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "LINES_OF_A_PART", 4)
    step = steps(target, prompts)[name]
    step(context(tmp_path / "calm"))
    calm = files_of(tmp_path / "calm")
    for after in (1, 9, 14):
        assert run_killed(step, tmp_path / "out", after)
    step(context(tmp_path / "out"))
    assert files_of(tmp_path / "out") == calm


@pytest.mark.soak
@pytest.mark.parametrize("name", ["target", "source"])
def test_twenty_kills_change_no_byte(
    name: str, target: Target, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "LINES_OF_A_PART", 1)
    draw = random.Random(int(os.environ.get("SOAK_SEED", "0")))
    step = steps(target, prompts)[name]
    step(context(tmp_path / "calm"))
    kills = 0
    while kills < 20:
        out = tmp_path / f"out-{kills}"
        kills += 1 + killed_until_done(step, out, lambda: draw.randint(1, 40))
        assert files_of(out) == files_of(tmp_path / "calm")
