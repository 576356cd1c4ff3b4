"""Every decoder runs with every drafting method it fits, greedy and sampled, alone and in a ragged batch.

Methods are read from METHODS, so a new line there joins by itself. The drafters are untrained: what they guess does not
matter to what is said. A branching drafter must also guess in a tree what it guesses in a chain.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batched_and_alone import batched_and_alone
from saved_drafts import draw_wide

from components.bench.acceptance import tree_acceptance
from components.contract import UserError
from components.decoding.batch import decode_batch
from components.decoding.chain import decode
from components.decoding.tree_shapes import DynamicShape, StaticShape, TreeShape
from components.drafts.interface import CommittedPositions, Proposer, Sampling, TreeProposer
from components.drafts.storage.files import build_draft
from components.methods import METHODS
from components.targets.interface import AbstractTarget, tapping

LENGTH = 12
PROMPTS = [[5, 9, 2, 7], [3], [11, 4, 4, 8, 30, 2, 6, 19, 25]]
GREEDY, HOT = Sampling(), Sampling(temperature=1.0, top_k=16)


@pytest.fixture(scope="module")
def drafters(target: AbstractTarget) -> dict[str, Any]:
    """One untrained drafter of each method, built when first asked for."""
    return {}


@pytest.fixture
def drafter(request: pytest.FixtureRequest, target: AbstractTarget, drafters: dict[str, Any]) -> Any:
    method = request.param
    if method not in drafters:
        draft_ids = torch.arange(0, target.shape.vocab_size, 2)
        built = build_draft(method, target, {}, draft_ids)
        if isinstance(built, torch.nn.Module):
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for weight in built.parameters():
                    if weight.ndim > 1:  # wide enough that guesses depend on what was said
                        weight.normal_(0.0, 2 * weight.shape[-1] ** -0.5, generator=generator)
            built.prepare_decoding()
        drafters[method] = built
    return drafters[method]


def shapes(drafter: Proposer) -> list[TreeShape]:
    deepest = min(3, drafter.max_depth)
    return [StaticShape.branching([3, 2, 1][:deepest]), DynamicShape(deepest, 3, 8)]


every_method = pytest.mark.parametrize("drafter", sorted(METHODS), indirect=True)


@every_method
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_chains_alone_and_in_a_batch(target: AbstractTarget, drafter: Any, sampling: Sampling) -> None:
    depth = min(3, drafter.max_depth)
    if METHODS[drafter.method].decoding_loop:  # lookahead: greedy, one sequence at a time
        with pytest.raises(UserError, match="one sequence at a time"):
            decode_batch(target, drafter, PROMPTS, max_new_tokens=LENGTH, depth=depth)
        for prompt in PROMPTS:
            plain = decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True)
            alone = decode(target, drafter, prompt, max_new_tokens=LENGTH, depth=depth, ignore_eos=True)
            assert alone.tokens == plain.tokens
        return
    for prompt, run, alone in batched_and_alone(target, drafter, PROMPTS, depth, sampling, LENGTH):
        assert run.tokens == alone.tokens and run.rounds == alone.rounds
        if sampling is GREEDY:
            assert run.tokens == decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].reads_taps])
def test_drafters_of_other_layers_take_turns_on_one_target(target: AbstractTarget, method: str) -> None:
    """Chains, trees and batches: each decodes the target's text, in the rounds that it has on a target of its taps."""
    most = target.shape.num_layers - 1
    tapped = {layers: tapping(target, layers) for layers in (target.tap_layers, (most,), tuple(range(1, most + 1)))}
    ids = torch.arange(0, target.shape.vocab_size, 2)
    built = {layers: build_draft(method, view, {}, ids) for layers, view in tapped.items()}
    for drafter in built.values():
        draw_wide(drafter)
        drafter.prepare_decoding()
    for prompt in PROMPTS:
        plain = decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens
        for layers, drafter in built.items():
            on_one = decode(target, drafter, prompt, max_new_tokens=LENGTH, depth=3, ignore_eos=True)
            alone = decode(tapped[layers], drafter, prompt, max_new_tokens=LENGTH, depth=3, ignore_eos=True)
            assert on_one.tokens == plain and on_one.rounds == alone.rounds
    for drafter in built.values():
        for shape in (3, *shapes(drafter)):
            for prompt, run, alone in batched_and_alone(target, drafter, PROMPTS, shape, GREEDY, LENGTH):
                assert (
                    run.tokens
                    == alone.tokens
                    == decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens
                )


