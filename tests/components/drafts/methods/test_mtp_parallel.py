"""Parallel MTP heads against their formula, and heads that a shallow proposal leaves out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tiny_drafts import batch_of, new_draft
from written_out import block, rms

from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.mtp_parallel import MtpParallel
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]


def test_a_parallel_head_is_a_decoder_layer_between_trunk_and_unembedding(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, "mtp-parallel", num_heads=2), batch_of(target, num_rows=1, num_tokens=14)
    assert isinstance(draft, MtpParallel)
    weights = draft.state_dict()
    trunk = rms(batch.last[0], torch.ones(64))
    for k, logits in enumerate(draft.teacher_forced(batch, torch.arange(14)[None])):
        out = block(weights, f"heads.{k}.", trunk)
        expected = target.unembed(target.final_norm(out))[:, draft.draft_ids]
        torch.testing.assert_close(logits[0], expected, atol=2e-4, rtol=2e-4)


def test_a_head_that_no_proposal_needed_runs_over_all_its_columns_later(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, "mtp-parallel", num_heads=3), batch_of(target, num_rows=1)
    state, rng = draft.new_state(32), torch.Generator()
    for start, depth, done in ((0, 1, [6, 0, 0]), (6, 2, [12, 12, 0]), (12, 0, [12, 12, 0]), (18, 3, [24, 24, 24])):
        last = min(start + 6, 23)
        new = CommittedPositions(
            batch.ids[0, start + 1 : last + 1], batch.taps[0, start:last], batch.last[0, start:last]
        )
        draft.propose(state, new, depth, Sampling(), rng)
        assert state.done == [min(columns, 23) for columns in done]
