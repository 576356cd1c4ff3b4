"""Where the target's positions run out: whatever plain decoding is served or refused, every drafter is as well."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from twin import ColumnTwin, Twin

from benchmarks.two_row import decode_two_row
from components.contract import UserError
from components.decoding.batch import decode_batch, decode_tree
from components.decoding.chain import Decoded, decode
from components.decoding.tree_shapes import DynamicShape, StaticShape
from components.drafts.interface import Sampling
from components.drafts.methods.lookahead import Lookahead
from components.drafts.methods.ngram import Ngram
from components.drafts.settings import LookaheadSettings
from components.targets.forward.llama import FastTarget
from components.targets.interface import AbstractCache, TargetPass, TreeRows

LENGTH = 20


class Watched:
    """A target that notes the last position that any counted row of its passes sits at."""

    def __init__(self, target: FastTarget) -> None:
        self.last_position, self.inner = 0, target
        self.target = copy.copy(target)
        self.target.forward = self.forward  # type: ignore[method-assign]
        self.target.new_cache = target.new_cache  # type: ignore[method-assign]

    def forward(self, ids: Tensor, cache: AbstractCache, **asked: Any) -> TargetPass:
        tree: TreeRows | None = asked.get("tree")
        rows = asked.get("num_valid")
        deepest = (torch.tensor([ids.shape[1]]) if rows is None else rows) - 1
        deepest = deepest if tree is None else tree.depths.amax(dim=1)
        self.last_position = max(self.last_position, int((cache.lengths + deepest).max()))
        return self.inner.forward(ids, cache, **asked)


Way = Callable[[FastTarget, FastTarget, list[int], int], Decoded]


def chain(depth: int) -> Way:
    return lambda watched, own, prompt, limit: decode(
        watched, Twin(own), prompt, max_new_tokens=limit, depth=depth, ignore_eos=True
    )


def tree(shape: StaticShape | DynamicShape) -> Way:
    return lambda watched, own, prompt, limit: decode_tree(
        watched, Twin(own), prompt, shape, max_new_tokens=limit, ignore_eos=True
    )


def batch(depth: int, shorter: int) -> Way:
    """The prompt beside a shorter one, which has room to spare."""
    return lambda watched, own, prompt, limit: decode_batch(
        watched, Twin(own), [prompt[shorter:], prompt], max_new_tokens=limit, depth=depth, ignore_eos=True
    )[1]


def lookahead(watched: FastTarget, own: FastTarget, prompt: list[int], limit: int) -> Decoded:
    proposer = Lookahead(own, LookaheadSettings(window=5, ngram_size=4, max_guesses=4))
    return decode(watched, proposer, prompt, max_new_tokens=limit, depth=3, ignore_eos=True)


def two_row(watched: FastTarget, own: FastTarget, prompt: list[int], limit: int) -> Decoded:
    return decode_two_row(watched, ColumnTwin(own), prompt, max_new_tokens=limit, ignore_eos=True)


WAYS: dict[str, Way] = {
    "plain": lambda watched, own, prompt, limit: decode(watched, None, prompt, max_new_tokens=limit, ignore_eos=True),
    "plain batch": batch(0, 4),
    "chain 1": chain(1),
    "chain 8": chain(8),
    "ngram": lambda watched, own, prompt, limit: decode(
        watched, Ngram(), prompt, max_new_tokens=limit, depth=6, ignore_eos=True
    ),
    "batch 4": batch(4, 6),
    "static tree": tree(StaticShape.branching([2, 2, 1])),
    "dynamic tree": tree(DynamicShape(depth=5, top_k=3, budget=12)),
    "lookahead": lookahead,
    "two rows": two_row,
}


def prompt_of(length: int) -> list[int]:
    return [(7 * place) % 29 + 2 for place in range(length)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spare", [0, 1, 3])
def test_a_text_that_fits_is_decoded_to_the_last_position_and_no_further(
    target: FastTarget, way: str, spare: int
) -> None:
    longest = target.shape.max_position_embeddings
    prompt = prompt_of(longest - LENGTH - spare)
    watched = Watched(target)
    run = WAYS[way](watched.target, target, prompt, LENGTH)
    assert run.tokens == decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens
    assert len(run.tokens) == LENGTH and watched.last_position < longest
    assert sum(one.emitted for one in run.rounds) == LENGTH - 1


@pytest.mark.parametrize("way", WAYS)
def test_a_text_that_does_not_fit_is_refused_in_the_same_words(target: FastTarget, way: str) -> None:
    prompt = prompt_of(target.shape.max_position_embeddings - LENGTH)
    with pytest.raises(UserError, match="prompt and new tokens need 257 positions, the target has 256: shorten"):
        WAYS[way](target, target, prompt, LENGTH + 1)


def test_only_what_has_no_position_is_not_guessed(target: FastTarget) -> None:
    """Rounds are those of a target that has more positions, but for guesses past the last one."""
    longest = target.shape.max_position_embeddings
    prompt = prompt_of(longest - LENGTH)
    roomy = copy.copy(target)
    roomy.shape = copy.copy(target.shape)
    object.__setattr__(roomy.shape, "max_position_embeddings", longest + 64)
    ours = decode(target, Twin(target), prompt, max_new_tokens=LENGTH, depth=4, ignore_eos=True).rounds
    theirs = decode(roomy, Twin(target), prompt, max_new_tokens=LENGTH, depth=4, ignore_eos=True).rounds
    assert [(one.out_pos, one.emitted, one.kv_len) for one in ours] == [
        (one.out_pos, one.emitted, one.kv_len) for one in theirs
    ]
    assert [one.drafted for one in ours] == [min(4, longest - len(prompt) - one.out_pos - 1) for one in ours]
    assert ours[-1].drafted < 4 == ours[0].drafted, "the end was reached"


@pytest.mark.parametrize("shape", [None, StaticShape.branching([2, 2, 1])])
def test_a_sampled_run_ends_there_too(target: FastTarget, shape: StaticShape | None) -> None:
    prompt = prompt_of(target.shape.max_position_embeddings - LENGTH)
    (run,) = decode_batch(
        target,
        Twin(target),
        [prompt],
        max_new_tokens=LENGTH,
        depth=0 if shape else 4,
        shape=shape,
        sampling=Sampling(1.2),
        rngs=[torch.Generator().manual_seed(3)],
        ignore_eos=True,
    )
    assert len(run.tokens) == LENGTH
