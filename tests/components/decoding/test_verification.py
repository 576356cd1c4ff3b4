"""Greedy verification says what plain decoding says; rejection sampling keeps the target's distribution.

The statistical test draws N = 20,000 first tokens and the pairs (first, second) of chains, and compares them with the
target's exact distribution by chi-square. Its power is checked beside it: three wrong rules that are easily written by
mistake must be rejected by the same test at the same N and level.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chi_square import LEVEL, VOCAB, chi_square_p_value
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from components.decoding.session import draw
from components.decoding.verification import VerifyResult, verify_greedy, verify_sampled

NUM_DRAWS = 20_000

Rule = Callable[[Tensor, Tensor, Tensor | None, torch.Generator], VerifyResult]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), k=st.integers(0, 6))
def test_greedy_verification_emits_the_argmax_chain(data: st.DataObject, k: int) -> None:
    logits = torch.randn(k + 1, VOCAB, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 999))))
    guesses = torch.tensor(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=k, max_size=k)), dtype=torch.int64)
    verdict = verify_greedy(logits, guesses)
    picks = logits.argmax(-1).tolist()
    a = verdict.num_accepted
    assert verdict.token_ids == picks[: a + 1] == verdict.emitted.tolist()
    assert guesses.tolist()[:a] == picks[:a]
    assert a == k or guesses[a] != picks[a]


def target_chain(seed: int = 0) -> tuple[Tensor, Tensor]:
    """A target over two tokens: p_1 [V] and p_2 given the first [V, V]."""
    rng = torch.Generator().manual_seed(seed)
    first = (0.8 * torch.randn(VOCAB, generator=rng)).softmax(-1)
    second = (0.8 * torch.randn(VOCAB, VOCAB, generator=rng)).softmax(-1)
    return first, second


def sample_pairs(rule: Rule, deterministic: bool) -> Tensor:
    """Counts [V, V] of the first two tokens that speculative decoding with `rule` emits, over NUM_DRAWS runs.

    Rounds draft two tokens from a draft distribution that is far from the target's and lacks one token altogether. A
    round that emits one token is followed by a draw from the target, as the next round of a real run would be.
    """
    rng = torch.Generator().manual_seed(1)
    p_first, p_second = target_chain(0)
    q_first, q_second = target_chain(1)
    q_first, q_second = q_first.clone(), q_second.clone()
    q_first[2] = 0.0
    q_second[:, 4] = 0.0
    q_first, q_second = q_first / q_first.sum(), q_second / q_second.sum(-1, keepdim=True)
    p_third = torch.full((VOCAB,), 1 / VOCAB)
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    best_first, best_second = q_first.argmax(), q_second.argmax(-1)
    for _ in range(NUM_DRAWS):
        if deterministic:
            guesses = torch.stack((best_first, best_second[best_first]))
            draft_probs = None
        else:
            one = draw(q_first.unsqueeze(0), rng)[0]
            guesses = torch.stack((one, draw(q_second[one].unsqueeze(0), rng)[0]))
            draft_probs = torch.stack((q_first, q_second[one]))
        probs = torch.stack((p_first, p_second[guesses[0]], p_third))
        tokens = rule(probs, guesses, draft_probs, rng).token_ids
        second = tokens[1] if len(tokens) > 1 else int(draw(p_second[tokens[0]].unsqueeze(0), rng)[0])
        counts[tokens[0], second] += 1
    return counts


def pair_distribution() -> Tensor:
    first, second = target_chain(0)
    return first.unsqueeze(-1) * second


def forget_the_draft_in_the_ratio(
    probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, rng: torch.Generator
) -> VerifyResult:
    """Wrong: keeps a guess with probability p(x) but replaces it from norm(max(p - q, 0))."""
    assert draft_probs is not None
    at_guess = guesses.unsqueeze(-1)
    keep = torch.rand(len(guesses), generator=rng) < probs[:-1].gather(-1, at_guess).squeeze(-1)
    a = int(keep.long().cumprod(0).sum())
    rest = probs[a] if a == len(guesses) else (probs[a] - draft_probs[a]).clamp_min(0)
    emitted = torch.cat((guesses[:a], draw(rest.unsqueeze(0), rng)))
    return VerifyResult(a, emitted, emitted.tolist())


def resample_from_target(
    probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, rng: torch.Generator
) -> VerifyResult:
    """Wrong: replaces a rejected guess by a draw from p instead of norm(max(p - q, 0))."""
    verdict = verify_sampled(probs, guesses, draft_probs, rng)
    a = verdict.num_accepted
    emitted = torch.cat((guesses[:a], draw(probs[a : a + 1], rng)))
    return VerifyResult(a, emitted, emitted.tolist())


def ratio_off_by_a_fifth(
    probs: Tensor, guesses: Tensor, draft_probs: Tensor | None, rng: torch.Generator
) -> VerifyResult:
    """Wrong by little: a draft distribution a fifth too flat, as from another temperature."""
    assert draft_probs is not None
    flatter = draft_probs**0.8
    return verify_sampled(probs, guesses, flatter / flatter.sum(-1, keepdim=True), rng)


@pytest.mark.parametrize("deterministic", [False, True], ids=["drawn", "deterministic"])
def test_rejection_sampling_keeps_the_distribution_of_the_target(deterministic: bool) -> None:
    assert chi_square_p_value(sample_pairs(verify_sampled, deterministic), pair_distribution()) > LEVEL


@pytest.mark.parametrize("wrong", [forget_the_draft_in_the_ratio, resample_from_target, ratio_off_by_a_fifth])
def test_the_statistical_test_rejects_wrong_rules(wrong: Rule) -> None:
    assert chi_square_p_value(sample_pairs(wrong, deterministic=False), pair_distribution()) < LEVEL


def test_a_guess_the_target_cannot_say_is_never_kept() -> None:
    probs = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        verdict = verify_sampled(probs, torch.tensor([0]), torch.tensor([[1.0, 0.0]]), rng)
        assert verdict.token_ids == [1]


def test_equal_distributions_accept_everything() -> None:
    probs = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5]])
    for seed in range(50):
        rng = torch.Generator().manual_seed(seed)
        guesses = draw(probs[:2], rng)
        assert verify_sampled(probs, guesses, probs[:2], rng).num_accepted == 2