@every_method
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_trees_alone_and_in_a_batch(target: AbstractTarget, drafter: Any, sampling: Sampling) -> None:
    if not isinstance(drafter, TreeProposer):
        pytest.skip("its guesses do not branch")
    for shape in shapes(drafter):
        for prompt, run, alone in batched_and_alone(target, drafter, PROMPTS, shape, sampling, LENGTH):
            assert run.tokens == alone.tokens and run.rounds == alone.rounds
            if sampling is GREEDY:
                assert run.tokens == decode(target, None, prompt, max_new_tokens=LENGTH, ignore_eos=True).tokens


@every_method
def test_a_tree_guesses_what_the_chain_guesses_and_leaves_no_trace(target: AbstractTarget, drafter: Any) -> None:
    """Columns in pieces, a tree and a chain in turn: the chain's distributions are those along its path in a tree."""
    if not isinstance(drafter, TreeProposer):
        pytest.skip("its guesses do not branch")
    depth = min(4, drafter.max_depth)
    ids = torch.randint(2, 32, (1, 20), generator=torch.Generator().manual_seed(5))
    out = target.forward(ids, target.new_cache(1, 20), logits="none", features=True)
    assert out.taps is not None and out.last is not None

    def columns(start: int, stop: int) -> CommittedPositions:
        assert out.taps is not None and out.last is not None
        return CommittedPositions(ids[0, start + 1 : stop + 1], out.taps[0, start:stop], out.last[0, start:stop])

    trees, chains = drafter.new_state(40), drafter.new_state(40)
    for start, stop in ((0, 1), (1, 2), (2, 7), (7, 8), (8, 12), (12, 13)):
        rng = torch.Generator().manual_seed(stop)
        chain = drafter.propose(chains, columns(start, stop), depth, Sampling(temperature=1.0), rng)
        assert chain.probs is not None
        branches = drafter.begin(trees, columns(start, stop), depth)
        logits, parents, last = branches.root[None], [-1], 0
        for level, token in enumerate(chain.tokens.tolist()):
            row = logits[last].softmax(-1)
            torch.testing.assert_close(row, chain.probs[level][drafter.draft_ids], atol=1e-4, rtol=0)
            if level + 1 == depth:
                break
            # The chain's token among siblings that also branch, not the first of them.
            others = drafter.draft_ids[drafter.draft_ids != token][:2].tolist()
            tokens = [others[0], token, others[1]]
            siblings = [parents[last]] * 3 if level else [-1] * 3
            logits = branches.expand(siblings, torch.tensor(tokens))
            first = 3 * level
            parents, last = [first, first + 1, first + 2], 1


@every_method
def test_trees_accept_at_least_what_the_chain_of_their_depth_accepts(target: AbstractTarget, drafter: Any) -> None:
    if not isinstance(drafter, TreeProposer):
        pytest.skip("its guesses do not branch")
    depth, gained = min(3, drafter.max_depth), 0
    for prompt in PROMPTS:
        answer = decode(target, None, prompt, max_new_tokens=LENGTH + depth, ignore_eos=True).tokens
        chain = tree_acceptance(target, drafter, prompt, answer, LENGTH, StaticShape.chain(depth))
        for shape in (*shapes(drafter), StaticShape.branching([8, *[2] * (depth - 1)])):
            tree = tree_acceptance(target, drafter, prompt, answer, LENGTH, shape)
            assert all(t >= c for t, c in zip(tree, chain, strict=True))
            gained += sum(tree) - sum(chain)
    assert gained > 0, "no branch was ever right: this checks nothing"
