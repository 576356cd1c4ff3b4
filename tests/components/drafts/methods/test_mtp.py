"""MTP modules against the formula of DeepSeek-V3 written out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_drafts import batch_of, new_draft
from written_out import block, rms

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
