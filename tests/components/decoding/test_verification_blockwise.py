"""Blockwise parallel decoding: the exact rule is plain greedy decoding, the others keep what they say they keep."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.contract import UserError
from components.decoding.chain import decode
from components.decoding.verification import EXACT, BlockRule, verify_block, verify_greedy
from components.drafts.interface import Sampling
from components.drafts.storage.files import build_draft
from components.targets.interface import AbstractTarget

PROMPT = [5, 9, 2, 7]


@given(st.integers(0, 10_000), st.integers(0, 4))
def test_exact_and_top_1_are_greedy_verification(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(count + 1, 5, generator=generator)
    guesses = torch.randint(0, 5, (count,), generator=generator)
    expected = verify_greedy(logits, guesses)
    for rule in (EXACT, BlockRule("top_k", top_k=1)):
        found = verify_block(logits, guesses, rule)
        assert (found.num_accepted, found.token_ids) == (expected.num_accepted, expected.token_ids)


@given(st.integers(0, 10_000), st.integers(1, 4))
def test_each_rule_keeps_the_longest_prefix_that_its_formula_allows(seed: int, count: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(count + 1, 6, generator=generator)
    guesses = torch.randint(0, 6, (count,), generator=generator)
    for rule in (BlockRule("top_k", top_k=3), BlockRule("typical", epsilon=0.2)):
        kept = 0
        while kept < count:
            p = logits[kept].softmax(-1).tolist()
            x = int(guesses[kept])
            if rule.kind == "top_k":
                good = sum(q > p[x] for q in p) < 3
            else:
                entropy = -sum(q * math.log(q) for q in p)
                good = p[x] > min(0.2, math.sqrt(0.2) * math.exp(-entropy))
            if not good:
                break
            kept += 1
        found = verify_block(logits, guesses, rule)
        assert found.num_accepted == kept
        assert found.token_ids == [*guesses[:kept].tolist(), int(logits[kept].argmax())]


@pytest.mark.parametrize("method", ["medusa", "mtp-parallel"])
def test_exact_blocks_say_what_plain_decoding_says_and_looser_rules_keep_more(
    target: AbstractTarget, method: str
) -> None:
    drafter = build_draft(method, target, {"num_heads": 3}, torch.arange(32))
    plain = decode(target, None, PROMPT, max_new_tokens=40, ignore_eos=True).tokens
    accepted = []
    for rule in (EXACT, BlockRule("top_k", top_k=4), BlockRule("top_k", top_k=32)):
        run = decode(target, drafter, PROMPT, max_new_tokens=40, depth=3, ignore_eos=True, rule=rule)
        assert not rule.lossless or run.tokens == plain
        accepted.append(sum(r.accepted for r in run.rounds) / len(run.rounds))
    assert accepted[0] <= accepted[1] <= accepted[2] == 3.0


def test_what_makes_no_sense_is_refused_in_one_line(target: AbstractTarget) -> None:
    drafter = build_draft("medusa", target, {"num_heads": 1}, torch.arange(32))
    with pytest.raises(UserError, match="a block rule is for greedy decoding"):
        decode(
            target,
            drafter,
            PROMPT,
            max_new_tokens=4,
            depth=1,
            sampling=Sampling(1.0),
            rng=torch.Generator(),
            rule=BlockRule("top_k", top_k=2),
        )
    with pytest.raises(UserError, match="top_k is 0"):
        BlockRule("top_k", top_k=0)
    with pytest.raises(UserError, match=r"epsilon is 1\.5"):
        BlockRule("typical", epsilon=1.5)
