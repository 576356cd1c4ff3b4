"""Continuing a batch: what a row says depends on that row alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from components.bench.prompts import greedy_answers
from components.contract import UserError
from components.targets import generate
from components.targets.generate import (
    Continuation,
    ContinuationRequest,
    batches_of,
    continue_batch,
    continue_rows,
    row_generator,
)
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

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


def test_one_long_prompt_makes_no_cache_of_its_length_for_every_other(
    target: AbstractTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = [[*range(5, 65)], *PROMPTS, [9, 8]]
    together = greedy_answers(target, long, 12, 5)
    assert batches_of(target, [60, 3, 11, 6, 1, 2], 12, 3) == [[0, 2, 3], [1, 4, 5]]
    each, caches = target.new_cache(1, 1).bytes_per_token(), list[int]()
    monkeypatch.setattr(generate, "CACHE_BYTES", {"cpu": 60 * each})
    assert batches_of(target, [60, 3, 11, 6, 1, 2], 12, 3) == [[0], [2, 3], [1, 5], [4]]
    make = target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda rows, length: caches.append(rows * length) or make(rows, length))
    assert greedy_answers(target, long, 12, 5) == together
    assert max(caches) == 64 + 12, "one row of the longest, padded, and no second cache to read its prompt"


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
        assert answer.hit_eos == (end in open_end.ids)


ASKS = [
    ContinuationRequest(
        [3 + row] * (1 + 5 * row % 13), 3 + 7 * row % 17, 1.0 if row % 3 == 2 else 0.0, row_generator(7, str(row))
    )
    for row in range(11)
]


def fresh(asks: list[ContinuationRequest]) -> list[ContinuationRequest]:
    """The same rows with generators that have drawn nothing."""
    return [ask._replace(generator=row_generator(7, str(row))) for row, ask in enumerate(asks)]


def said_alone(target: AbstractTarget) -> list[Continuation]:
    """What every row says in a batch of its own."""
    return [continue_rows(target, [ask], batch_size=1)[0] for ask in fresh(ASKS)]


def test_rows_go_through_a_few_at_a_time_where_their_cache_would_be_too_large(
    target: AbstractTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say what they say together, greedy or sampled; a row that needs more than that alone goes through too."""
    longest = 16 + max(ask.limit for ask in ASKS)
    each, caches = target.new_cache(1, 1).bytes_per_token(), list[int]()
    alone, make = said_alone(target), target.new_cache
    monkeypatch.setattr(target, "new_cache", lambda rows, length: caches.append(rows * length) or make(rows, length))
    for places in (3, 0):
        caches.clear()
        monkeypatch.setattr(generate, "CACHE_BYTES", {"cpu": places * longest * each})
        assert continue_rows(target, fresh(ASKS), batch_size=64) == alone
        assert max(caches) == max(1, places) * longest


def test_a_row_says_the_same_whoever_had_its_place_before(target: AbstractTarget) -> None:
    """Ragged prompts and limits over few places: every row is as it would be alone, greedy or sampled."""
    alone = said_alone(target)
    for batch_size in (2, 3, 8, 64):
        assert continue_rows(target, fresh(ASKS), batch_size=batch_size) == alone
    assert [len(one.ids) for one in alone if not one.hit_eos] == [
        ask.limit for ask, one in zip(ASKS, alone, strict=True) if not one.hit_eos
    ]


def test_a_prompt_of_another_tokenizer_is_refused(target: AbstractTarget) -> None:
    with pytest.raises(UserError, match=r"its tokenizer gives token 384, and config\.json knows 384 tokens"):
        continue_batch(target, [[5], [7, 384]], max_new_tokens=2)


def test_work_is_done_when_the_last_row_is(target: AbstractTarget) -> None:
    shares: list[float] = []
    continue_rows(target, fresh(ASKS[:1]), batch_size=1, on_pass=shares.append)
    assert 0.0 < shares[0] <= 1 / ASKS[0].limit, "told when the prompt is read"
    shares.clear()
    continue_rows(target, fresh(ASKS), batch_size=4, on_pass=shares.append)
    assert shares == sorted(shares) and shares[-1] == 1.0 and all(share < 1.0 for share in shares[:-1])


def test_no_pass_is_spent_on_rows_that_have_ended(target: AbstractTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    forward = type(target).forward

    def counted(self: AbstractTarget, ids: torch.Tensor, *args: Any, **more: Any) -> Any:
        rows.append(ids.shape[0])
        return forward(self, ids, *args, **more)

    monkeypatch.setattr(type(target), "forward", counted)
    limits = [40, 2, 2, 2, 2, 2, 2, 2]
    continue_rows(target, [ContinuationRequest([5], limit) for limit in limits], batch_size=4, stop_at_eos=False)
    assert max(rows) <= 4 and rows[-30:] == [1] * 30
    assert sum(rows) < 40 * 4 / 2  # static batches would take 160 and more
