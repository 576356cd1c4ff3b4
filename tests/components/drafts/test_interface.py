"""What every trained drafting method must do, on every kind of target."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from tiny_drafts import INDEPENDENT, ODD_TAPS, READING, TRAINED, batch_of, new_draft, train_on
from torch import Tensor

from components.drafts.interface import AbstractDraft, Batch, CommittedPositions, Sampling
from components.drafts.methods import mtp
from components.drafts.network import sampling
from components.targets.interface import AbstractTarget, tapping
from components.targets.shape import TapLayers

FAMILIES = ("llama", "qwen3", "deepseek_v3")
GREEDY = Sampling()
USUAL: TapLayers = (2, 4, 5)
MakeTarget = Callable[[str], AbstractTarget]


def columns(batch: Batch, start: int, stop: int) -> CommittedPositions:
    return CommittedPositions(batch.ids[0, start + 1 : stop + 1], batch.taps[0, start:stop], batch.last[0, start:stop])


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def depth_of(draft: AbstractDraft) -> int:
    return min(draft.max_depth, draft.num_steps + 2)


@pytest.mark.parametrize(
    ("method", "family", "taps"),
    [
        *itertools.product(TRAINED, FAMILIES, [USUAL]),
        *itertools.product(READING, FAMILIES, ODD_TAPS),
    ],
)
def test_drafting_everywhere_equals_proposing_after_each_column(
    method: str, family: str, taps: TapLayers, tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tapping(tiny_target(family), taps)
    draft, batch = new_draft(target, method), batch_of(target, num_rows=1)
    depth = depth_of(draft)
    everywhere = draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], depth).tokens
    assert everywhere.shape == (batch.ids.shape[1] - 1, depth)
    monkeypatch.setattr(sampling, "LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(mtp, "SCORES_AT_ONCE", 1)
    one_by_one = draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], depth).tokens
    assert torch.equal(one_by_one, everywhere), "logits and scores exist for a few positions at a time"
    late = draft.propose_at_every_position(batch.ids[0], batch.taps[0], batch.last[0], depth, first=17).tokens
    assert torch.equal(late, everywhere[17:])
    for sizes in ([1] * 23, [5, 1, 3, 2, 4, 1, 7], [23]):
        state, done = draft.new_state(32), 0
        for size in sizes:
            proposal = draft.propose(state, columns(batch, done, done + size), depth, GREEDY, rng())
            done += size
            assert proposal.probs is None
            assert proposal.tokens.tolist() == everywhere[done - 1].tolist()


@pytest.mark.parametrize("taps", [USUAL, *ODD_TAPS])
@pytest.mark.parametrize("method", READING)
def test_the_order_of_taps_is_part_of_a_drafter(method: str, taps: TapLayers, tiny_target: MakeTarget) -> None:
    """Taps in another order and the drafter's input weights in that order give the same guesses, one of both others."""
    target = tapping(tiny_target("llama"), taps)
    draft, batch, hidden = new_draft(target, method), batch_of(target, num_rows=1), target.shape.hidden_size
    turned = torch.cat(batch.taps[0].split(hidden, -1)[::-1], -1)

    def guesses(taps: Tensor) -> list[list[int]]:
        return draft.propose_at_every_position(batch.ids[0], taps, batch.last[0], 3).tokens.tolist()

    before, other = guesses(batch.taps[0]), guesses(turned)
    for name, weight in draft.named_parameters():
        if name in ("fc.weight", "mask_hidden"):
            weight.data = torch.cat(weight.data.split(hidden, -1)[::-1], -1)
    assert guesses(turned) == before
    assert (other == before) == (len(taps) == 1)


@pytest.mark.parametrize("method", TRAINED)
def test_state_depends_on_committed_columns_only(method: str, tiny_target: MakeTarget) -> None:
    """However deep earlier proposals went, and however often, the next one is the same."""
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target, num_rows=1)
    said = []
    for depths in ((1, 1, 1, 1), (3, 3, 3, 3), (draft.max_depth, 2, 1, 3), (0, 1, 0, 2)):
        state = draft.new_state(32)
        for place, depth in enumerate(depths):
            draft.propose(state, columns(batch, 4 * place, 4 * place + 4), depth, GREEDY, rng())
        said.append(draft.propose(state, columns(batch, 16, 17), 3, GREEDY, rng()).tokens.tolist())
    assert all(tokens == said[0] for tokens in said)


