"""Suffix decoding counts and drafts as a search of text and earlier answers does; least used answers are forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_drafts import new_context, write_features
from without_cache import copy_by_counting

from components.contract import Target, UserError
from components.drafts.interface import CommittedPositions, Sampling
from components.drafts.methods.suffix import MOST, START, AnswerCache, Suffix, SuffixAutomaton, Trust
from components.drafts.settings import SuffixSettings
from components.drafts.steps import train_draft
from components.drafts.storage.files import open_draft
from components.targets.interface import AbstractTarget

NOTHING = torch.empty(0)
TEXT = st.lists(st.integers(0, 2), min_size=1, max_size=24)
TEXTS = st.lists(st.lists(st.integers(0, 2), max_size=16), min_size=1, max_size=4)


def substrings(texts: list[list[int]], longest: int) -> Counter[tuple[int, ...]]:
    return Counter(
        tuple(text[start:stop])
        for text in texts
        for start in range(len(text))
        for stop in range(start + 1, min(len(text), start + longest) + 1)
    )


@given(TEXTS, st.integers(1, 6))
def test_counts_are_those_of_a_search_after_every_token(texts: list[list[int]], longest: int) -> None:
    automaton, seen = SuffixAutomaton(longest), list[list[int]]()
    for text in texts:
        automaton.start_text()
        seen.append([])
        for token in text:
            automaton.extend(token)
            seen[-1].append(token)
            counts = substrings(seen, longest)
            assert all(automaton.count_of(string) == times for string, times in counts.items())
            assert automaton.place.depth == min(longest, len(seen[-1]))
    assert automaton.count_of([3]) == automaton.count_of([0, 3]) == 0
    assert automaton.num_tokens == sum(map(len, texts))
    assert automaton.num_states <= 2 * automaton.num_tokens + 1


@given(TEXTS, st.lists(st.integers(0, 3), max_size=20), st.integers(1, 6))
def test_another_text_is_followed_at_its_longest_suffix_that_occurs(
    texts: list[list[int]], other: list[int], longest: int
) -> None:
    automaton = SuffixAutomaton(longest)
    for text in texts:
        automaton.add_text(text)
    counts, place = substrings(texts, longest), START
    for end, token in enumerate(other, start=1):
        place = automaton.follow(place, token)
        matching = [size for size in range(1, min(end, longest) + 1) if tuple(other[end - size : end]) in counts]
        assert place.depth == max(matching, default=0)


def test_a_text_of_one_token_repeated_updates_no_more_states_than_are_counted() -> None:
    automaton = SuffixAutomaton(4)
    automaton.add_text([7] * 500)
    assert [automaton.count_of([7] * size) for size in (1, 2, 4)] == [500, 499, 497]
    assert automaton.count_of([7] * 6) == 0, "longer strings are not counted"


def propose(drafter: Suffix, tokens: list[int], depth: int, pieces: int = 1) -> list[int]:
    state = drafter.new_state(64)
    size, found = -(-len(tokens) // pieces), None
    for start in range(0, len(tokens), size):
        columns = CommittedPositions(torch.tensor(tokens[start : start + size]), NOTHING, NOTHING)
        found = drafter.propose(state, columns, depth, Sampling(temperature=1.0), torch.Generator())
    assert found is not None and found.probs is None
    return found.tokens.tolist()


def settings(
    deepest: int, match: int, factor: float, least: float, cached: int = 0, score: float = 0.0
) -> SuffixSettings:
    return SuffixSettings(
        max_draft_tokens=deepest,
        max_tree_depth=deepest + match,
        max_spec_factor=factor,
        min_token_prob=least,
        cached_tokens=cached,
        min_score=score,
    )


SETTINGS = st.builds(
    settings,
    st.integers(1, 5),
    st.integers(1, 6),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.1, 0.3]),
    score=st.sampled_from([0.0, 0.4, 0.8]),
)


@given(TEXT, SETTINGS, st.integers(0, 6), st.integers(1, 4))
def test_the_automaton_drafts_what_a_search_of_the_text_finds(
    tokens: list[int], told: SuffixSettings, depth: int, pieces: int
) -> None:
    assert propose(Suffix(told), tokens, depth, pieces) == copy_by_counting(tokens, [], told).tokens[:depth]


@given(TEXT, st.lists(TEXT, max_size=4), SETTINGS, st.integers(1, 3))
def test_earlier_answers_are_searched_beside_the_text(
    tokens: list[int], earlier: list[list[int]], told: SuffixSettings, pieces: int
) -> None:
    drafter = Suffix(told.model_copy(update={"cached_tokens": 200}))
    drafter.remember(earlier)
    assert propose(drafter, tokens, 5, pieces) == copy_by_counting(tokens, earlier, told).tokens


@given(TEXT.filter(lambda tokens: len(tokens) > 1), st.lists(TEXT, max_size=2), SETTINGS, st.integers(1, 6))
def test_drafting_everywhere_equals_proposing_after_each_column(
    tokens: list[int], earlier: list[list[int]], told: SuffixSettings, depth: int
) -> None:
    drafter = Suffix(told.model_copy(update={"cached_tokens": 200}))
    drafter.remember(earlier)
    everywhere = drafter.propose_at_every_position(torch.tensor([7, *tokens]), NOTHING, NOTHING, depth).tokens.tolist()
    for count, row in enumerate(everywhere, start=1):
        assert [token for token in row if token >= 0] == propose(drafter, tokens[:count], depth)


def test_a_longer_match_drafts_more() -> None:
    told = settings(4, 4, 1.0, 0.0)
    assert propose(Suffix(told), [1, 2, 3, 4, 5, 6, 9, 3], 4) == [4]
    assert propose(Suffix(told), [1, 2, 3, 4, 5, 6, 9, 2, 3], 4) == [4, 5]
    assert propose(Suffix(told), [1, 2, 3, 4, 5, 6, 9, 1, 2, 3], 4) == [4, 5, 6]


def test_the_most_frequent_continuation_is_drafted_while_it_is_likely() -> None:
    seen = [1, 2, 5, 1, 2, 5, 1, 2, 6, 1]  # after 1, 2: 5 twice of three times
    assert propose(Suffix(settings(4, 1, 2.0, 0.0)), seen, 4) == [2, 5]
    assert propose(Suffix(settings(4, 1, 2.0, 0.4)), seen, 4) == [2]
    assert propose(Suffix(settings(4, 1, 2.0, 0.9)), seen, 4) == []


def test_text_that_broke_its_promises_is_trusted_less_and_drafts_nothing() -> None:
    drafter = Suffix(settings(4, 4, 2.0, 0.0, score=0.5))
    promises = [1, 2, 1, 2, 1, 2, 1]
    assert propose(drafter, promises, 4) != []
    trust = Trust()
    before = list(trust.rates)
    for _ in range(20):
        trust.learn(1, 1.0, right=False)
        trust.learn(40, 0.5, right=True)
    assert trust.rates[1] < 0.1 < before[1] and trust.rates[MOST] == 1.0 and trust.rates[2] == before[2]
    broken = [1, 2, 1, 3, 1, 4, 1, 5, 1, 6, 1]
    assert propose(drafter, broken, 4) == [] and propose(Suffix(settings(4, 4, 2.0, 0.0)), broken, 4) == [6, 1]


def test_the_depth_asked_for_only_cuts_the_draft() -> None:
    drafter, text = Suffix(settings(5, 6, 1.0, 0.0)), [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5]
    whole = propose(drafter, text, 5)
    assert len(whole) > 2 and [propose(drafter, text, depth) for depth in range(6)] == [whole[:n] for n in range(6)]


@given(st.lists(TEXT, max_size=12), st.integers(1, 40))
def test_a_cache_never_holds_more_tokens_than_it_may(answers: list[list[int]], most: int) -> None:
    cache = AnswerCache(most, 4)
    for answer in answers:
        cache.remember(answer)
        assert cache.automaton.num_tokens == sum(map(len, cache.answers)) <= most
        assert cache.answers[-1] == answer[-most:], "the newest is there, cut to what fits"
        rebuilt = AnswerCache(most, 4)
        for kept in cache.answers:
            rebuilt.remember(kept)
        assert all(cache.automaton.count_of([token]) == rebuilt.automaton.count_of([token]) for token in range(3))


def test_the_least_recently_used_answer_is_forgotten_first() -> None:
    told = settings(2, 2, 1.0, 0.0, cached=16)
    drafter = Suffix(told)
    drafter.remember([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    assert propose(drafter, [1, 2], 2) == [3, 4], "which is a use of the first"
    assert propose(drafter, [30, 31], 2) == [], "which uses none"
    drafter.remember([[13, 14, 15, 16], [17, 18, 19, 20]])
    assert [1, 2, 3, 4] in drafter.cache.answers and [5, 6, 7, 8] not in drafter.cache.answers
    assert propose(drafter, [1, 2], 2) == [3, 4] and propose(drafter, [5, 6], 2) == []


def test_a_request_keeps_the_answers_that_it_began_with() -> None:
    drafter = Suffix(settings(2, 2, 1.0, 0.0, cached=8))
    drafter.remember([[1, 2, 3, 4]])
    running = drafter.new_state(8)
    drafter.remember([[5, 6, 7, 8], [9, 10, 11, 12]])
    columns = CommittedPositions(torch.tensor([1, 2]), NOTHING, NOTHING)
    assert drafter.propose(running, columns, 2, Sampling(), torch.Generator()).tokens.tolist() == [3, 4]


def test_the_latest_training_answers_that_fit_are_saved_and_opened_again(
    tiny_target: Callable[[str], AbstractTarget], tmp_path: Path
) -> None:
    target = tiny_target("llama")
    of = Target(key="", path=tmp_path, info={"shape": asdict(target.shape), "num_params": 1, "suppressed_tokens": []})
    features = write_features(target, tmp_path / "features")
    told = {"suffix": {"cached_tokens": 40}}
    ctx = new_context(tmp_path / "draft")
    made = train_draft(of, features, method="suffix", settings=told, ctx=ctx)
    opened = open_draft(made, target)
    assert isinstance(opened, Suffix)
    assert made.info["cached_answers"] == len(opened.cache.answers) == 2, "of 18 tokens or a few fewer"
    again = open_draft(made, target)
    text = torch.tensor([4, *opened.cache.answers[0]])
    found = opened.propose_at_every_position(text, NOTHING, NOTHING, 4).tokens
    assert (found >= 0).any() and torch.equal(found, again.propose_at_every_position(text, NOTHING, NOTHING, 4).tokens)
    with pytest.raises(UserError, match="cached_tokens needs answers"):
        train_draft(of, method="suffix", settings=told, ctx=new_context(tmp_path / "none"))


def test_settings_that_leave_no_room_for_a_match_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tree_depth 16 leaves no room for a match beside max_draft_tokens 16"):
        SuffixSettings(max_tree_depth=16)
