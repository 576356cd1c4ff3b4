"""EAGLE-1 and HASS against the papers' formulae written out, HASS's passes in its own absolute columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_drafts import batch_of, new_draft
from torch import Tensor
from written_out import rms, rotated

from components.drafts.methods.eagle1 import FeatureDraft
from components.drafts.network.layers import reachable
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
LENGTH = 14
NAMES = {
    "fc.weight",
    "fc.bias",
    "layers.0.post_attention_layernorm.weight",
    *(f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"layers.0.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
}


def network(target: AbstractTarget, method: str, **settings: Any) -> FeatureDraft:
    draft = new_draft(target, method, feature_noise=0.0, **settings)
    assert isinstance(draft, FeatureDraft)
    return draft


def absolute_passes(draft: FeatureDraft, target: AbstractTarget, ids: Tensor, features: Tensor, n: int) -> list[Tensor]:
    """Passes 1 .. n as HASS draws them: columns stay, features move right by one a pass.

    Version i of column q is the target's feature (i = 0) or pass i's output at column q - 1. Pass j's query at column q
    is of version j - 1; it sees version 0 up to column q - j + 1, then version i at column q - j + 1 + i.
    Column q holds x_{q+1}. One head at a time; 4 heads share 2 key heads.
    """
    weights = {name.removeprefix("layers.0."): w for name, w in draft.state_dict().items()}
    embedded = target.embedding[ids[1:]].float() * draft.token_scale
    length = len(embedded)
    positions = torch.arange(length)
    versions, outputs = [features[:length]], []

    def heads(name: str, count: int, x: Tensor) -> Tensor:
        return (x @ weights[f"self_attn.{name}_proj.weight"].T).view(length, count, -1).transpose(0, 1)

    for j in range(1, n + 1):
        joined = [torch.cat((embedded, v), -1) @ weights["fc.weight"].T + weights["fc.bias"] for v in versions]
        queries = rotated(heads("q", 4, joined[-1]), positions)
        keys = [rotated(heads("k", 2, x), positions) for x in joined]
        values = [heads("v", 2, x) for x in joined]
        mixed = torch.zeros(length, queries.shape[0], queries.shape[-1])
        for q in range(length):
            places = [(0, c) for c in range(q - j + 2)] + [(i, q - j + 1 + i) for i in range(1, j)]
            places = [(i, c) for i, c in places if c >= 0]
            for head in range(4):
                scores = torch.stack([queries[head, q] @ keys[i][head // 2, c] for i, c in places])
                seen = torch.stack([values[i][head // 2, c] for i, c in places])
                mixed[q, head] = (scores / queries.shape[-1] ** 0.5).softmax(-1) @ seen
        hidden = joined[-1] + mixed.flatten(1) @ weights["self_attn.o_proj.weight"].T
        x = rms(hidden, weights["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ weights["mlp.gate_proj.weight"].T)
        hidden = hidden + (gate * (x @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T
        outputs.append(hidden)
        versions.append(torch.cat((versions[-1][:1], hidden[:-1])))
    return outputs


def test_passes_equal_the_papers_picture_in_absolute_columns(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = network(target, "hass"), batch_of(target, num_rows=1, num_tokens=LENGTH)
    features = target.final_norm(batch.last[0])
    rows = torch.arange(LENGTH - 1)[None]
    with torch.no_grad():
        expected = absolute_passes(draft, target, batch.ids[0], features, 4)
        outputs = draft.unroll(batch, features[None], rows)
        for k in range(4):
            found = next(outputs)[0]
            roots = torch.arange(LENGTH - 1 - k)  # the root of column q in pass k + 1 is q - k
            torch.testing.assert_close(found[roots], expected[k][roots + k], atol=3e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["eagle1", "hass"])
def test_the_loss_is_the_papers_sum(method: str, tiny_target: MakeTarget) -> None:
    """SmoothL1 on features and cross-entropy on tokens (and HASS's top-K), averaged over what decoding can reach."""
    target = tiny_target("llama")
    draft, batch = network(target, method), batch_of(target, num_rows=1, num_tokens=LENGTH)
    features = target.final_norm(batch.last[0])
    passes = {"eagle1": 1, "hass": 3}[method]
    means = []
    with torch.no_grad():
        outputs = absolute_passes(draft, target, batch.ids[0], features, passes)
        for k, output in enumerate(outputs):
            roots = reachable(batch.mask, passes)[k, 0].nonzero()[:, 0]
            guessed, wanted = output[roots + k], features[roots + k + 1]
            teacher = target.unembed(wanted).softmax(-1)
            cost = -target.unembed(guessed).log_softmax(-1)
            loss = torch.nn.functional.smooth_l1_loss(guessed, wanted, reduction="none").mean(-1)
            loss = loss + 0.1 * (teacher * cost).sum(-1)
            if method == "hass":
                likely = teacher.topk(10).indices
                loss = loss + (teacher * cost).gather(1, likely).sum(-1)
            means.append(loss.mean())
        found = draft.losses(batch)
    torch.testing.assert_close(found.per_step, torch.stack(means), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(found.loss, torch.stack(means).mean(), atol=1e-3, rtol=1e-3)


def test_tensor_names_are_those_of_the_first_release(tiny_target: MakeTarget) -> None:
    for method in ("eagle1", "hass"):
        draft = network(tiny_target("deepseek_v3"), method)
        assert set(draft.state_dict()) == NAMES
        hidden = tiny_target("deepseek_v3").shape.hidden_size
        assert draft.fc.weight.shape == (hidden, 2 * hidden)


def test_a_later_pass_sends_no_gradient_into_the_one_before(tiny_target: MakeTarget) -> None:
    """The features it is fed are taken as given; the keys made of them learn."""
    target = tiny_target("llama")
    draft, batch = network(target, "hass"), batch_of(target, num_rows=1, num_tokens=LENGTH)
    features = target.final_norm(batch.last)
    outputs = draft.unroll(batch, features, torch.tensor([[6, 7]]))
    first, second, third = (next(outputs) for _ in range(3))
    for later in (second, third):
        (gone,) = torch.autograd.grad(later.square().sum(), first, retain_graph=True, allow_unused=True)
        assert gone is None
    assert torch.autograd.grad(third.square().sum(), draft.block.self_attn.k_proj.weight)[0].any()


def test_noise_is_bounded_repeats_for_a_step_and_stops_outside_training(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = new_draft(target, "eagle1", feature_noise=0.25, init_seed=5)
    assert isinstance(draft, FeatureDraft)
    batch = batch_of(target)._replace(step=3)
    features = torch.zeros(*batch.ids.shape, target.shape.hidden_size)
    noisy = draft._noisy(features, batch)
    assert torch.equal(noisy, draft._noisy(features, batch))
    assert not torch.equal(noisy, draft._noisy(features, batch._replace(step=4)))
    assert float(noisy.abs().max()) <= 0.25 and float(noisy.abs().max()) > 0.24
    assert abs(float(noisy.mean())) < 0.01
    assert torch.equal(draft.eval()._noisy(features, batch), features)


def test_noise_changes_the_training_loss_and_the_same_batch_repeats_it(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    batch = batch_of(target)
    draft = new_draft(target, "eagle1", feature_noise=0.3)
    with torch.no_grad():
        quiet = draft.eval().losses(batch).loss
        loud = draft.train().losses(batch).loss
        again = draft.losses(batch).loss
    assert not torch.equal(loud, quiet)
    assert torch.equal(loud, again)


@pytest.mark.parametrize("method", ["eagle1", "hass", "p-eagle"])
def test_bfloat16_training_under_autocast_runs_and_learns(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method, spread=False), batch_of(target)
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            result = draft.losses(batch)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(float(result.loss.detach()))
    assert losses[-1] < losses[0]
    assert all(p.dtype == torch.float32 for p in draft.parameters())
