"""Acceptance maps: how many draft tokens a round starting at each output position would accept.

The target's greedy answer is known, so one pass of the target gives the features of every column, and one call of
`propose_at_every_position` the draft tokens after each. A drafter's state depends on committed tokens only; therefore
replaying i <- i + min(accepted[i], k) + 1 over this map is what a live run at depth k does, for every k at once. The
drafts of a method with its own loop (lookahead) also depend on its earlier passes: its map is that of a live run at the
deepest depth, and holds for no other depth (components/methods.py decoding_loop).

Two training-time figures are too high, and the map shows by how much. Averaging `accepted` over all positions counts
positions where no round ever starts (rounds start just after a miss). `proxy_accepted` also feeds the drafter the true
token and the true target features at each step, as in one-step training; it is the run of consecutive positions whose
first draft token is right. (True tokens alone change nothing: step j of a chain counts only if all draft tokens before
it were right, and then its inputs are the true tokens already.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.chain import decode
from components.drafts.interface import Drafter
from components.methods import decoding_loop_of
from components.targets.interface import AbstractTarget


class PositionMap(NamedTuple):
    """The map of one answer, num_tokens - 1 entries: entry i is of a round that starts after output token i."""

    accepted: list[int]
    proxy_accepted: list[int]


def acceptance_map(
    target: AbstractTarget,
    draft: Drafter,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    k_max: int,
) -> PositionMap:
    """Draft k_max tokens from each output position and count the leading ones that equal the target's.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens + k_max of them,
                so that the draft tokens of the last position can be compared.
    num_tokens: kept tokens N: up to the limit, or up to and including end-of-text.
    """
    if num_tokens < 2:
        return PositionMap([], [])  # the answer is the prefill token alone: no round starts
    assert len(answer) >= num_tokens + k_max, "the answer is too short for the guesses at its end"
    token_ids = [*prompt_ids, *answer]
    first = len(prompt_ids) - 1  # the column after which a round at output token 0 drafts
    # The proxy's run of first draft tokens may extend past the start of the last round.
    num_positions = num_tokens + k_max - 2
    ids = torch.tensor(token_ids[: first + num_positions + 1], device=target.device)
    with torch.inference_mode():
        cache = target.new_cache(1, len(ids))
        out = target.forward(ids.unsqueeze(0), cache, logits="none", features=True)
        assert out.taps is not None and out.last is not None
        draft_tokens = draft.propose_at_every_position(ids, out.taps[0], out.last[0], k_max)[first:]
    truth = torch.tensor(answer[1:], device=draft_tokens.device)
    first_matches = (draft_tokens[:, 0] == truth[:num_positions]).tolist()
    if decoding_loop_of(draft.method):
        accepted = _accepted_in_live_run(target, draft, prompt_ids, num_tokens, k_max)
    else:
        accepted = _matching_prefix(draft_tokens[: num_tokens - 1], truth.unfold(0, k_max, 1)[: num_tokens - 1])
    return PositionMap(accepted, _run_lengths(first_matches, num_tokens - 1, k_max))


def _accepted_in_live_run(
    target: AbstractTarget, draft: Drafter, prompt_ids: Sequence[int], num_tokens: int, k_max: int
) -> list[int]:
    """Draft tokens accepted from each position in one run at k_max, [num_tokens - 1].

    At a position inside a round it is the number of its accepted draft tokens from there on, which estimates the
    acceptance of a shallower run whose round starts there.
    """
    run = decode(target, draft, prompt_ids, max_new_tokens=num_tokens, depth=k_max, ignore_eos=True)
    accepted = [0] * (num_tokens - 1)
    for round_facts in run.rounds:
        stop = min(round_facts.out_pos + round_facts.accepted + 1, len(accepted))
        for step, position in enumerate(range(round_facts.out_pos, stop)):
            accepted[position] = round_facts.accepted - step
    return accepted


def _matching_prefix(draft_tokens: Tensor, truth: Tensor) -> list[int]:
    """For each row, how many leading draft tokens equal the truth; both [N, k]."""
    return (draft_tokens == truth).long().cumprod(-1).sum(-1).tolist()


def _run_lengths(matches: list[bool], count: int, longest: int) -> list[int]:
    """For each of the first `count` positions, the number of consecutive matches from there, at most `longest`."""
    runs = [0] * (len(matches) + 1)
    for i in reversed(range(len(matches))):
        runs[i] = runs[i + 1] + 1 if matches[i] else 0
    return [min(run, longest) for run in runs[:count]]


def count_in_draft_vocabulary(tokens: Sequence[int], draft: Drafter) -> int:
    """How many of these tokens are in the draft vocabulary; all of them for a drafter with the full vocabulary."""
    ids = getattr(draft, "draft_ids", None)
    if ids is None:
        return len(tokens)
    return int(torch.isin(torch.tensor(tokens, dtype=ids.dtype, device=ids.device), ids).sum())


def repeated_bigrams(tokens: Sequence[int]) -> float:
    """The share of bigrams that occurred before in the same text; 0 for fewer than two tokens."""
    bigrams = list(itertools.pairwise(tokens))
    return 1.0 - len(set(bigrams)) / len(bigrams) if bigrams else 0.0
