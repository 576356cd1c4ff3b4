"""Transformers runs what our own forward pass does not: each family goes back, batches and equals its own full pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import changed_config
from tiny_families import FAMILIES, MULTIMODAL, RECURRENT, REFUSED, VOCAB_SIZE, make_family
from transformers import AutoConfig, AutoModelForCausalLM

from components.contract import UserError
from components.targets.forward import transformers_model
from components.targets.forward.transformers_model import TransformersTarget
from components.targets.interface import AbstractTarget
from components.targets.load import open_target
from components.targets.shape import kv_bytes_per_token, shape_of

EVERY = [*FAMILIES, *MULTIMODAL]
LENGTH = 40
REASONS = {
    "bloom": "ALiBi",
    "deepseek_v4": "heavily_compressed_attention",
    "gemma3n_text": "several streams",
    "mamba": "no attention layer",
    "minimax": "cache of its own kind",
}


def test_dynamic_positions_fall_back_to_transformers(copied: Path) -> None:
    changed_config(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})(copied)
    assert open_target(copied, kernel="plain").kernel == "transformers"


@pytest.fixture(scope="module", params=EVERY)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TransformersTarget]:
    target = open_target(make_family(request.param, tmp_path_factory.mktemp(request.param)), kernel="transformers")
    assert isinstance(target, TransformersTarget)
    yield target


def texts(num: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(1, VOCAB_SIZE, (num, length), generator=torch.Generator().manual_seed(1))


def whole_pass(target: TransformersTarget, ids: torch.Tensor) -> Any:
    """The model's own output for whole texts, without a cache of ours."""
    with torch.no_grad():
        return target.model(input_ids=ids, use_cache=False, output_hidden_states=True)


def tolerance(target: TransformersTarget) -> float:
    """Twice what the model's own passes differ by when they come in steps, and 1e-3 of its largest logit."""
    ids = texts(3)
    whole, apart = whole_pass(target, ids).logits, 0.0
    for step in (1, 5):
        past, start = None, 0
        for part in ids.split(step, dim=1):
            with torch.no_grad():
                output = target.model(input_ids=part, past_key_values=past, use_cache=True)
            past, stop = output.past_key_values, start + part.shape[1]
            apart = max(apart, float((output.logits - whole[:, start:stop]).abs().max()))
            start = stop
    return 2 * apart + 1e-3 * max(1.0, float(whole.abs().max()))


@pytest.fixture(scope="module")
def apart(opened: TransformersTarget) -> float:
    return tolerance(opened)


def test_ragged_passes_with_dropped_tokens_equal_one_pass_over_the_text(
    opened: TransformersTarget, apart: float
) -> None:
    """Windows, chunks and states must forget what was dropped, each sequence at its own place."""
    ids = texts(3)
    expected = whole_pass(opened, ids)
    generator = torch.Generator().manual_seed(2)

    def draw(highest: int) -> int:
        return int(torch.randint(0, highest + 1, (1,), generator=generator))

    cache = opened.new_cache(3, 2 * LENGTH)
    logits, lengths = torch.zeros_like(expected.logits), torch.zeros(3, dtype=torch.int64)
    states = torch.zeros(3, LENGTH, opened.shape.hidden_size)
    while bool((lengths < LENGTH).any()):
        right = torch.tensor([draw(7) for _ in range(3)]).minimum(LENGTH - lengths)
        num_rows = int(right.max()) + draw(3)
        if num_rows == 0:
            continue
        rows = torch.randint(1, VOCAB_SIZE, (3, num_rows), generator=generator)
        for place, (start, count) in enumerate(zip(lengths.tolist(), right.tolist(), strict=True)):
            rows[place, :count] = ids[place, start : start + count]
        dropped = torch.tensor([draw(num_rows - int(count)) for count in right])
        passed = opened.forward(rows, cache, num_valid=right + dropped, features=True)
        assert passed.logits is not None and passed.taps is not None and passed.last is not None
        assert passed.taps.shape == (3, num_rows, 3 * opened.shape.hidden_size)
        for place, (start, count) in enumerate(zip(lengths.tolist(), right.tolist(), strict=True)):
            logits[place, start : start + count] = passed.logits[place, :count]
            tap = passed.taps[place, :count, : opened.shape.hidden_size]
            states[place, start : start + count] = tap
        lengths = lengths + right
        cache.truncate(lengths)
    assert float((logits - expected.logits).abs().max()) < apart
    assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
    tapped = expected.hidden_states[opened.shape.tap_layers[0]]
    torch.testing.assert_close(states, tapped, rtol=1e-3, atol=1e-3 * float(tapped.abs().max()))


