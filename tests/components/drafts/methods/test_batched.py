"""Guesses for many sequences at once are those of each alone, however ragged the sequences are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_drafts import TRAINED, batch_of, new_draft
from torch import Tensor

from components.drafts.interface import BatchProposer, CommittedPositions, Sampling
from components.drafts.network import cached_block
from components.drafts.storage.files import method_class
from components.methods import METHODS
from components.targets.forward import static_cache
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


@pytest.mark.parametrize("method", TRAINED)
def test_drafts_are_the_same_however_attention_lays_out_its_output(
    method: str, tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's kernels put the heads of a row side by side in memory, a CPU's the rows of a head."""
    for module in (cached_block, static_cache):  # PyTorch's attention, as on a GPU
        monkeypatch.setattr(module, "can_attend", lambda *_: False)
    target = tiny_target("llama")
    draft, batch = new_draft(target, method), batch_of(target, num_rows=1, num_tokens=12)
    attention, laid_out = F.scaled_dot_product_attention, []

    def of_a_gpu(*args: Tensor, **settings: Any) -> Tensor:
        laid_out.append(True)
        return attention(*args, **settings).transpose(1, 2).contiguous().transpose(1, 2)

    def chains() -> list[list[int]]:
        state, found = draft.new_state(24), []
        for at, count in ((0, 6), (6, 1), (7, 3)):
            rows = slice(at, at + count)
            new = CommittedPositions(batch.ids[0, at + 1 : at + count + 1], batch.taps[0, rows], batch.last[0, rows])
            found.append(draft.propose(state, new, 3, Sampling(), torch.Generator()).tokens.tolist())
        return found

    expected = chains()
    monkeypatch.setattr(F, "scaled_dot_product_attention", of_a_gpu)
    assert chains() == expected
    assert laid_out or method == "medusa"
