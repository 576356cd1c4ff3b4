"""Guesses for many sequences at once are those of each alone, however ragged the sequences are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tiny_drafts import TRAINED, batch_of, new_draft

from components.drafts.interface import BatchProposer, CommittedPositions, Sampling
from components.drafts.storage.files import method_class
from components.methods import METHODS
from components.targets.interface import AbstractTarget

MakeTarget = Callable[[str], AbstractTarget]
BATCHED = [name for name in METHODS if hasattr(method_class(name), "propose_batch")]
ROUNDS = [((1, 5, 20), 3), ((4, 1, 1), 1), ((1, 3, 1), 0), ((2, 1, 1), 7), ((1, 4, 1), 2)]
"""(new columns of each of three sequences, guesses asked for), round by round."""


def test_every_trained_method_drafts_for_a_batch_but_the_draft_model() -> None:
    """Its cache is a target's own, one a sequence, and prompt lookup has nothing to share."""
    assert {*TRAINED} - {*BATCHED} == {"draft-model"} and {*BATCHED} < {*TRAINED}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_k=9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", BATCHED)
def test_a_batch_of_ragged_sequences_is_told_what_each_alone_is_told(
    method: str, sampling: Sampling, tiny_target: MakeTarget
) -> None:
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target, num_rows=3, num_tokens=40)
    assert isinstance(draft, BatchProposer)
    together, alone = [draft.new_state(48) for _ in range(3)], [draft.new_state(48) for _ in range(3)]
    seeds = [[torch.Generator().manual_seed(row) for row in range(3)] for _ in range(2)]
    done = [0, 0, 0]
    for counts, depth in ROUNDS:
        columns = [
            CommittedPositions(
                batch.ids[row, at + 1 : at + 1 + n], batch.taps[row, at : at + n], batch.last[row, at : at + n]
            )
            for row, (at, n) in enumerate(zip(done, counts, strict=True))
        ]
        done = [at + n for at, n in zip(done, counts, strict=True)]
        found = draft.propose_batch(together, columns, depth, sampling, seeds[0])
        for row, proposal in enumerate(found):
            expected = draft.propose(alone[row], columns[row], depth, sampling, seeds[1][row])
            assert proposal.tokens.tolist() == expected.tokens.tolist()
            assert len(proposal.tokens) == min(depth, draft.max_depth)
            assert (proposal.probs is None) == (expected.probs is None)
            if proposal.probs is not None and expected.probs is not None:
                torch.testing.assert_close(proposal.probs, expected.probs, atol=1e-5, rtol=1e-4)
            assert torch.equal(seeds[0][row].get_state(), seeds[1][row].get_state())