def test_a_prompt_in_pieces_is_the_prompt_at_once(
    opened: TransformersTarget, apart: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks of long prompts would not fit into memory."""
    ids, lengths = texts(3, 30), torch.tensor([30, 4, 17])
    for logits in ("all", "last", "none"):
        at_once, in_pieces = opened.new_cache(3, 40), opened.new_cache(3, 40)
        expected = opened.forward(ids, at_once, num_valid=lengths, logits=logits, features=True)
        with monkeypatch.context() as patched:
            patched.setattr(transformers_model, "_MOST_MASKED", 3 * 30 * 7)
            passed = opened.forward(ids, in_pieces, num_valid=lengths, logits=logits, features=True)
        assert torch.equal(in_pieces.lengths, at_once.lengths) and (passed.logits is None) == (logits == "none")
        for part, other in zip(passed, expected, strict=True):
            if part is not None:
                assert other is not None and part.shape == other.shape
                for row, length in enumerate(lengths.tolist()):
                    shown = 1 if part is passed.logits and logits == "last" else length
                    difference = float((part[row, :shown] - other[row, :shown]).abs().max())
                    assert difference < apart * max(1.0, float(other.abs().max()))


def test_logits_are_the_head_of_the_last_state(opened: TransformersTarget) -> None:
    """Drafters read `last` and share the head, whatever the family does to its logits behind it."""
    ids = texts(1, 12)
    passed = opened.forward(ids, opened.new_cache(1, 12), features=True)
    assert passed.last is not None and passed.logits is not None
    torch.testing.assert_close(opened.unembed(opened.final_norm(passed.last)), passed.logits, rtol=1e-5, atol=1e-5)


def test_a_token_takes_the_bytes_that_are_said(opened: TransformersTarget) -> None:
    """By the configuration alone, before any weight is read; and by the cache of the opened model."""
    cache = opened.new_cache(1, 16)
    opened.forward(texts(1, 10), cache)
    assert cache.num_bytes() == 10 * cache.bytes_per_token()
    if opened.model.config.model_type != "mimo_v2_flash":  # its windows have twice the heads that its config names
        assert kv_bytes_per_token(opened.model.config, 4) == cache.bytes_per_token()


def test_a_sequence_moves_to_another_batch_with_its_states(opened: TransformersTarget, apart: float) -> None:
    ids = texts(3, 20)
    expected = whole_pass(opened, ids).logits
    cache, lengths = opened.new_cache(4, 32), torch.tensor([11, 7, 9])
    prompts = opened.new_cache(3, 16)
    opened.forward(ids[:, :11], prompts, num_valid=lengths, logits="none")
    cache.put([3, 0, 2], prompts)
    cache.select([2, 3, 0])  # sequences 2, 0, 1 of the texts
    order, lengths = torch.tensor([2, 0, 1]), lengths[[2, 0, 1]]
    for step in range(6):
        columns = lengths + step
        passed = opened.forward(ids[order, columns][:, None], cache)
        assert passed.logits is not None
        assert float((passed.logits[:, 0] - expected[order, columns]).abs().max()) < apart


@pytest.mark.parametrize("family", RECURRENT)
def test_states_go_back_over_many_passes_of_one_token(family: str, tmp_path: Path) -> None:
    """A draft model drafts token by token and drops all of them at the end of a round."""
    target: AbstractTarget = open_target(make_family(family, tmp_path), kernel="transformers")
    ids = texts(1, 24)
    assert isinstance(target, TransformersTarget)
    expected, apart, cache = whole_pass(target, ids).logits, tolerance(target), target.new_cache(1, 64)
    target.forward(ids[:, :10], cache, logits="none")
    for start in range(10, 22, 2):
        passed = target.forward(ids[:, start : start + 2], cache)
        for _ in range(5):
            target.forward(texts(1, 1), cache)
        cache.truncate(torch.tensor([start + 2]))
        assert passed.logits is not None
        assert float((passed.logits - expected[:, start : start + 2]).abs().max()) < apart


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_verified_is_refused_by_name(family: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=REASONS[family]) as refused:
        open_target(make_family(family, tmp_path), kernel="transformers")
    assert "\n" not in str(refused.value)


def test_a_deep_model_in_bfloat16_may_round_and_not_mix_tokens_outside_its_cache() -> None:
    """48 layers that weigh the same, as in a stand-in of Gemma-3-12B."""
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=20_000, hidden_size=128, intermediate_size=128, num_hidden_layers=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=256,
    )  # fmt: skip
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    TransformersTarget(model, shape_of(config, "deep"), location="deep")
    for layer in model.model.layers[10:20]:
        layer.register_forward_pre_hook(
            lambda _, inputs: (inputs[0] + 0.1 * inputs[0].mean(1, keepdim=True), *inputs[1:])
        )
    with pytest.raises(UserError, match="other logits when tokens come in pieces"):
        TransformersTarget(model, shape_of(config, "deep"), location="deep")
