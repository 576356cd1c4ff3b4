"""What a round started at every output position would keep, by drafting from all of them at once.

The target's own greedy answer is known, so one pass of the target gives the features of every column and one call of
`draft_everywhere` the guesses made after each. A drafter's state depends on committed tokens only; therefore replaying
i <- i + min(accepted[i], k) + 1 over this map is what a live run at depth k does, for every k at once. What a method
with a loop of its own guesses (lookahead) depends on its passes before too: its map is that of a live run at the
deepest depth, which says nothing of other depths (rows.py OF_ONE_DEPTH).

Two training-time figures flatter, and the map shows by how much. Averaging `accepted` over all positions counts
positions where no round ever starts (rounds start just after a miss). `proxy_accepted` also feeds the drafter the
truth: at each step the true token and the true features of the target, as one-step training sees them; it is the run of
consecutive positions whose first guess is right. (True tokens alone change nothing: step j of a chain counts only if
all guesses before it were right, and then its inputs are the true tokens already.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.chain import LOOPS, decode
from components.drafts.draft import Drafter
from components.targets.model import AbstractTarget


class PositionMap(NamedTuple):
    """One answer. Entry i belongs to a round that starts when output token i is the newest; num_tokens - 1 entries."""

    accepted: list[int]
    proxy_accepted: list[int]


def extra_tokens(k_max: int) -> int:
    """Tokens to know past the last kept one, so that the guesses of the last position have a truth to meet."""
    return k_max


def acceptance_map(
    target: AbstractTarget,
    draft: Drafter,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    k_max: int,
) -> PositionMap:
    """Draft k_max tokens from each output position and count how many the target says too.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens + extra_tokens(k_max) of them.
    num_tokens: kept tokens N: up to the limit, or up to and including end-of-text.
    """
    if num_tokens < 2:
        return PositionMap([], [])  # the answer ends with the prefill token: no round starts
    assert len(answer) >= num_tokens + extra_tokens(k_max), "the answer is too short for the guesses at its end"
    known = [*prompt_ids, *answer]
    first = len(prompt_ids) - 1  # the column after which a round at output token 0 drafts
    # Positions past the last round's start tell the proxy how far its run of first guesses goes.
    num_positions = num_tokens - 1 + extra_tokens(k_max) - 1
    ids = torch.tensor(known[: first + num_positions + 1], device=target.device)
    with torch.inference_mode():
        cache = target.new_cache(1, len(ids))
        out = target.forward(ids.unsqueeze(0), cache, logits="none", features=True)
        assert out.taps is not None and out.last is not None
        guesses = draft.draft_everywhere(ids, out.taps[0], out.last[0], k_max)[first:]
    truth = torch.tensor(answer[1:], device=guesses.device)
    first_right = (guesses[:, 0] == truth[:num_positions]).tolist()
    if draft.method in LOOPS:
        kept = _of_a_live_run(target, draft, prompt_ids, num_tokens, k_max)
    else:
        kept = _right_prefix(guesses[: num_tokens - 1], truth.unfold(0, k_max, 1)[: num_tokens - 1])
    return PositionMap(kept, _run_lengths(first_right, num_tokens - 1, k_max))


def _of_a_live_run(
    target: AbstractTarget, draft: Drafter, prompt_ids: Sequence[int], num_tokens: int, k_max: int
) -> list[int]:
    """What the rounds of one run at k_max keep, [num_tokens - 1].

    At a position inside a round stands what is left of its guesses there: where a shallower run would start one, that
    is an estimate of what it keeps.
    """
    run = decode(target, draft, prompt_ids, max_new_tokens=num_tokens, depth=k_max, ignore_eos=True)
    kept = [0] * (num_tokens - 1)
    for one in run.rounds:
        for step, place in enumerate(range(one.out_pos, min(one.out_pos + one.accepted + 1, len(kept)))):
            kept[place] = one.accepted - step
    return kept


def _right_prefix(guesses: Tensor, truth: Tensor) -> list[int]:
    """How many leading guesses of each row are right; both [N, k]."""
    return (guesses == truth).long().cumprod(-1).sum(-1).tolist()


def _run_lengths(right: list[bool], count: int, longest: int) -> list[int]:
    """For each of the first `count` positions, how many in a row from there are right, at most `longest`."""
    runs = [0] * (len(right) + 1)
    for i in reversed(range(len(right))):
        runs[i] = runs[i + 1] + 1 if right[i] else 0
    return [min(run, longest) for run in runs[:count]]


def guessable_tokens(tokens: Sequence[int], draft: Drafter) -> int:
    """How many of these tokens are in the draft vocabulary at all; all of them where a drafter has none."""
    ids = getattr(draft, "draft_ids", None)
    if ids is None:
        return len(tokens)
    return int(torch.isin(torch.tensor(tokens, dtype=ids.dtype, device=ids.device), ids).sum())


def repeated_bigrams(tokens: Sequence[int]) -> float:
    """The share of bigrams that occurred before in the same text; 0 for fewer than two tokens."""
    bigrams = list(itertools.pairwise(tokens))
    return 1.0 - len(set(bigrams)) / len(bigrams) if bigrams else 0.0
