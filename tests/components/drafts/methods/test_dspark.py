"""DSpark: what its two heads add to DFlash's block, in the loss, in decoding and for a stop rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny_drafts import batch_of, new_draft, train_on

from components.decoding.chain import decode
from components.drafts.methods.dflash import DFlash
from components.drafts.methods.dspark import DSpark
from components.drafts.settings import DSparkSettings
from components.stop_rule import Calibration, StopRule
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
LENGTH = 16


def dspark(target: AbstractTarget, **settings: Any) -> DSpark:
    """With a bias that shows."""
    draft = new_draft(target, "dspark", **{"block_size": 4, "markov_rank": 8, **settings})
    assert isinstance(draft, DSpark)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.normal_(generator=torch.Generator().manual_seed(5))
        draft.confidence_head.proj.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(6))
    return draft


@pytest.mark.parametrize("from_anchor", [False, True])
def test_a_slot_is_dflashs_biased_by_the_true_token_before(from_anchor: bool, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = dspark(target, sample_from_anchor=from_anchor)
    plain = new_draft(target, "dflash", block_size=4, sample_from_anchor=from_anchor)
    assert isinstance(plain, DFlash)
    weights = draft.state_dict()
    plain.load_state_dict({name: weights[name] for name in plain.state_dict()})
    batch, rows = batch_of(target, num_rows=1, num_tokens=LENGTH), torch.tensor([[9, 2, 4]])
    table, out = weights["markov_head.markov_w1.weight"], weights["markov_head.markov_w2.weight"]
    with torch.no_grad():
        unbiased, slots = plain.teacher_forced(batch, rows), list(draft.slots(batch, rows))
        states = plain.block_outputs(batch.taps, batch.ids.roll(-1, 1), rows)
    assert len(slots) == len(unbiased) == 4 - (not from_anchor)
    for k, (logits, confidence) in enumerate(slots):
        before = table[batch.ids[0, rows[0] + 1 + k]]
        torch.testing.assert_close(logits[0], unbiased[k][0] + before @ out.T, atol=1e-4, rtol=1e-4)
        linear = torch.cat((states[k][0], before), -1) @ weights["confidence_head.proj.weight"][0]
        linear = linear + weights["confidence_head.proj.bias"]
        torch.testing.assert_close(confidence[0], linear, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_papers(tiny_target: MakeTarget) -> None:
    """With one draft token and all rows, written out: .1 CE + .9 TV + 1.0 BCE(c, 1 - TV)."""
    target = tiny_target("llama")
    draft, batch = dspark(target, block_size=2, sample_from_anchor=False).eval(), batch_of(target, num_rows=1)
    rows = torch.nonzero(batch.mask[0, 1:-1] & batch.mask[0, 2:])[:, 0][None]
    with torch.no_grad():
        ((logits, confidence),) = draft.slots(batch, rows)
        q = logits[0].softmax(-1)
        p = target.unembed(target.final_norm(batch.last[0, rows[0] + 1])).float().softmax(-1)
        ratio = p[:, draft.draft_ids] / p[:, draft.draft_ids].sum(-1, keepdim=True)
        accepted = torch.minimum(p[:, draft.draft_ids], q).sum(-1)
        inside = torch.isin(p.argmax(-1), draft.draft_ids)
        entropy, c = -(ratio * q.log()).sum(-1), confidence[0].sigmoid()
        binary = -(accepted * c.log() + (1 - accepted) * (1 - c).log())
        expected = (0.1 * entropy + 0.9 * (1 - accepted) + binary)[inside].mean()
    torch.testing.assert_close(draft.losses(batch).loss, expected, atol=1e-4, rtol=1e-4)


def test_a_stop_rule_reads_the_confidence_head(tiny_target: MakeTarget) -> None:
    """A head that is sure of nothing ends every chain before its first token; one that is sure of all ends none."""
    target = tiny_target("llama")
    draft, taken = dspark(target), Calibration((0.0, 1.0), (0.0, 1.0))
    rule = StopRule((taken,) * 4, (0.0,) * 4, (0.5,) * 4)
    for certainty, drafted in ((-50.0, 0), (50.0, 4)):
        with torch.no_grad():
            draft.confidence_head.proj.bias.fill_(certainty)
        run = decode(target, draft, [3, 4, 5], max_new_tokens=12, depth=4, ignore_eos=True, stop=rule)
        assert run.rounds[0].drafted == drafted


def test_dpace_weighs_no_sum_of_losses() -> None:
    with pytest.raises(ValidationError, match="slot_weights dpace weighs a cross-entropy alone"):
        DSparkSettings(slot_weights="dpace")
    assert DSparkSettings().num_draft_tokens == 7


def test_twenty_steps_lower_the_loss_and_move_every_weight(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = dspark(target).train()
    losses = train_on(draft, batch_of(target), 20)
    assert losses[-1] < 0.95 * losses[0]
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in draft.parameters())
