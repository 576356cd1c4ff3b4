"""DFlash against a block computed alone row by row, what its anchors are, and how far it drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_drafts import batch_of, new_draft, train_on
from torch import Tensor
from written_out import rms, rotated

from components.contract import UserError
from components.decoding.chain import decode
from components.drafts.interface import Batch, CommittedPositions, Roots, Sampling
from components.drafts.methods.dflash import DFlash
from components.drafts.network.layers import Documents
from components.drafts.settings import DFlashSettings
from components.drafts.training.losses import StepLossAccumulator, teacher_at_target_columns
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
LENGTH = 16


def dflash(target: AbstractTarget, **settings: Any) -> DFlash:
    draft = new_draft(target, "dflash", **{"block_size": 5, "num_layers": 3, **settings})
    assert isinstance(draft, DFlash)
    return draft


def denoised(draft: DFlash, embedding: Tensor, anchor: int, taps: Tensor, head: Tensor) -> Tensor:
    """[W, N]: one block after len(taps) positions, a head at a time; 4 heads, 2 key heads."""
    weights, width, start = draft.state_dict(), draft.settings.block_size, len(taps)
    hidden = embedding[[anchor, *[draft.mask_token_id] * (width - 1)]]
    context = rms(taps @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    of_context, of_block = torch.arange(start), start + torch.arange(width)
    for i in range(draft.settings.num_layers):
        part = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items() if n.startswith(f"layers.{i}.")}
        x = rms(hidden, part["input_layernorm.weight"])

        def heads(name: str, count: int, rows: Tensor, part: dict[str, Tensor] = part) -> Tensor:
            found = (rows @ part[f"self_attn.{name}_proj.weight"].T).view(len(rows), count, -1).transpose(0, 1)
            return found if name == "v" else rms(found, part[f"self_attn.{name}_norm.weight"])

        queries, values = rotated(heads("q", 4, x), of_block), torch.cat((heads("v", 2, context), heads("v", 2, x)), 1)
        keys = torch.cat((rotated(heads("k", 2, context), of_context), rotated(heads("k", 2, x), of_block)), 1)
        scores = [queries[head] @ keys[head // 2].T / queries.shape[-1] ** 0.5 for head in range(4)]
        mixed = torch.cat([score.softmax(-1) @ values[head // 2] for head, score in enumerate(scores)], -1)
        hidden = hidden + mixed @ part["self_attn.o_proj.weight"].T
        x = rms(hidden, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ part["mlp.gate_proj.weight"].T) * (x @ part["mlp.up_proj.weight"].T)
        hidden = hidden + gate @ part["mlp.down_proj.weight"].T
    return rms(hidden, weights["norm.weight"]) @ head.T


@pytest.mark.parametrize("from_anchor", [False, True])
@pytest.mark.parametrize("width", [2, 5, 8])
def test_every_block_equals_one_computed_alone(width: int, from_anchor: bool, tiny_target: MakeTarget) -> None:
    """So blocks of other anchors, later features and later tokens are not seen, and each row sees its whole block."""
    target = tiny_target("llama")
    draft = dflash(target, block_size=width, sample_from_anchor=from_anchor)
    batch, rows = batch_of(target, num_rows=1, num_tokens=LENGTH), torch.tensor([[9, 2, 13, 4, 0]])
    with torch.no_grad():
        found = torch.stack(draft.teacher_forced(batch, rows), 2)[0]  # [R, K, N]
        for root, logits in zip(rows[0].tolist(), found, strict=True):
            anchor, taps = int(batch.ids[0, root + 1]), batch.taps[0, : root + 1]
            alone = denoised(draft, target.embedding, anchor, taps, draft.lm_head.weight)[not from_anchor :]
            torch.testing.assert_close(logits, alone, atol=3e-4, rtol=1e-3)


def test_packed_documents_are_drafted_as_if_each_were_alone(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, alone = dflash(target), batch_of(target, num_rows=2, num_tokens=LENGTH)
    lane = {name: getattr(alone, name).flatten(0, 1)[None] for name in ("ids", "mask", "taps", "last")}
    numbers, positions = torch.arange(2).repeat_interleave(LENGTH)[None], torch.arange(LENGTH).repeat(2)[None]
    packed = Batch(**lane, lengths=torch.tensor([2 * LENGTH]), documents=Documents(numbers, positions))
    rows = torch.tensor([[3, 7], [3, 7]])
    with torch.no_grad():
        expected = torch.stack(draft.teacher_forced(alone, rows)).flatten(1, 2)
        found = torch.stack(draft.teacher_forced(packed, torch.tensor([[3, 7, LENGTH + 3, LENGTH + 7]])))[:, 0]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_anchors_are_a_bounded_fair_draw_that_a_resumed_run_repeats(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = dflash(target, max_anchors=8), batch_of(target, num_rows=2, num_tokens=96)
    short = batch._replace(mask=batch.mask & (torch.arange(96) < torch.tensor([[96], [12]])))
    everything, trained = draft.eval().losses(short), draft.train().losses(short)
    assert everything.num_reachable[0] == 89 + 5  # of each row, as far as a draft token follows in the answer
    assert trained.num_reachable[0] == 8 + 5
    again, later = draft.losses(short), draft.losses(short._replace(step=1))
    assert torch.equal(trained.loss.detach(), again.loss.detach())
    assert not torch.equal(trained.loss.detach(), later.loss.detach())
    roots = [
        draft.training_roots(_roots(draft, batch._replace(step=step)), batch._replace(step=step)) for step in range(400)
    ]
    drawn = torch.cat([each.rows[each.valid] for each in roots]).bincount(minlength=96).float()
    expected = 2 * 400 * 8 / 89
    assert drawn[:5].sum() == 0 and drawn[94:].sum() == 0  # neither in the prompt nor where no draft token follows
    assert (drawn[5:94] - expected).abs().max() < 6 * expected**0.5


def _roots(draft: DFlash, batch: Batch) -> Roots:
    teacher = teacher_at_target_columns(draft.target, batch, draft.draft_ids)
    return StepLossAccumulator(batch, teacher, draft.num_steps, "token").roots


def test_a_shallow_proposal_is_the_beginning_of_a_deep_one(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = dflash(target), batch_of(target, num_rows=1)
    said = []
    for depth in (1, 2, 4):
        columns = CommittedPositions(batch.ids[0, 1:13], batch.taps[0, :12], batch.last[0, :12])
        state = draft.new_state(32)
        said.append(draft.propose(state, columns, depth, Sampling(), torch.Generator()).tokens.tolist())
    assert said[0] == said[2][:1] and said[1] == said[2][:2] and len(said[2]) == 4


def test_widths_beyond_the_trained_one_and_unknown_masks_are_refused(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    with pytest.raises(UserError, match=r"depth 5 is outside what dflash can draft \(1 to 4\)"):
        decode(target, dflash(target), [3, 4, 5], max_new_tokens=8, depth=5)
    with pytest.raises(UserError, match=rf"mask_token_id 999999 is none of the target's {target.shape.vocab_size}"):
        dflash(target, mask_token_id=999_999)
    with pytest.raises(ValidationError, match="block_size 17 drafts 17 tokens, most 16"):
        DFlashSettings(block_size=17, sample_from_anchor=True)
    assert DFlashSettings(block_size=17).num_draft_tokens == 16


@pytest.mark.parametrize("settings", [{}, {"slot_weights": "dpace"}], ids=["decay", "dpace"])
def test_twenty_steps_lower_the_loss(settings: dict[str, Any], tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = dflash(target, **settings).train()
    assert {name.split(".")[0] for name, _ in draft.named_parameters()} == {"fc", "hidden_norm", "layers", "norm"}
    losses = train_on(draft, batch_of(target), 20)
    assert losses[-1] < 0.9 * losses[0]
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in draft.parameters())
