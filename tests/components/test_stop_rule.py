"""A stop rule: its lengths, its calibration curve, and why it may not look at a drawn token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from components.decoding.verification import verify_sampled
from components.drafts.interface import Sampling
from components.drafts.network.sampling import DraftSampler, confidence_of, most_likely
from components.stop_rule import Calibration, StopRule

AS_SAID = Calibration((0.0, 1.0), (0.0, 1.0))
SHARES = st.floats(0.0, 1.0)
P, Q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
NUM_DRAWS, SIGNIFICANCE = 4000, 1e-4
"""The wrong rule moves a token's share by 0.11: its chi-square is expected at 290, far beyond 21, the limit."""


@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=6))
def test_length_is_that_of_the_thresholds_one_by_one(steps: list[tuple[float, float, float]]) -> None:
    """The first token below verify_from, or the first pass below draft_from, ends the chain."""
    confidences, draft_from, verify_from = zip(*steps, strict=True)
    rule = StopRule((AS_SAID,) * len(steps), (0.0, *draft_from[1:]), verify_from)
    survival = torch.tensor(confidences, dtype=torch.float64).cumprod(0).tolist()
    unverified = [j for j, s in enumerate(survival) if s < verify_from[j]]
    undrafted = [j + 1 for j, s in enumerate(survival[:-1]) if s < draft_from[j + 1]]
    assert rule.length(confidences)[1] == min([*unverified, *undrafted, len(steps)])
    assert rule.length(confidences)[0] - rule.length(confidences)[1] in (0, 1)


@given(st.lists(st.tuples(SHARES, SHARES, SHARES), min_size=1, max_size=5), st.integers(1, 3))
def test_the_sampler_ends_chains_where_the_rule_says_of_all(
    steps: list[tuple[float, float, float]], others: int
) -> None:
    """Sequences side by side have one length: that of their mean survival."""
    confidences, draft_from, verify_from = zip(*steps, strict=True)
    rule = StopRule((AS_SAID,) * len(steps), (0.0, *draft_from[1:]), verify_from)
    logits = torch.tensor([[0.0, -9.0], *[[0.0, 0.0]] * others]).repeat(len(steps), 1, 1)
    logits[:, 0, 1] = torch.tensor(confidences) * -5.0
    sampler = DraftSampler(torch.arange(2), 2, Sampling(stop=rule), [torch.Generator()] * (1 + others))
    for step in logits:
        if not sampler.ended:
            sampler.sample(step)
    passes, length = rule.length(*confidence_of(logits).T.tolist())
    assert [len(proposal.tokens) for proposal in sampler.proposals()] == [length] * (1 + others)
    assert len(sampler.tokens) == passes


def test_what_no_decision_hangs_on_is_not_read() -> None:
    """After the last threshold above 0 the logits need no scale, and a threshold of 0 reads none."""
    assert StopRule.of_least(0.0, 3).num_read == 0 and StopRule.of_least(0.1, 3).num_read == 3
    rule = StopRule((AS_SAID,) * 4, (0.0, 0.0, 0.5, 0.0), (0.0,) * 4)
    assert rule.num_read == 2
    sampler = DraftSampler(torch.arange(2), 2, Sampling(stop=rule), [torch.Generator()])
    scaled = []
    while not sampler.ended:
        scaled.append(sampler.scaled)
        sampler.sample(torch.tensor([[9.0, 0.0]]))
    assert scaled == [True, True, False, False] and len(sampler.proposals()[0].tokens) == 4


def test_a_curve_is_straight_between_its_knots() -> None:
    curve = Calibration((0.2, 0.6, 0.8), (0.1, 0.5, 0.9))
    assert [curve.at(x) for x in (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 1.0)] == pytest.approx(
        [0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 0.9]
    )


def test_confidence_is_the_probability_of_the_likeliest_token() -> None:
    logits = torch.randn(5, 3, 11, generator=torch.Generator().manual_seed(0))
    tokens, confidence = most_likely(logits, torch.arange(11) * 2)
    torch.testing.assert_close(confidence, logits.softmax(-1).amax(-1))
    assert torch.equal(tokens, logits.argmax(-1) * 2)


def next_tokens(looks_at_drawn: bool) -> Tensor:
    """The token after a position, NUM_DRAWS times: drafted from Q, verified by P, or dropped and drawn from P."""
    rng, counts = torch.Generator().manual_seed(3), torch.zeros(4)
    for _ in range(NUM_DRAWS):
        token = torch.multinomial(Q, 1, generator=rng)
        keeps = float(Q[token]) >= 0.3 if looks_at_drawn else float(Q.max()) >= 0.3
        draft, probs = (token, Q[None]) if keeps else (token[:0], Q[None][:0])
        result = verify_sampled(P.repeat(len(draft) + 1, 1), draft, probs, rng)
        counts[result.token_ids[0]] += 1
    return counts


@pytest.mark.parametrize("looks_at_drawn", [False, True])
def test_only_a_rule_blind_to_the_drawn_token_keeps_the_distribution(looks_at_drawn: bool) -> None:
    expected = P * NUM_DRAWS
    statistic = ((next_tokens(looks_at_drawn) - expected).square() / expected).sum()
    p_value = float(torch.special.gammaincc(torch.tensor(1.5), statistic / 2))
    assert (p_value < SIGNIFICANCE) == looks_at_drawn
