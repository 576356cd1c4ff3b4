"""Killed at any moment, the finished answers are byte for byte those of an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import STYLES, styled_tokenizer
from killed_step import Step, context, files_of, run_killed
from tiny_targets import VOCAB_SIZE, make_tiny_target

import components.data.responses.given as given
from components.contract import Prompts, Target
from components.data import write_answers, write_given_answers
from components.data.formats.prompts import Prompt
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


def killed_until_done(step: Step, out: Path, moments: Callable[[], int]) -> list[int]:
    """Run and kill until a run gets to its end; the events at which it was killed."""
    kills = []
    while run_killed(step, out, at := moments()):
        kills.append(at)
    return kills


@pytest.mark.parametrize("name", ["target", "source"])
def test_three_kills_change_no_byte(
    name: str, target: Target, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(given, "LINES_PER_PART", 4)
    step = steps(target, prompts)[name]
    step(context(tmp_path / "calm"))
    calm = files_of(tmp_path / "calm")
    for after in (1, 9, 14):
        assert run_killed(step, tmp_path / "out", after)
    step(context(tmp_path / "out"))
    assert files_of(tmp_path / "out") == calm


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["target", "source"])
def test_twenty_kills_change_no_byte(
    name: str, target: Target, prompts: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.record import write_record  # found from the project's root only, where `make soak` runs

    monkeypatch.setattr(given, "LINES_PER_PART", 1)
    seed, started = int(os.environ.get("DRAFTSMITH_SOAK_SEED", "0")), time.monotonic()
    draw = random.Random(seed)
    step = steps(target, prompts)[name]
    step(context(tmp_path / "calm"))
    calm = files_of(tmp_path / "calm")
    kills: list[dict[str, int]] = []
    faults: list[str] = []
    homes = 0
    while len(kills) < 20:
        out = tmp_path / f"home-{homes}"
        homes += 1
        kills += [{"home": homes, "at_event": at} for at in killed_until_done(step, out, lambda: draw.randint(1, 40))]
        if files_of(out) != calm:
            faults.append(f"home {homes} differs from the undisturbed run")
    told = {"kills": len(kills), "seed": seed, "homes": homes, "files": len(calm)}
    seconds = round(time.monotonic() - started, 1)
    write_record(f"soak-answers-of-{name}-kills", {**told, "seconds": seconds, "faults": faults, "each_kill": kills})
    assert faults == []
