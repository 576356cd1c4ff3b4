"""EAGLE-3's training-time test against attention written out with explicit masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_drafts import batch_of, new_draft, train_on
from torch import Tensor
from written_out import rms, rotated

from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.eagle3 import Eagle3
from components.drafts.settings import Eagle3Settings
from components.drafts.training.losses import LOSS_NAMES
from components.targets.interface import AbstractTarget

EXPECTED_NAMES = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    *(f"midlayer.{part}.weight" for part in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
}


def eagle(tiny_target: Callable[[str], AbstractTarget], **settings: Any) -> tuple[Eagle3, AbstractTarget]:
    target = tiny_target("llama")
    draft = new_draft(target, "eagle3", ttt_steps=4, **settings)
    assert isinstance(draft, Eagle3)
    return draft, target


def naive_steps(
    weights: dict[str, Tensor], embedding: Tensor, ids: Tensor, taps: Tensor, num_steps: int, norm_output: bool
) -> list[Tensor]:
    """All columns, one head at a time, an explicit T x (k+1)T mask [causal | I | ... | I]; 4 heads, 2 key heads."""
    length = len(ids)
    if "fc_norm.0.weight" in weights:
        taps = torch.cat([rms(tap, weights[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps.chunk(3, -1))], -1)
    g = taps @ weights["fc.weight"].T
    shifted = torch.cat((ids, ids.new_zeros(num_steps)))
    all_keys, all_values, found = [], [], []
    masks = [torch.ones(length, length).tril().bool()]
    for k in range(num_steps):
        e = embedding[shifted[1 + k : 1 + k + length]]
        u = torch.cat(
            (rms(e, weights["midlayer.input_layernorm.weight"]), rms(g, weights["midlayer.hidden_norm.weight"])), -1
        )
        positions = torch.arange(length) + k

        def heads(name: str, count: int, u: Tensor = u) -> Tensor:
            return (u @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(length, count, -1).transpose(0, 1)

        queries = rotated(heads("q", 4), positions)
        all_keys.append(rotated(heads("k", 2), positions))
        all_values.append(heads("v", 2))
        if k > 0:
            masks.append(torch.eye(length).bool())
        keys, values, mask = torch.cat(all_keys, 1), torch.cat(all_values, 1), torch.cat(masks, 1)
        mixed = []
        for head in range(4):
            scores = queries[head] @ keys[head // 2].T / queries.shape[-1] ** 0.5
            mixed.append(scores.masked_fill(~mask, -1e30).softmax(-1) @ values[head // 2])
        hidden = g + torch.cat(mixed, -1) @ weights["midlayer.self_attn.o_proj.weight"].T
        x = rms(hidden, weights["midlayer.post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ weights["midlayer.mlp.gate_proj.weight"].T)
        up = x @ weights["midlayer.mlp.up_proj.weight"].T
        g = hidden + (gate * up) @ weights["midlayer.mlp.down_proj.weight"].T
        normed = rms(g, weights["norm.weight"])
        found.append(normed @ weights["lm_head.weight"].T)
        g = normed if norm_output else g
    return found


@pytest.mark.parametrize("fc_norm, norm_output", [(False, False), (True, False), (False, True), (True, True)])
def test_unrolled_steps_equal_attention_with_an_explicit_mask(
    fc_norm: bool, norm_output: bool, tiny_target: Callable[[str], AbstractTarget]
) -> None:
    draft, target = eagle(tiny_target, fc_norm=fc_norm, norm_output=norm_output)
    batch = batch_of(target, num_rows=1, num_tokens=14)
    expected = naive_steps(draft.state_dict(), target.embedding, batch.ids[0], batch.taps[0], 4, norm_output)
    every_other = torch.arange(1, 14, 2)
    for rows in (torch.arange(14), every_other):
        with torch.no_grad():
            found = list(draft.teacher_forced(batch, rows[None]))
        for k in range(4):
            torch.testing.assert_close(found[k][0], expected[k][rows], atol=2e-4, rtol=1e-4)


def test_tensor_names_are_those_of_the_first_release(tiny_target: Callable[[str], AbstractTarget]) -> None:
    draft, target = eagle(tiny_target)
    shapes = {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()}
    hidden = target.shape.hidden_size
    assert set(shapes) == EXPECTED_NAMES
    assert shapes["fc.weight"] == (hidden, 3 * hidden)
    assert shapes["midlayer.self_attn.k_proj.weight"][1] == 2 * hidden


def test_eagle_3_1_has_a_norm_for_each_hidden_state_and_drafts_what_it_trained(
    tiny_target: Callable[[str], AbstractTarget],
) -> None:
    draft, target = eagle(tiny_target, fc_norm=True, norm_output=True)
    assert set(draft.state_dict()) == EXPECTED_NAMES | {f"fc_norm.{i}.weight" for i in range(3)}
    batch = batch_of(target, num_rows=1)
    everywhere = draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], 6).tokens
    state, rng = draft.new_state(32), torch.Generator()
    for t in range(23):
        columns = CommittedPositions(batch.ids[0, t + 1 : t + 2], batch.taps[0, t : t + 1], batch.last[0, t : t + 1])
        assert draft.propose(state, columns, 6, Sampling(), rng).tokens.tolist() == everywhere[t].tolist()


@pytest.mark.parametrize("loss", LOSS_NAMES)
def test_every_loss_can_be_learnt_by(loss: str, tiny_target: Callable[[str], AbstractTarget]) -> None:
    """Its own number falls in 15 steps on one batch."""
    target = tiny_target("llama")
    draft, batch = new_draft(target, "eagle3", spread=False, ttt_steps=2, loss=loss), batch_of(target)
    losses = train_on(draft, batch, 15)
    assert losses[-1] < 0.95 * losses[0]  # total variation starts slowly: it has next to no gradient far off


def test_positions_the_teacher_puts_outside_the_draft_vocabulary_are_counted_but_not_trained(
    tiny_target: Callable[[str], AbstractTarget],
) -> None:
    """With one draft token every guess is that token: the loss is zero, acceptance is how often it is right."""
    target = tiny_target("llama")
    batch = batch_of(target)
    draft = Eagle3.build(target, Eagle3Settings(ttt_steps=2), torch.tensor([9]))
    result = draft.losses(batch)
    assert float(result.loss.detach()) == 0.0
    best = target.unembed(target.final_norm(batch.last)).argmax(-1)
    assert (
        int(result.num_reachable[0]) == 2 * 17
    )  # roots with x_{t+1} and x_{t+2} in the answer of tokens 6..23: t = 5..21
    assert int(result.accepted[0]) == int((best[:, 6:23] == 9).sum())


def test_fused_features_start_at_size_one_whatever_the_taps_measure(
    tiny_target: Callable[[str], AbstractTarget],
) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, "eagle3", spread=False), batch_of(target)
    assert isinstance(draft, Eagle3)
    hidden = target.shape.hidden_size
    taps = batch.taps * torch.tensor([3.0, 40.0, 500.0]).repeat_interleave(hidden)
    draft.scale_to_target_features(taps.flatten(0, 1))
    with torch.no_grad():
        size = draft.fc(taps).square().mean().sqrt()
    assert 0.7 < float(size) < 1.4
    assert set(draft.lr_scales) == {"fc.weight"}
