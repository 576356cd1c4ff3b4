"""The lean model computes what transformers does, and the built-in shape is small."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_pretraining import PLAN, SHAPE

from components.targets.pretraining.llama import LeanLlama, LlamaShape, initial_weights, save_model
from components.targets.pretraining.tokenizer import PAD_ID
from components.targets.pretraining.training_run import (
    TrainingRun,
)


def test_training_lowers_the_loss(tmp_path: Path) -> None:
    repeating = np.tile(np.arange(40, dtype=np.uint16), 200)
    run = TrainingRun(replace(PLAN, num_steps=30, decay_steps=10), (repeating, repeating), tmp_path)
    losses: list[float] = []
    run.train(lambda step, metrics: losses.append(metrics["loss"]))
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("length", [7, 256, 300])
def test_the_lean_forward_has_the_logits_and_gradients_of_transformers(length: int, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    shape = replace(SHAPE, max_positions=512)
    weights = initial_weights(shape, seed=3)
    with torch.no_grad():
        for weight in weights.values():
            weight.add_(0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    save_model(tmp_path, shape, weights, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    lean = LeanLlama(shape, weights, torch.float32)
    # the pad token is left out: transformers does not train its embedding
    tokens = torch.randint(PAD_ID + 1, shape.vocab_size, (2, length + 1), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lean.logits(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    lean.loss(tokens).backward()
    expected = theirs(tokens, labels=tokens).loss
    expected.backward()
    torch.testing.assert_close(lean.loss(tokens), expected, rtol=1e-4, atol=1e-5)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(weights[name].grad, parameter.grad, rtol=2e-3, atol=1e-5, msg=name)


def test_the_built_in_shape_weighs_at_most_sixteen_megabytes(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaShape(), initial_weights(LlamaShape(), seed=0))
    assert (tmp_path / "model.safetensors").stat().st_size <= 16_000_000
