"""Samples of benchmarks/training_speed.py train: what stands there for a target has all that training reads of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.block_sample import read_case
from benchmarks.eagle3_sample import read_sample
from benchmarks.training_speed import METHODS, Shape, write_random_sample
from components.drafts.training.optimizer import Optimizer

TINY = Shape(16, 32, 2, 1, 8, 96, 48, 40, 12, 2, 8)


@pytest.mark.parametrize("method", METHODS)
def test_the_loss_of_a_sample_falls(method: str, tmp_path: Path) -> None:
    file = tmp_path / "sample.safetensors"
    write_random_sample(file, method, TINY)
    draft, batch = read_sample(file, "cpu", {}) if method == "eagle3" else read_case(file, "cpu")
    draft.eval()  # every anchor, so that steps compare
    optimizer = Optimizer(draft, "adamw", weight_decay=0.0, muon_lr_scale=1.0)
    losses = []
    for _ in range(8):
        result = draft.losses(batch)
        optimizer.update(result.loss, 1e-2, clip_norm=1.0)
        losses.append(float(result.loss.detach()))
    assert losses[-1] < 0.95 * losses[0]
