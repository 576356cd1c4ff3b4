"""Prompt lookup copies what followed the longest, latest match, and nothing else."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.ngram import Ngram
from components.drafts.settings import NgramSettings

NOTHING = torch.empty(0)


def propose(tokens: list[int], depth: int, pieces: int = 1) -> list[int]:
    drafter = Ngram()
    state = drafter.new_state(64)
    size, found = -(-len(tokens) // pieces), None
    for start in range(0, len(tokens), size):
        columns = CommittedPositions(torch.tensor(tokens[start : start + size]), NOTHING, NOTHING)
        found = drafter.propose(state, columns, depth, Sampling(), torch.Generator())
    assert found is not None and found.probs is None
    return found.tokens.tolist()


def scanned(tokens: list[int], depth: int) -> list[int]:
    """The same by scanning the history from the end."""
    for size in range(min(3, len(tokens) - 1), 0, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[-size:]:
                longer = list(tokens)
                for i in range(depth):
                    longer.append(longer[place + i])
                return longer[len(tokens) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 6), st.integers(1, 4))
def test_the_index_finds_what_a_scan_finds(tokens: list[int], depth: int, pieces: int) -> None:
    assert propose(tokens, depth, pieces) == scanned(tokens, depth)


def test_the_longest_match_wins_over_a_later_shorter_one() -> None:
    assert propose([1, 2, 3, 9, 3, 8, 1, 2, 3], 2) == [9, 3]


def test_a_loop_is_followed_past_the_end_of_the_history() -> None:
    assert propose([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def test_unseen_words_give_no_guess() -> None:
    assert propose([1, 2, 3], 4) == []


@given(st.lists(st.integers(0, 3), min_size=2, max_size=24), st.integers(1, 6))
def test_drafting_everywhere_equals_proposing_after_each_column(tokens: list[int], depth: int) -> None:
    everywhere = Ngram().propose_at_every_position(torch.tensor([7, *tokens]), NOTHING, NOTHING, depth).tokens.tolist()
    for count, row in enumerate(everywhere, start=1):
        assert [token for token in row if token >= 0] == propose(tokens[:count], depth)


def test_a_match_shorter_than_min_ngram_is_no_match() -> None:
    columns = CommittedPositions(torch.tensor([1, 2, 3, 9, 3]), NOTHING, NOTHING)
    for shortest, guess in ((1, [9]), (2, [])):
        drafter = Ngram(NgramSettings(min_ngram=shortest))
        found = drafter.propose(drafter.new_state(8), columns, 1, Sampling(), torch.Generator())
        assert found.tokens.tolist() == guess
