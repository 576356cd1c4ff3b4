"""Continuing a batch: what a row says depends on that row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from components.targets.generate import continue_batch, row_generator
from components.targets.load import open_target
from components.targets.model import AbstractTarget
from components.targets.row_noise import row_count_noise

PROMPTS = [[5, 9, 300], [17] * 11, [40, 41, 42, 43, 44, 45], [7]]


@pytest.fixture(scope="module", params=["qwen3", "deepseek_v3"])
def target(request: pytest.FixtureRequest, tiny_targets: dict[str, Path]) -> AbstractTarget:
    return open_target(tiny_targets[request.param], kernel="plain")


def test_greedy_batch_equals_transformers_generate(target: AbstractTarget, tiny_targets: dict[str, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_targets[target.shape.model_type])
    answers = continue_batch(target, PROMPTS, max_new_tokens=24)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        assert answer.ids == whole[0, len(prompt) :].tolist()


def test_a_sampled_row_does_not_depend_on_its_batch(target: AbstractTarget) -> None:
    def sample(rows: list[int]) -> list[list[int]]:
        answers = continue_batch(
            target,
            [PROMPTS[row] for row in rows],
            max_new_tokens=20,
            temperatures=[0.0 if row == 3 else 1.0 for row in rows],
            generators=[row_generator(7, str(row)) for row in rows],
        )
        return [answer.ids for answer in answers]

    together = sample([0, 1, 2, 3])
    assert sample([2, 0]) == [together[2], together[0]]
    assert sample([3]) == [together[3]]
    assert len({tuple(ids) for ids in together}) == 4
    greedy = continue_batch(target, [PROMPTS[0]], max_new_tokens=20)[0].ids
    assert together[0] != greedy  # T = 1 over a wide distribution


def test_rows_stop_at_the_end_token_and_the_others_go_on(target: AbstractTarget) -> None:
    free = continue_batch(target, PROMPTS, max_new_tokens=16, stop_at_eos=False)
    end = free[1].ids[4]
    shape, target.shape = target.shape, type(target.shape)(**{**vars(target.shape), "eos_token_ids": (end,)})
    try:
        stopped = continue_batch(target, PROMPTS, max_new_tokens=16)
    finally:
        target.shape = shape
    for open_end, answer in zip(free, stopped, strict=True):
        cut = open_end.ids.index(end) + 1 if end in open_end.ids else 16
        assert answer.ids == open_end.ids[:cut]
        assert answer.ended == (end in open_end.ids)


def test_row_count_noise_is_small_and_not_nothing(target: AbstractTarget) -> None:
    noise = row_count_noise(target, [list(range(1, 60)), list(range(200, 260)), [1, 2]])
    assert 0.0 < noise < 1e-3
    assert row_count_noise(target, [[1, 2]]) == 0.0
