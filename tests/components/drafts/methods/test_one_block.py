"""A proposal of fixed shape says what the ordinary one says, whatever was committed before it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

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


WINDOWED = {
    "eagle3": {"ttt_steps": 3, "window": 7},
    "p-eagle": {"parallel_depth": 3, "window": 7, "num_layers": 3},
    "dflash": {"block_size": 4, "window": 7},
    "dspark": {"block_size": 3, "window": 7, "markov_rank": 8},
}


def drafter_of(target: AbstractTarget, method: str, **settings: object) -> OneBlockDraft:
    drafter = new_draft(target, method, **settings)
    assert isinstance(drafter, OneBlockDraft)
    drafter.eval().requires_grad_(False)
    return drafter


@pytest.mark.parametrize(("method", "settings"), [*((one, {}) for one in METHODS), ("eagle3", WINDOWED["eagle3"])])
def test_guesses_are_those_of_the_ordinary_way(method: str, settings: dict[str, Any], tiny_target: MakeTarget) -> None:
    """Prompt, then 1 to depth + 1 columns at a time, depths in turn; then all of it again on the same memory."""
    target = tiny_target("llama")
    ordinary, batch = drafter_of(target, method, **settings), batch_of(target, num_rows=1, num_tokens=120)
    graphed = GraphedChain(ordinary)
    for _ in range(2):
        states, done = (ordinary.new_state(140), graphed.new_state(140)), 0
        for size, depth in ((5, 3), (1, 3), (4, 3), (2, 1), (1, 3), (3, 4), (5, 4), (2, 3)) * 5:
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
        assert states[0].num_columns == states[1].num_columns == 115
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
    assert one.cache.rows.data_ptr() != two.cache.rows.data_ptr()
    address = one.cache.rows.data_ptr()
    del one
    assert graphed.new_state(16).cache.rows.data_ptr() == address


@pytest.mark.parametrize("method", WINDOWED)
def test_with_a_window_drafts_leave_no_trace_and_a_batch_drafts_as_each_alone(
    method: str, tiny_target: MakeTarget
) -> None:
    """Columns come one, few and many at a time, after drafts of any depth, over texts of many windows, whose rows take
    the place of older ones; the training graph is the reference."""
    target = tiny_target("llama")
    drafter: Any = new_draft(target, method, **WINDOWED[method])
    batch, rng = batch_of(target, num_rows=2, num_tokens=320), torch.Generator()
    expected = [
        drafter.propose_at_every_position(*row, 3).tokens for row in zip(batch.ids, batch.taps, batch.last, strict=True)
    ]
    states, done = [drafter.new_state(330) for _ in range(2)], [0, 0]
    for sizes, depth in (((20, 9), 3), *[((1, 4), 1), ((3, 1), 3), ((2, 9), 3), ((1, 1), 3)] * 18, ((150, 21), 3)):
        parts = [
            CommittedPositions(ids[at + 1 : at + size + 1], taps[at : at + size], last[at : at + size])
            for ids, taps, last, at, size in zip(batch.ids, batch.taps, batch.last, done, sizes, strict=True)
        ]
        done = [at + size for at, size in zip(done, sizes, strict=True)]
        said = drafter.propose_batch(states, parts, depth, Sampling(), [rng, rng])
        for proposal, positions, at in zip(said, expected, done, strict=True):
            assert proposal.tokens.tolist() == positions[at - 1, :depth].tolist()
    assert done == [296, 300] and max(cache.rows.shape[1] for cache in states[1].caches) < 100


def test_what_lies_outside_the_window_changes_nothing_and_what_lies_inside_does(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    drafter, batch = drafter_of(target, "eagle3", ttt_steps=3, window=7), batch_of(target, num_rows=1)

    def logits(changed: int) -> list[torch.Tensor]:
        taps = batch.taps.clone()
        taps[0, changed] += 5.0
        with torch.no_grad():
            return list(drafter.teacher_forced(batch._replace(taps=taps), torch.tensor([[12]])))

    alike = [[torch.equal(*pair) for pair in zip(logits(at), logits(0), strict=True)] for at in range(13)]
    assert alike[:6] == [[True] * 3] * 6  # column 6 is the oldest of the first step's window, 12 - 7 < 6
    assert not any(alike[6][:1]) and alike[8][0] is False


def test_the_branches_of_a_windowed_tree_are_drafted_as_chains_are(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    drafter, batch = drafter_of(target, "eagle3", ttt_steps=3, window=7), batch_of(target, num_rows=1, num_tokens=40)
    root = 30
    part = CommittedPositions(batch.ids[0, 1 : root + 2], batch.taps[0, : root + 1], batch.last[0, : root + 1])
    branches = drafter.begin(drafter.new_state(40), part, 3)
    first = branches.expand([-1, -1], torch.tensor([4, 6]))
    second = branches.expand([0, 1], torch.tensor([8, 10]))
    for branch, tokens in enumerate(([4, 8], [6, 10])):
        ids = batch.ids.clone()
        ids[0, root + 2 : root + 4] = torch.tensor(tokens)
        with torch.no_grad():
            steps = [step[0, 0] for step in drafter.teacher_forced(batch._replace(ids=ids), torch.tensor([[root]]))]
        for drafted, expected in zip((branches.root, first[branch], second[branch]), steps, strict=True):
            torch.testing.assert_close(drafted.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
