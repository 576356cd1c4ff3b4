"""Packed conversations are computed as if each were alone; batches hold what they should, whatever shares them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from own_checkpoints import LAYOUTS, make_own_checkpoint
from tiny_drafts import ANSWER_FROM, TRAINED, new_context, new_draft, write_features
from torch import Tensor

from components.contract import Target, UserError
from components.data.features.format import Example, FeatureRow
from components.drafts import train_draft
from components.drafts.interface import AbstractDraft, StepLosses
from components.drafts.methods.eagle3 import Eagle3
from components.drafts.training.batches import (
    LENGTH_STEP,
    BatchOrder,
    first_fit_decreasing,
    in_order,
    lane_width,
    packed,
    padded,
)
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

MakeTarget = Callable[[str], AbstractTarget]
Lengths = st.lists(st.integers(1, 90), min_size=1, max_size=40)
CPU = torch.device("cpu")
RAGGED = (24, 17, 9, 30, 12)


def examples_of(target: AbstractTarget, answer_from: int = ANSWER_FROM) -> list[Example]:
    """Random texts of ragged lengths with the target's features over them; every one ends within its answer."""
    generator, examples = torch.Generator().manual_seed(0), []
    for number, length in enumerate(RAGGED):
        ids = torch.randint(3, target.shape.vocab_size, (length,), generator=generator)
        out = target.forward(ids[None], target.new_cache(1, length), logits="none", features=True)
        assert out.taps is not None and out.last is not None
        mask = torch.arange(length) >= answer_from
        examples.append(Example(str(number), "w", ids, mask, out.taps[0].clone(), out.last[0].clone()))
    return examples


def both_ways(
    draft: AbstractDraft, examples: list[Example]
) -> tuple[StepLosses, StepLosses, list[Tensor], list[Tensor]]:
    """Losses and gradients of the same examples in rows of their own, and packed into lanes of 48 columns."""
    results, gradients = [], []
    for batch in (padded(examples, 64), packed(examples, 64, 48)):
        draft.zero_grad()
        result = draft.losses(batch)
        result.loss.backward()
        results.append(result)
        gradients.append([p.grad.clone() for p in draft.parameters() if p.grad is not None])
    assert packed(examples, 64, 48).ids.shape == (3, 48)
    return results[0], results[1], gradients[0], gradients[1]


def assert_same(draft: AbstractDraft, examples: list[Example]) -> None:
    alone, together, gradients_alone, gradients_together = both_ways(draft, examples)
    torch.testing.assert_close(together.per_step, alone.per_step, rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(together.loss, alone.loss, rtol=2e-5, atol=1e-6)
    assert torch.equal(together.num_reachable, alone.num_reachable) and torch.equal(together.accepted, alone.accepted)
    assert len(gradients_alone) == len(list(draft.parameters()))
    for mine, wanted in zip(gradients_together, gradients_alone, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()) + 1e-7)


