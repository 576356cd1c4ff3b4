"""A map says what live decoding does, at every depth, for every drafting method."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from bench_subjects import VOCAB, train_briefly

from components.bench.acceptance import acceptance_map, repeated_bigrams, tree_acceptance
from components.bench.end_to_end.arms import tree_shape
from components.bench.prompts import greedy_answers, kept_length
from components.decoding.batch import decode_tree
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import AbstractDraft, Drafter, TreeProposer
from components.drafts.storage.files import build_draft
from components.methods import METHODS
from components.speedup.prediction.replay import replay
from components.targets.interface import AbstractTarget

LENGTH = 40


DEEPEST = 7


SMALL: dict[str, dict[str, Any]] = {"p-eagle": {"num_layers": 1, "parallel_depth": 4}}  # where the default is slow


@pytest.fixture(scope="module")
def answers(opened: AbstractTarget) -> list[tuple[list[int], list[int]]]:
    """Prompts and the target's greedy answers, end-of-text ignored, a few tokens longer than asked."""
    dice = random.Random(2)
    asked = [[dice.randrange(3, VOCAB) for _ in range(size)] for size in (3, 12, 1)]
    return list(zip(asked, greedy_answers(opened, asked, LENGTH + DEEPEST, 3), strict=True))


def briefly_trained(method: str, opened: AbstractTarget) -> Drafter:
    """A drafter of the method over every token; right now and then, not always."""
    drafter: Drafter = build_draft(method, opened, SMALL.get(method, {}), torch.arange(VOCAB))
    if isinstance(drafter, AbstractDraft):
        dice = random.Random(1)
        train_briefly(drafter, opened, [[dice.randrange(3, VOCAB) for _ in range(6)] for _ in range(24)])
        drafter.eval()
        drafter.prepare_decoding()
    return drafter


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if not method.decoding_loop))
def test_replaying_a_map_is_decoding_live_at_every_depth(
    method: str, opened: AbstractTarget, answers: list[tuple[list[int], list[int]]]
) -> None:
    """Token for token and round for round, as a chain and as a tree, end-of-text included, which the target says.

    Methods with a decoding loop of their own (lookahead) guess from earlier passes: see the next test.
    """
    drafter = briefly_trained(method, opened)
    deepest = min(drafter.max_depth, DEEPEST)
    session = Session(opened)
    accepted_somewhere = 0
    for prompt, answer in answers:
        kept = kept_length(answer[:LENGTH], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt, answer, kept, deepest)
        assert len(found.accepted) == len(found.proxy_accepted) == kept - 1
        for depth in range(1, deepest + 1):
            run = decode(opened, drafter, prompt, max_new_tokens=LENGTH, depth=depth, session=session)
            assert run.tokens == answer[:kept]
            assert without_drafted(run.rounds) == without_drafted(replay(found.accepted, depth))
            assert all(r.drafted == depth for r in run.rounds) or method in ("ngram", "suffix"), (
                "only a look-up may find less"
            )
        accepted_somewhere += sum(found.accepted)
        assert all((proxy > 0) == (a > 0) for a, proxy in zip(found.accepted, found.proxy_accepted, strict=True))
        if isinstance(drafter, TreeProposer):
            shape = tree_shape(deepest, 6)
            path_lengths = tree_acceptance(opened, drafter, prompt, answer, kept, shape)
            tree_run = decode_tree(opened, drafter, prompt, shape, max_new_tokens=LENGTH)
            assert tree_run.tokens == answer[:kept]
            assert without_drafted(tree_run.rounds) == without_drafted(replay(path_lengths, shape.depth))
    assert accepted_somewhere > 10, "the drafter is never right: nothing was tested"


@pytest.mark.parametrize("method", sorted(name for name, method in METHODS.items() if method.decoding_loop))
def test_a_map_of_guesses_from_earlier_passes_is_the_live_run_at_the_deepest_depth(
    method: str, opened: AbstractTarget, answers: list[tuple[list[int], list[int]]]
) -> None:
    drafter = briefly_trained(method, opened)
    deepest, accepted = drafter.max_depth, 0
    for prompt, answer in answers:
        kept = kept_length(answer[:LENGTH], opened.shape.eos_token_ids)
        found = acceptance_map(opened, drafter, prompt, answer, kept, deepest)
        assert len(found.accepted) == kept - 1 and not found.proxy_accepted
        assert all(later >= now - 1 for now, later in itertools.pairwise(found.accepted))
        run = decode(opened, drafter, prompt, max_new_tokens=LENGTH, depth=deepest)
        assert run.tokens == answer[:kept]
        assert without_drafted(run.rounds) == without_drafted(replay(found.accepted, deepest))
        accepted += sum(found.accepted)
    assert accepted > 10, "nothing was ever kept: nothing was tested"


def without_drafted(rounds: Sequence[Any]) -> list[tuple[int, int, int]]:
    return [(r.out_pos, r.accepted, r.emitted) for r in rounds]


@pytest.mark.parametrize(
    ("tokens", "share"), [([], 0.0), ([1], 0.0), ([1, 2, 1, 2], 1 / 3), ([5, 5, 5, 5], 2 / 3), ([1, 2, 3], 0.0)]
)
def test_repeated_bigrams_counts_what_occurred_before(tokens: list[int], share: float) -> None:
    assert repeated_bigrams(tokens) == pytest.approx(share)
