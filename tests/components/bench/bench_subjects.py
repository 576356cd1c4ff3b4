"""What the tests of this room measure, and with what: drafters trained for a moment, processes that are none."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from components.bench.end_to_end.arms import Arm
from components.contract import Draft, Target
from components.drafts.interface import AbstractDraft, Batch
from components.drafts.settings import LookaheadSettings
from components.drafts.storage.files import save_untrained
from components.targets.generate import continue_batch
from components.targets.interface import AbstractTarget

VOCAB = 64


def train_briefly(drafter: AbstractDraft, opened: AbstractTarget, starts: list[list[int]]) -> None:
    """Forty steps on one batch of greedy continuations: right now and then, not always."""
    answers = continue_batch(opened, starts, max_new_tokens=48, stop_at_eos=False)
    ids = torch.tensor([start + answer.ids for start, answer in zip(starts, answers, strict=True)])
    passed = opened.forward(ids, opened.new_cache(*ids.shape), logits="none", features=True)
    assert passed.taps is not None and passed.last is not None
    mask = torch.ones_like(ids, dtype=torch.bool)
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    batch = Batch(ids.clone(), mask, passed.taps.clone(), passed.last.clone(), lengths)
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=4e-3)
    for _ in range(40):
        optimiser.zero_grad()
        drafter.losses(batch).loss.backward()
        optimiser.step()
    drafter.requires_grad_(False)


class HereInstead:
    """Answers as a fresh process does, JSON and all, but in this very one: for tests that starting one only slows."""

    def __init__(self, what: str, order: Mapping[str, Any]) -> None:
        module, name = what.split(":")
        self._answer = getattr(importlib.import_module(module), name)(through_json(order))
        self.reply_at_start = through_json(self._answer.facts)

    def ask(self, request: Mapping[str, Any]) -> Any:
        return through_json(self._answer(through_json(request)))

    def __exit__(self, *error: object) -> None:
        return None


def through_json(what: Any) -> Any:
    return json.loads(json.dumps(what))


def order_of(target: Target, drafts: Sequence[Draft], arms: Sequence[Arm], **changes: Any) -> dict[str, Any]:
    """What a MeasuringProcess is told: one thread, float32, plain kernels, unless `changes` say something else."""
    return {
        "target": {"key": target.key, "path": str(target.path)},
        "drafts": [{"key": draft.key, "path": str(draft.path), "kernel": "plain"} for draft in drafts],
        "arms": [dataclasses.asdict(arm) for arm in arms],
        "kernel": "plain",
        "rival": False,
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "graphs": False,
        "seed": "0:1",
        **changes,
    }


LOOKAHEAD_CANNOT: list[tuple[dict[str, list[int]], str]] = [
    ({"batch_sizes": [1, 2]}, "batch_sizes: lookahead .* one sequence"),
    ({"trees": [6]}, "trees: lookahead .* chains"),
]
"""(settings of a measuring step, what it says of them before anything runs)."""


def lookahead_of(target: Target, folder: Path) -> tuple[Target, list[Draft]]:
    """A lookahead drafter over a target, which is told as one whose files nobody can open."""
    save_untrained(folder, "lookahead", LookaheadSettings(window=3), target)
    return Target(key=target.key, path=folder / "never opened"), [Draft(key="l" * 64, path=folder)]
