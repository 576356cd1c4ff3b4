"""MTP modules against the formula of DeepSeek-V3 written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_eagle3 import rms, rotated
from tiny_drafts import batch_of, new_draft
from torch import Tensor

from components.drafts.methods.mtp import Mtp
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
PARTS = {
    "enorm",
    "hnorm",
    "eh_proj",
    "input_layernorm",
    "post_attention_layernorm",
    "shared_head.norm",
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
}


def mtp(target: AbstractTarget, **settings: object) -> Mtp:
    draft = new_draft(target, "mtp", **settings)
    assert isinstance(draft, Mtp)
    return draft


def block(weights: dict[str, Tensor], at: str, joined: Tensor) -> Tensor:
    """A causal Llama block, one head at a time; 4 heads share 2 key heads."""
    length = len(joined)
    x = rms(joined, weights[f"{at}input_layernorm.weight"])

    def heads(name: str, count: int) -> Tensor:
        return (x @ weights[f"{at}self_attn.{name}_proj.weight"].T).view(length, count, -1).transpose(0, 1)

    queries, keys = rotated(heads("q", 4), torch.arange(length)), rotated(heads("k", 2), torch.arange(length))
    mixed = []
    for head in range(4):
        scores = queries[head] @ keys[head // 2].T / queries.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -1e30)
        mixed.append(scores.softmax(-1) @ heads("v", 2)[head // 2])
    hidden = joined + torch.cat(mixed, -1) @ weights[f"{at}self_attn.o_proj.weight"].T
    x = rms(hidden, weights[f"{at}post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(x @ weights[f"{at}mlp.gate_proj.weight"].T)
    return hidden + (gate * (x @ weights[f"{at}mlp.up_proj.weight"].T)) @ weights[f"{at}mlp.down_proj.weight"].T


@pytest.mark.parametrize("first_hidden", ["post_norm", "pre_norm"])
def test_modules_equal_the_formula_with_the_embedding_first(first_hidden: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = mtp(target, first_hidden=first_hidden), batch_of(target, num_rows=1, num_tokens=14)
    weights, ids = draft.state_dict(), batch.ids[0]
    hidden = batch.last[0] if first_hidden == "pre_norm" else target.final_norm(batch.last[0])
    with torch.no_grad():
        found = list(draft.teacher_forced(batch, torch.arange(14)[None]))
    for j in (1, 2, 3):
        at = f"model.layers.{target.shape.num_layers + j - 1}."
        tokens = torch.cat((ids[j:], ids.new_zeros(j)))
        embedded = target.embedding[tokens]
        if j == 1:
            embedded[0] = 0.0
        both = (rms(embedded, weights[f"{at}enorm.weight"]), rms(hidden, weights[f"{at}hnorm.weight"]))
        hidden = block(weights, at, torch.cat(both, -1) @ weights[f"{at}eh_proj.weight"].T)
        expected = target.unembed(rms(hidden, weights[f"{at}shared_head.norm.weight"]))
        usable = 14 - j  # later columns have no token x_{t+j}
        torch.testing.assert_close(found[j - 1][0, :usable], expected[:usable], atol=5e-4, rtol=1e-4)


def test_tensor_names_continue_the_layers_of_the_target(tiny_target: MakeTarget) -> None:
    target = tiny_target("deepseek_v3")
    first = target.shape.num_layers
    expected = {f"model.layers.{first + j}.{part}.weight" for j in range(3) for part in PARTS}
    assert set(mtp(target).state_dict()) == expected


def test_the_two_first_hidden_settings_differ(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    batch = batch_of(target, num_rows=1)
    found = []
    for first_hidden in ("post_norm", "pre_norm"):
        with torch.no_grad():
            found.append(next(mtp(target, first_hidden=first_hidden).teacher_forced(batch, torch.tensor([[8]]))))
    assert not torch.allclose(found[0], found[1], atol=1e-3)
