"""A proposal of fixed shape says what the ordinary one says, whatever was committed before it."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from tiny_drafts import batch_of, new_draft

from components.decoding.chain import decode
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.one_block import GraphedChain, OneBlockDraft
from components.targets.interface import AbstractTarget

DEVICE = os.environ.get("DRAFTSMITH_TEST_DEVICE", "cpu")
METHODS = ("eagle1", "eagle3", "hass")
MakeTarget = Callable[[str], AbstractTarget]


def drafter_of(target: AbstractTarget, method: str) -> OneBlockDraft:
    drafter = new_draft(target, method)
    assert isinstance(drafter, OneBlockDraft)
    drafter.eval().requires_grad_(False)
    return drafter


@pytest.mark.parametrize("method", METHODS)
def test_guesses_are_those_of_the_ordinary_way(method: str, tiny_target: MakeTarget) -> None:
    """Prompt, then 1 to depth + 1 columns at a time, depths in turn; then all of it again on the same memory."""
    target = tiny_target("llama")
    ordinary, batch = drafter_of(target, method), batch_of(target, num_rows=1)
    graphed = GraphedChain(ordinary)
    for _ in range(2):
        states, done = (ordinary.new_state(40), graphed.new_state(40)), 0
        for size, depth in ((5, 3), (1, 3), (4, 3), (2, 1), (1, 3), (3, 4), (5, 4), (2, 3)):
            part = CommittedPositions(
                batch.ids[0, done + 1 : done + size + 1],
                batch.taps[0, done : done + size],
                batch.last[0, done : done + size],
            )
            said = [
                way.propose(state, part, depth, Sampling(), torch.Generator()).tokens.tolist()
                for way, state in zip((ordinary, graphed), states, strict=True)
            ]
            assert said[0] == said[1] and len(said[0]) == depth
            done += size
        assert states[0].num_columns == states[1].num_columns == 23
        del states


def test_it_decodes_as_the_drafter_does_to_the_very_end_of_the_cache(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    ordinary = drafter_of(target, "eagle3")
    runs = [
        decode(target, way, [5, 6, 7, 8], max_new_tokens=30, depth=3, ignore_eos=True)  # type: ignore[arg-type]
        for way in (ordinary, GraphedChain(ordinary))
    ]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds


def test_states_that_live_side_by_side_have_memory_of_their_own(tiny_target: MakeTarget) -> None:
    graphed = GraphedChain(drafter_of(tiny_target("llama"), "eagle3"))
    one, two = graphed.new_state(16), graphed.new_state(16)
    assert one.cache.data_ptr() != two.cache.data_ptr()
    address = one.cache.data_ptr()
    del one
    assert graphed.new_state(16).cache.data_ptr() == address
