"""A tiny target with a tokenizer, prompts in four splits, and two drafters trained on its own text for a moment."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bench_subjects import VOCAB, HereInstead, train_briefly
from saved_drafts import saved_draft
from tiny_targets import save_with_words, tiny_llama

from components.contract import Context, Draft, Machine, Prompts, Target
from components.drafts.storage.files import build_draft
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

WORDS = [f"w{number}" for number in range(VOCAB - 3)]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Seven layers of width 32 whose outputs depend on the whole context and do not collapse at once."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("target")
    model = tiny_llama(
        VOCAB, lambda name: 5.0, seed=3, max_position_embeddings=192, tie_word_embeddings=True, pad_token_id=2
    )
    save_with_words(model, folder, WORDS)
    return Target(key="a" * 64, path=folder)


@pytest.fixture(scope="session")
def opened(target: Target) -> AbstractTarget:
    return open_target(target, dtype="float32", kernel="plain")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Prompts:
    folder = tmp_path_factory.mktemp("prompts")
    dice = random.Random(0)
    lines = []
    for split, count in (("train", 16), ("validation", 2), ("test", 5), ("warm_up", 2)):
        for number in range(count):
            text = " ".join(dice.choice(WORDS) for _ in range(dice.randint(3, 12)))
            workload = "even" if number % 2 == 0 else "odd"
            row = {"prompt_id": f"{split}-{number}", "split": split, "workload": workload, "source": "dice"}
            lines.append(json.dumps({**row, "prompt": text, "reference": ""}))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Prompts(key="b" * 64, path=folder)


@pytest.fixture(scope="session")
def drafts(opened: AbstractTarget, target: Target, tmp_path_factory: pytest.TempPathFactory) -> list[Draft]:
    """EAGLE-3 trained for depth 4, MTP for depth 2, on greedy text of the target: right now and then, not always."""
    dice = random.Random(1)
    starts = [[dice.randrange(3, VOCAB) for _ in range(6)] for _ in range(24)]
    made = []
    for method, settings in (("eagle3", {"ttt_steps": 4}), ("mtp", {"mtp_modules": 2})):
        drafter = build_draft(method, opened, settings, torch.arange(VOCAB))
        train_briefly(drafter, opened, starts)
        keys = {"key": method[0] * 64, "target_key": target.key}
        made.append(saved_draft(tmp_path_factory.mktemp(method), drafter, settings, opened, **keys))
    return made


@pytest.fixture
def context(tmp_path: Path) -> Callable[[str], Context]:
    """A new context by name, with directories of its own."""

    def make(name: str) -> Context:
        for part in ("out", "scratch"):
            (tmp_path / name / part).mkdir(parents=True)
        key = (name.encode().hex() + "0" * 64)[:64]
        return Context(key=key, out=tmp_path / name / "out", scratch=tmp_path / name / "scratch", num_threads=1)

    return make


@pytest.fixture(scope="session")
def machine() -> Machine:
    return Machine("test", "cpu", 2, 8.0, "cpu", "cpu", "test")


@pytest.fixture
def here_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process: real decoding in real turns; only starting others, seconds each, is left out."""
    monkeypatch.setattr("components.bench.measurement.process.FreshProcess", HereInstead)
