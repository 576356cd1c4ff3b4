"""Drafting with a real drafter at temperature 1.5 keeps the target's distribution, which is computed exactly.

The first three tokens of N = 1,500 answers: token 0 is a plain draw, tokens 1 and 2 come from a drafted round. Counts
of token 1 and of token 2 are compared with their exact probabilities by chi-square; tokens expected fewer than five
times share one cell. A drafter that lies about its distribution must be caught by the same test at the same N.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from components.bench.prompts import open_drafter
from components.contract import Draft
from components.decoding.chain import decode
from components.decoding.session import Session
from components.drafts.interface import CommittedPositions, Proposal, Proposer, Sampling
from components.drafts.network.sampling import probabilities
from components.targets.interface import AbstractTarget

PROMPT = [7, 21, 40, 11]
HOT = Sampling(temperature=1.5, top_k=48)
NUM_ANSWERS = 1500
LEVEL = 1e-4


class Liar:
    """Drafts as another does and says that its guesses came from a flatter distribution."""

    method: ClassVar[str] = "liar"
    needs_features: ClassVar[bool] = True

    def __init__(self, inner: Proposer) -> None:
        self.inner, self.max_depth = inner, inner.max_depth

    def new_state(self, capacity: int) -> Any:
        return self.inner.new_state(capacity)

    def propose(
        self, state: Any, columns: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        said = self.inner.propose(state, columns, depth, sampling, rng)
        assert said.probs is not None
        flat = said.probs**0.3
        return Proposal(said.tokens, flat / flat.sum(-1, keepdim=True))


def exact_marginals(opened: AbstractTarget) -> list[torch.Tensor]:
    """The distributions of tokens 0, 1 and 2 after PROMPT, each [V]."""

    def after(texts: torch.Tensor) -> torch.Tensor:
        logits = opened.forward(texts, opened.new_cache(*texts.shape), logits="last").logits
        assert logits is not None
        return probabilities(logits[:, 0], HOT).double()

    every = torch.arange(opened.shape.vocab_size)[:, None]
    texts, mass = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    marginals = []
    for _ in range(3):
        joint = mass[:, None] * after(texts)
        marginals.append(joint.sum(0))
        texts = torch.cat((texts.repeat_interleave(len(every), 0), every.repeat(len(texts), 1)), 1)
        mass = joint.flatten()
    return marginals


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The chance of a Pearson statistic at least this large; rare cells are pooled."""
    expected = probs * counts.sum()
    assert counts[expected == 0].sum() == 0, "a token that top-k cuts was said"
    often = expected >= 5
    rest = torch.stack((counts[~often].sum(), expected[~often].sum()))[:, None]
    seen, wanted = torch.cat((torch.stack((counts[often], expected[often])), rest), 1)
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    assert len(seen) > 8, "nearly deterministic: the test would see nothing"
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def p_values(opened: AbstractTarget, proposer: Proposer) -> tuple[list[float], float]:
    """Chi-square of tokens 1 and 2 over NUM_ANSWERS drafted answers, and the share of first guesses that were kept."""
    session = Session(opened)
    counts = torch.zeros(3, opened.shape.vocab_size, dtype=torch.float64)
    kept = 0
    for seed in range(NUM_ANSWERS):
        run = decode(
            opened,
            proposer,
            PROMPT,
            max_new_tokens=3,
            depth=2,
            sampling=HOT,
            rng=torch.Generator().manual_seed(seed),
            ignore_eos=True,
            session=session,
        )
        counts[torch.arange(3), torch.tensor(run.tokens)] += 1
        kept += run.rounds[0].accepted > 0
    exact = exact_marginals(opened)
    return [chi_square(counts[place], exact[place]) for place in (1, 2)], kept / NUM_ANSWERS


@pytest.mark.parametrize("index", [0, 1], ids=["eagle3", "mtp"])
def test_sampled_drafting_keeps_the_distribution_of_the_target(
    index: int, opened: AbstractTarget, drafts: list[Draft]
) -> None:
    chances, kept = p_values(opened, open_drafter(drafts[index], opened))
    assert min(chances) > LEVEL
    assert 0.1 < kept < 0.95, "guesses are nearly never or always kept: the test would see nothing"


def test_a_drafter_that_lies_about_its_distribution_is_caught(opened: AbstractTarget, drafts: list[Draft]) -> None:
    chances, _ = p_values(opened, Liar(open_drafter(drafts[0], opened)))
    assert min(chances) < LEVEL


def test_the_exact_distributions_sum_to_one(opened: AbstractTarget) -> None:
    for marginal in exact_marginals(opened):
        assert float(marginal.sum()) == pytest.approx(1.0, abs=1e-5)
