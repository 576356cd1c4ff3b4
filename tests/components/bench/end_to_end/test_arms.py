"""The arms of a comparison: which depths are run, and what a drafter that is off does."""

from __future__ import annotations

from pathlib import Path

import torch
from chosen_depths import policy_of_depths

from components.bench.end_to_end.arms import depths_to_run, make_idle, read_policy_depths
from components.bench.prompts import open_drafter
from components.contract import Draft
from components.decoding.chain import decode
from components.drafts.interface import CommittedPositions, Sampling
from components.targets.interface import AbstractTarget


def test_drafting_resumes_after_a_drafter_was_off(opened: AbstractTarget, drafts: list[Draft]) -> None:
    """Its state is kept up to date: what it drafts afterwards is what it would have drafted all along."""
    text = decode(opened, None, [4, 9, 30], max_new_tokens=20, ignore_eos=True).tokens
    ids = torch.tensor([4, 9, 30, *text])
    passed = opened.forward(ids[None], opened.new_cache(1, len(ids)), logits="none", features=True)
    assert passed.taps is not None and passed.last is not None
    whole = CommittedPositions(ids[1:], passed.taps[0, :-1], passed.last[0, :-1])
    for draft in drafts:
        drafter = open_drafter(draft, opened)
        state, done = drafter.new_state(64), 0
        for size in (7, *[1] * 13):
            part = CommittedPositions(*(one[done : done + size] for one in whole))
            assert make_idle(drafter).propose(state, part, 1, Sampling(), torch.Generator()).tokens.numel() == 0
            done += size
        asked = (drafter.num_steps, Sampling(), torch.Generator())
        resumed = drafter.propose(state, CommittedPositions(*(one[done:] for one in whole)), *asked).tokens
        assert resumed.tolist() == drafter.propose(drafter.new_state(64), whole, *asked).tokens.tolist()


def test_depths_stay_within_reach() -> None:
    assert depths_to_run("around", {3}, 7) == [1, 2, 3, 4, 7]
    assert depths_to_run("around", {}, 3) == [1, 3]
    assert depths_to_run("around", {7}, 7) == [1, 3, 6, 7], "3 and 7 are what engines ship with"
    assert depths_to_run("around", {2}, 9) == [1, 2, 3, 7, 9]
    assert depths_to_run("all", {2}, 3) == [1, 2, 3]
    assert depths_to_run([5, 2, 9], {2}, 7) == [2, 5]


def test_a_depth_chosen_for_any_batch_size_or_beyond_training_is_run(tmp_path: Path) -> None:
    rows = [("a", "all", 1, 5), ("a", "all", 8, 2), ("a", "all", 32, 0), ("a", "code", 1, 7), ("b", "all", 1, 0)]
    assert read_policy_depths(policy_of_depths(tmp_path, rows)) == {"a": {5, 2}}
    served = {"a": 3, "champion": 4, "off": 0}
    assert read_policy_depths(policy_of_depths(tmp_path, rows, served)) == {"a": {5, 2, 3}, "champion": {4}}
    assert depths_to_run("around", {5, 2}, 9) == [1, 2, 3, 4, 5, 6, 7, 9]
    assert depths_to_run("around", {6}, 4) == [1, 3, 4, 6]
    assert depths_to_run("all", {6}, 4) == [1, 2, 3, 4, 6]