@pytest.mark.parametrize("method", TRAINED)
def test_packed_rows_have_the_losses_and_gradients_of_single_rows(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    assert_same(new_draft(target, method).eval(), examples_of(target))  # eval: noise is drawn by place in the batch


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_texts_that_are_answer_from_their_first_token_do_not_run_into_each_other(
    method: str, tiny_target: MakeTarget
) -> None:
    """The first token's own mask would let a guess of the text before reach into this one."""
    target = tiny_target("llama")
    assert_same(new_draft(target, method).eval(), examples_of(target, answer_from=0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_models_own_module_packs_too(layout: str, tmp_path: Path) -> None:
    target = open_target(make_own_checkpoint(layout, tmp_path), dtype="float32", kernel="plain")
    draft = new_draft(target, "mtp", spread=False, start="own")
    assert_same(draft.eval(), examples_of(target))


def test_a_sequence_weighs_the_same_packed_or_not(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    assert_same(new_draft(target, "eagle3", normaliser="sequence").eval(), examples_of(target))


def test_what_packing_cannot_do_is_refused(
    tmp_path: Path, tiny_folder: Callable[[str], Path], tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = write_features(tiny_target("llama"), tmp_path / "f", num_train=8, num_validation=2)
    target = Target(key="", path=tiny_folder("llama"))
    settings: dict[str, Any] = {"num_steps": 1, "draft_vocab_size": 128, "packing": "pack"}
    with pytest.raises(UserError, match="take token or sequence"):
        chosen = {"eagle3": {"normaliser": "position"}}
        train_draft(target, features, **settings, settings=chosen, ctx=new_context(tmp_path / "position"))
    del settings["packing"]
    parts = {**settings, "micro_batch_tokens": 64}
    with pytest.raises(UserError, match="padded apart"):
        train_draft(target, features, **parts, settings=chosen, ctx=new_context(tmp_path / "parts"))
    by_sequence = {"dflash": {"slot_weights": "dpace", "normaliser": "sequence"}}
    with pytest.raises(UserError, match="normaliser: token alone"):
        train_draft(
            target, features, method="dflash", **parts, settings=by_sequence, ctx=new_context(tmp_path / "dpace")
        )
    settings["packing"] = "pack"
    monkeypatch.setattr(Eagle3, "packs", False)
    with pytest.raises(UserError, match="not for method eagle3; take packing: bucket"):
        train_draft(target, features, **settings, ctx=new_context(tmp_path / "method"))


@given(Lengths, st.integers(0, 200))
def test_lanes_hold_every_text_once_and_keep_their_number_in_any_order(lengths: list[int], spare: int) -> None:
    width = max(lengths) + spare
    lanes = first_fit_decreasing(lengths, width)
    assert sorted(place for lane in lanes for place in lane) == list(range(len(lengths)))
    assert all(sum(lengths[place] for place in lane) <= width for lane in lanes)
    laid = in_order([lengths[place] for lane in lanes[::-1] for place in lane], width)
    assert laid[-1][0] < len(lanes)
    assert len(lanes) <= 11 / 9 * (sum(lengths) / width + max(lengths) / width) + 1 or width < 2 * max(lengths)


@given(st.integers(1, 3000), st.integers(16, 5000))
def test_lanes_are_wide_enough_and_share_the_batch(longest: int, batch_tokens: int) -> None:
    width = lane_width(longest, batch_tokens, LENGTH_STEP)
    assert width >= longest and width % LENGTH_STEP == 0
    lanes = max(1, batch_tokens // width)
    assert lanes * width <= batch_tokens or (lanes == 1 and width < longest + LENGTH_STEP)


@pytest.mark.parametrize("packing", ["none", "bucket", "pack"])
def test_every_epoch_holds_every_row_once_and_batches_keep_their_size(packing: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = (torch.randn(300, generator=generator).mul(0.8).exp() * 60).int().clamp(4, 500).tolist()
    rows = tuple(FeatureRow(str(i), "w", "train", "s", i, length, 4) for i, length in enumerate(lengths))
    order = BatchOrder(rows, batch_tokens=1024, max_tokens=400, seed=5, packing=packing)
    epochs = [order.epoch(number) for number in range(2)]
    used = {}
    for batches in epochs:
        assert sorted(row.index for batch in batches for row in batch) == list(range(300))
        sizes = []
        for batch in batches:
            parts = order.parts(batch, 512)
            assert [row for part in parts for row in part] == batch
            assert all(order.parts(part, 512) == [part] for part in parts)
            of_batch = [order.length(row) for row in batch]
            if packing == "pack":
                sizes.append((in_order(of_batch, order.lane_width)[-1][0] + 1) * order.lane_width)
            else:
                sizes.append(len(batch) * (-(-max(of_batch) // LENGTH_STEP) * LENGTH_STEP))
        assert max(sizes) <= 1024
        used[packing] = sum(map(order.length, rows)) / sum(sizes)
    assert epochs[0] != epochs[1]
    assert next(order.from_step(len(epochs[0]) + 1)) == epochs[1][1]
    least = {"none": 0.3, "bucket": 0.7, "pack": 0.9}
    assert used[packing] > least[packing]
