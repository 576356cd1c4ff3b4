"""P-EAGLE against one forward over all rows with an explicit mask, and what its sampling of depths keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tiny_drafts import batch_of, new_draft
from torch import Tensor
from written_out import rms, rotated

from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.p_eagle import PEagle
from components.drafts.training.losses import StepLossAccumulator, teacher_distributions
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
LENGTH, DEPTH = 11, 4


def p_eagle(target: AbstractTarget, **settings: Any) -> PEagle:
    draft = new_draft(target, "p-eagle", parallel_depth=DEPTH, num_layers=3, **settings)
    assert isinstance(draft, PEagle)
    return draft


def naive(weights: dict[str, Tensor], embedding: Tensor, next_ids: Tensor, taps: Tensor) -> Tensor:
    """[DEPTH, T, N]: every (column, depth) is a row of one sequence of T * DEPTH rows; 4 heads, 2 key heads."""
    length = len(next_ids)
    anchor = torch.arange(length).repeat(DEPTH)
    depth = torch.arange(DEPTH).repeat_interleave(length)
    positions = anchor + depth
    true = (depth == 0)[:, None]
    hidden = torch.where(true, taps.repeat(DEPTH, 1), weights["mask_hidden"]) @ weights["fc.weight"].T
    tokens = torch.where(true, embedding[next_ids].repeat(DEPTH, 1), weights["mask_token"])
    own_chain = (anchor[:, None] == anchor) & (depth <= depth[:, None])
    seen = ((depth == 0) & (anchor <= anchor[:, None])) | own_chain
    for i in range(3):
        part = {n.removeprefix(f"layers.{i}."): w for n, w in weights.items() if n.startswith(f"layers.{i}.")}
        if i == 0:
            normed = (rms(tokens, part["input_layernorm.weight"]), rms(hidden, part["hidden_norm.weight"]))
            x = torch.cat(normed, -1)
        else:
            x = rms(hidden, part["input_layernorm.weight"])

        def heads(name: str, count: int, x: Tensor = x, part: dict[str, Tensor] = part) -> Tensor:
            return (x @ part[f"self_attn.{name}_proj.weight"].T).view(len(x), count, -1).transpose(0, 1)

        queries, keys, values = rotated(heads("q", 4), positions), rotated(heads("k", 2), positions), heads("v", 2)
        mixed = []
        for head in range(4):
            scores = (queries[head] @ keys[head // 2].T / queries.shape[-1] ** 0.5).masked_fill(~seen, -1e30)
            mixed.append(scores.softmax(-1) @ values[head // 2])
        hidden = hidden + torch.cat(mixed, -1) @ part["self_attn.o_proj.weight"].T
        x = rms(hidden, part["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(x @ part["mlp.gate_proj.weight"].T) * (x @ part["mlp.up_proj.weight"].T)
        hidden = hidden + gate @ part["mlp.down_proj.weight"].T
    return (rms(hidden, weights["norm.weight"]) @ weights["lm_head.weight"].T).view(DEPTH, length, -1)


def test_all_depths_equal_one_forward_with_an_explicit_mask(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = p_eagle(target), batch_of(target, num_rows=1, num_tokens=LENGTH)
    expected = naive(draft.state_dict(), target.embedding, batch.ids[0, 1:], batch.taps[0, :-1])
    rows = torch.tensor([[7, 2, 9, 4]])
    widths = [4, 3, 3, 1]
    with torch.no_grad():
        found = draft.draft_logits(batch.taps[:, :-1], batch.ids[:, 1:], rows, widths)
    for d, width in enumerate(widths):
        assert found[d].shape[1] == width
        torch.testing.assert_close(found[d][0], expected[d][rows[0, :width]], atol=3e-4, rtol=1e-3)


def test_a_proposal_is_one_pass_whatever_its_depth(tiny_target: MakeTarget) -> None:
    """And its guesses do not depend on how many are asked for."""
    target = tiny_target("llama")
    draft, batch = p_eagle(target), batch_of(target, num_rows=1)
    said = []
    for depth in (1, 2, DEPTH):
        state = draft.new_state(32)
        assert draft._decoder is not None
        passes: list[int] = []
        block = draft._decoder.blocks[0]
        run = block.run
        block.run = lambda *rows, run=run, passes=passes, **more: (passes.append(1), run(*rows, **more))[1]  # type: ignore[method-assign]
        columns = CommittedPositions(batch.ids[0, 1:13], batch.taps[0, :12], batch.last[0, :12])
        said.append(draft.propose(state, columns, depth, Sampling(), torch.Generator()).tokens.tolist())
        block.run = run  # type: ignore[method-assign]
        assert len(passes) == 1
    assert said[0] == said[2][:1] and said[1] == said[2][:2] and len(said[2]) == DEPTH


def test_deep_guesses_are_trained_on_a_nested_sample_of_the_reachable_columns(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    batch = batch_of(target, num_rows=2, num_tokens=96)
    draft = p_eagle(target, kept_share=0.5, least_share=0.2)
    everything = draft.eval().losses(batch)
    sampled = draft.train().losses(batch)
    again = draft.losses(batch)
    assert torch.equal(sampled.loss.detach(), again.loss.detach())  # a resumed run draws the same
    shares = sampled.num_reachable / everything.num_reachable
    for share, wanted in zip(shares.tolist(), (1.0, 0.5, 0.25, 0.2), strict=True):
        assert abs(share - wanted) < 0.1
    assert (sampled.accepted <= sampled.num_reachable).all()


def test_training_on_every_column_and_depth_gives_the_judged_loss(tiny_target: MakeTarget) -> None:
    """kept_share 1: the shuffled roots change the order of the rows and nothing else."""
    target = tiny_target("llama")
    draft, batch = p_eagle(target, kept_share=1.0), batch_of(target)
    with torch.no_grad():
        trained, judged = draft.train().losses(batch), draft.eval().losses(batch)
        judge = StepLossAccumulator(batch, teacher_distributions(target, batch.last, draft.draft_ids), DEPTH, "token")
    torch.testing.assert_close(trained.loss, judged.loss, atol=1e-5, rtol=1e-5)
    assert torch.equal(trained.accepted, judged.accepted) and torch.equal(trained.num_reachable, judged.num_reachable)
    assert judged.num_reachable.tolist() == judge.reachable_at_step.sum((1, 2)).tolist()
