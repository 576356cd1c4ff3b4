"""A training run goes on bit for bit, its checkpoints are checked, and its losses make loops unlikely."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_pretraining import PLAN, SHAPE

from components.contract import UserError
from components.targets.pretraining.llama import LeanLlama, initial_weights
from components.targets.pretraining.plan import TrainingPlan
from components.targets.pretraining.tokenizer import EOS_ID
from components.targets.pretraining.training_run import (
    Loops,
    TrainingRun,
    repeated_ngrams,
    repetition_loss,
    synthetic_loops,
    unlikelihood_loss,
)


def weights_of(run: TrainingRun) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in run.weights.items()}


def train(plan: TrainingPlan, stream: np.ndarray, scratch: Path, until: int | None = None) -> dict[str, torch.Tensor]:
    scratch.mkdir(exist_ok=True)
    run = TrainingRun(plan, (stream, stream[::-1].copy()), scratch)
    run.train(None, until=until)
    return weights_of(run)


def assert_equal_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("stop", [1, 6, 7])
def test_a_stopped_run_goes_on_bit_for_bit(stop: int, stream: np.ndarray, tmp_path: Path) -> None:
    plan = replace(PLAN, repetition_weight=1.0, unlikelihood_weight=1.0)
    undisturbed = train(plan, stream, tmp_path / "undisturbed")
    train(plan, stream, tmp_path / "stopped", until=stop)
    assert_equal_bits(train(plan, stream, tmp_path / "stopped"), undisturbed)


def test_a_damaged_checkpoint_is_refused_by_its_name(stream: np.ndarray, tmp_path: Path) -> None:
    train(PLAN, stream, tmp_path / "run", until=1)
    file = tmp_path / "run" / "latest.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    for damage in (
        lambda: file.write_bytes(whole[:-9]),
        lambda: file.write_bytes(whole[:2000].replace(b'"step":"1"', b'"step":"x"') + whole[2000:]),
        lambda: save_file({name: tensor * np.nan for name, tensor in tensors.items()}, file, metadata=facts_in(whole)),
        lambda: save_file({"weights/x": torch.zeros(2)}, file, metadata=facts_in(whole)),
    ):
        damage()
        with pytest.raises(UserError, match="delete the file") as refused:
            train(PLAN, stream, tmp_path / "run")
        assert str(file) in str(refused.value) and "\n" not in str(refused.value)


def facts_in(data: bytes) -> dict[str, str]:
    found: dict[str, str] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    return found


@pytest.mark.parametrize("stop", [3, 5, 7])
def test_moving_the_decay_while_stable_equals_a_run_planned_so(stop: int, stream: np.ndarray, tmp_path: Path) -> None:
    other = replace(PLAN, num_steps=10, decay_steps=4, repetition_weight=1.0)
    train(PLAN, stream, tmp_path / "moved", until=stop)  # 7 is inside the first decay: it goes back to its beginning
    assert_equal_bits(train(other, stream, tmp_path / "moved"), train(other, stream, tmp_path / "fresh"))


def test_a_checkpoint_of_another_model_or_data_order_is_not_used(stream: np.ndarray, tmp_path: Path) -> None:
    train(PLAN, stream, tmp_path / "run")
    other = replace(PLAN, seed=1)
    assert_equal_bits(train(other, stream, tmp_path / "run"), train(other, stream, tmp_path / "fresh"))


def test_only_tokens_that_complete_a_repeated_ngram_are_penalised() -> None:
    rows = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 4], [9, 9, 9, 9, 9, 9, EOS_ID, 9, 9]])
    assert repeated_ngrams(rows).int().tolist() == [[0, 0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1, 0, 0, 0]]


def test_unlikelihood_lowers_the_probability_of_a_loop() -> None:
    weights = initial_weights(SHAPE, seed=0)
    lean = LeanLlama(SHAPE, weights, torch.float32)
    prompts, loop = torch.full((1, 8), 7), torch.full((1, 20), 7)
    before = unlikelihood_loss(lean, prompts, loop)
    before.backward()
    with torch.no_grad():
        for weight in weights.values():
            if weight.grad is not None:
                weight.sub_(0.5 * weight.grad)
    assert unlikelihood_loss(lean, prompts, loop) < before


@given(seed=st.integers(0, 10_000), window=st.sampled_from([64, 256]))
def test_a_made_up_loop_is_text_then_one_piece_repeated_to_the_end(seed: int, window: int) -> None:
    stream = np.arange(3000, dtype=np.uint16)
    loops = synthetic_loops(stream, np.random.default_rng(seed), window)
    assert loops.tokens.shape == (4, window) and loops.earlier.shape == (4, window - 1)
    for tokens, earlier in zip(loops.tokens.tolist(), loops.earlier.tolist(), strict=True):
        first = next(i for i, before in enumerate(earlier) if before >= 0)
        piece = first - earlier[first]
        assert len(set(tokens[: first + 1])) == first + 1, "text without a repetition comes first"
        for i in range(first, window - 1):
            assert earlier[i] == i - piece
            assert tokens[i + 1] == tokens[earlier[i] + 1], "an earlier prediction of the same token"


def test_the_repetition_loss_is_nought_where_probability_falls_as_asked() -> None:
    """p of a repeated token halves at each occurrence: with ratio 0.5 there is nothing to mend, with 1.0 there is."""
    probabilities = [0.8, 0.8, 0.4, 0.4, 0.2, 0.2]

    class Falling:
        def logits(self, tokens: torch.Tensor) -> torch.Tensor:
            rows = [
                torch.tensor([p if token == target else (1 - p) / 9 for token in range(10)]).log()
                for p, target in zip(probabilities, [3, 4, 3, 4, 3, 4], strict=True)
            ]
            return torch.stack(rows)[None]

    loops = Loops(torch.tensor([[9, 3, 4, 3, 4, 3, 4]]), torch.tensor([[-1, -1, 0, 1, 2, 3]]))
    falling: Any = Falling()
    assert float(repetition_loss(falling, loops, 0.5)) == pytest.approx(0.0, abs=1e-6)
    expected = np.mean([-np.log(1 - 0.4)] * 2 + [-np.log(1 - 0.2)] * 2)
    assert float(repetition_loss(falling, loops, 1.0)) == pytest.approx(expected, rel=1e-5)
