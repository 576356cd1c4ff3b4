"""A drafter without contents holds and computes what a real one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_drafts import new_draft

from components.drafts.storage.files import build_draft
from components.drafts.training.hollow import HollowTarget, hollow_tensors
from components.drafts.training.loop import Schedule
from components.drafts.training.losses import USUAL
from components.drafts.training.memory import Sizes, peak_of
from components.targets.interface import AbstractTarget
from components.targets.shape import taps_of

SCHEDULE = Schedule(9, 1e-3, 0.1, 0.0, 1.0, 3, 3, "bfloat16", "muon", 10.0)
SIZES = Sizes(512, 256)


@pytest.mark.parametrize("method", ["eagle3", "dspark"])  # one that unrolls, one that draws its columns
def test_a_method_holds_as_much_without_contents(method: str, tiny_target: Callable[[str], AbstractTarget]) -> None:
    real = new_draft(tiny_target("llama"), method)
    held = peak_of(real, SIZES, SCHEDULE, torch.device("cpu"))
    with hollow_tensors():
        target = HollowTarget(real.target.shape, torch.float32, real.target.tap_layers)
        draft = build_draft(method, target, {}, torch.arange(0, real.target.shape.vocab_size, 2))
        ahead = peak_of(draft, SIZES, SCHEDULE, torch.device("cpu"))
        assert sum(weight.numel() for weight in draft.parameters()) == sum(w.numel() for w in real.parameters())
    assert (ahead.gradients, ahead.optimiser, ahead.features) == (held.gradients, held.optimiser, held.features)
    assert (ahead.activations, ahead.logits) == (held.activations, held.logits), "to the byte"


def test_masks_and_draws_have_values_and_weights_have_none() -> None:
    with hollow_tensors():
        mask = torch.zeros(2, 64, dtype=torch.bool)
        mask[0, 60:] = True
        assert int(mask.sum(1).max()) == 4
        assert mask.nonzero()[:, 1].tolist() == [60, 61, 62, 63]
        order = torch.rand(64, generator=torch.Generator().manual_seed(1)).argsort()
        assert sorted(order.tolist()) == list(range(64))
        weights = torch.randn(60_000, 60_000)  # 14 GB, if it held any
        assert float((weights @ weights).sum()) == 0.0
        assert int((weights[0, :64] > 0).sum()) == 0, "of what nothing is known about"


def test_what_memory_held_before_is_no_value() -> None:
    for _ in range(20):
        torch.full((32000, 1), 0.1234567)  # and its memory is free again
    with hollow_tensors():
        made = torch.empty(32000, 1), torch.zeros(3).new_empty(32000, 1), torch.empty_like(torch.zeros(32000, 1))
        assert not any(bool((one != 0).any()) for one in made)


@pytest.mark.parametrize("width", [64, 512])
def test_logits_of_a_whole_vocabulary_are_bounded_whatever_the_width_of_the_head(
    width: int, tiny_target: Callable[[str], AbstractTarget]
) -> None:
    limits, few, many = USUAL, Sizes(512, 256), Sizes(16_384, 8192)
    shape = replace(tiny_target("llama").shape, hidden_size=width, vocab_size=151_936, tie_word_embeddings=True)
    with hollow_tensors():
        target = HollowTarget(shape, torch.bfloat16, taps_of(shape.num_layers))
        draft = build_draft("mtp", target, {"mtp_modules": 1}, torch.arange(32_000))
        small, large = (peak_of(draft, size, SCHEDULE, torch.device("cpu")).logits for size in (few, many))
    entries = few.roots * shape.vocab_size
    assert small == pytest.approx(entries * (2 + 4 + 8 + 2), rel=0.05), "gradients, teacher, and what judging takes"
    bound = limits.kept + limits.at_once * (2 + 4 + 8 + 2 + 2)
    assert 0.8 * bound < large <= 1.05 * bound