@pytest.mark.parametrize("method", TRAINED)
def test_sampled_probabilities_are_a_distribution_over_the_draft_vocabulary(
    method: str, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target, num_rows=1)
    state = draft.new_state(32)
    proposal = draft.propose(state, columns(batch, 0, 12), 3, Sampling(temperature=0.7, top_k=5), rng())
    assert proposal.probs is not None
    torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(3))
    outside = torch.ones(target.shape.vocab_size, dtype=torch.bool)
    outside[draft.draft_ids] = False  # type: ignore[index]
    assert not proposal.probs[:, outside].any()
    assert ((proposal.probs > 0).sum(-1) == 5).all()
    assert (proposal.probs.gather(1, proposal.tokens[:, None]) > 0).all()


@pytest.mark.parametrize("method", TRAINED)
def test_loss_falls_on_one_batch(method: str, tiny_target: MakeTarget) -> None:
    """What can be learnt of the loss (all but the teacher's entropy) halves in 40 steps on one batch.

    On the families in turn; that every method's graph is right on all of them is the parity ladder's.
    """
    target = tiny_target(("deepseek_v3", "qwen3", "llama")[TRAINED.index(method) % 3])
    torch.manual_seed(0)
    draft, batch = new_draft(target, method, spread=False), batch_of(target)
    losses = train_on(draft, batch, 40)
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize("method", TRAINED)
def test_gradients_reach_every_parameter_from_every_step(method: str, tiny_target: MakeTarget) -> None:
    """No detach between steps: the last step alone moves the first module or the fusing layer."""
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target, num_rows=1)
    rows = torch.arange(6, 14)[None]
    # What stands for a token that is not known yet is not read by the first step.
    first = next(weight for name, weight in draft.named_parameters() if not name.startswith("mask_"))
    for k in range(draft.num_steps):
        draft.zero_grad()
        logits = list(draft.teacher_forced(batch, rows))[k]  # type: ignore[operator]
        logits.square().mean().backward()
        reached = first.grad is not None and bool(first.grad.any())
        assert reached or (method in INDEPENDENT and k > 0)
    draft.zero_grad()
    draft.losses(batch).loss.backward()
    assert [name for name, p in draft.named_parameters() if p.grad is None or not p.grad.any()] == []


@pytest.mark.parametrize("method", TRAINED)
def test_nothing_of_the_target_is_trained_or_saved(method: str, tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft = new_draft(target, method)
    assert set(draft.state_dict()) == {name for name, _ in draft.named_parameters()}
    assert method == "draft-model" or not any("embed" in name for name in draft.state_dict())
    before = target.embedding.clone()
    optimizer = torch.optim.SGD(draft.parameters(), lr=1.0)
    draft.losses(batch_of(target)).loss.backward()
    optimizer.step()
    assert torch.equal(before, target.embedding)


@pytest.mark.parametrize("method", TRAINED)
def test_padding_and_the_neighbour_sequence_change_nothing(method: str, tiny_target: MakeTarget) -> None:
    """Two sequences in a padded batch have the per-step counts and token sums of each alone."""
    target = tiny_target("llama")
    draft, batch = new_draft(target, method).eval(), batch_of(target, num_rows=2)  # eval: no training noise
    short = 17
    mask = batch.mask.clone()
    mask[1, short:] = False
    ids, taps, last = batch.ids.clone(), batch.taps.clone(), batch.last.clone()
    ids[1, short:], taps[1, short:], last[1, short:] = 0, 0.0, 0.0
    with torch.no_grad():
        both = draft.losses(Batch(ids, mask, taps, last, torch.tensor([24, short])))
        alone = [
            draft.losses(
                Batch(
                    ids[i : i + 1, :n], mask[i : i + 1, :n], taps[i : i + 1, :n], last[i : i + 1, :n], batch.lengths[:1]
                )
            )
            for i, n in enumerate((24, short))
        ]
    assert torch.equal(both.num_reachable, alone[0].num_reachable + alone[1].num_reachable)
    assert torch.equal(both.accepted, alone[0].accepted + alone[1].accepted)
