"""How many guesses a round of trees would keep at every output position: drafted for real, verified against the answer.

The target's own greedy answer is known, so one pass gives the features of every column, and no tree needs verifying by
the target: its kept path is the one that the answer walks. Branches of different columns cannot be drafted side by side
as chains can (`draft_everywhere`), so this drafts once a position, on a state that grows by one column.
Replaying i <- i + accepted[i] + 1 over the result is what a live greedy run with this shape does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from components.decoding.chain import GREEDY
from components.decoding.tree import GuessRows
from components.decoding.tree_shapes import TreeShape
from components.drafts.draft import Columns, TreeProposer
from components.targets.model import AbstractTarget


def tree_acceptance(
    target: AbstractTarget,
    proposer: TreeProposer,
    prompt_ids: Sequence[int],
    answer: Sequence[int],
    num_tokens: int,
    shape: TreeShape,
) -> list[int]:
    """Entry i: guesses kept by a round that starts when output token i is the newest; num_tokens - 1 entries.

    answer:     the target's greedy tokens, end-of-text ignored, at least num_tokens - 1 + shape.depth of them.
    num_tokens: kept tokens N: up to the limit, or up to and including end-of-text.
    """
    if num_tokens < 2:
        return []  # the answer ends with the prefill token: no round starts
    assert len(answer) >= num_tokens - 1 + shape.depth, "the answer is too short for the guesses at its end"
    known = [*prompt_ids, *answer]
    num_columns = len(prompt_ids) + num_tokens - 2  # the last round starts at output token num_tokens - 2
    ids = torch.tensor(known[: num_columns + 1], device=target.device)
    nothing = torch.empty(num_columns, 0, device=target.device)
    taps, last = nothing, nothing
    accepted = []
    with torch.inference_mode():
        if proposer.needs_features:
            out = target.forward(ids[None, :-1], target.new_cache(1, num_columns), logits="none", features=True)
            assert out.taps is not None and out.last is not None
            taps, last = out.taps[0], out.last[0]
        state, start = proposer.new_state(num_columns + shape.num_guesses + 1), 0
        for newest in range(len(prompt_ids), num_columns + 1):
            columns = Columns(ids[start + 1 : newest + 1], taps[start:newest], last[start:newest])
            branches, start = proposer.begin(state, columns, shape.depth), newest
            vocab_size = target.shape.vocab_size
            tree = shape.grow(branches, known[newest], proposer.draft_ids, vocab_size, GREEDY, torch.Generator())
            accepted.append(kept_length(tree, known[newest + 1 :]))
    return accepted


def kept_length(tree: GuessRows, truth: Sequence[int]) -> int:
    """How many guesses of a tree lie on the path that `truth` walks from the newest token."""
    children, row = tree.children, 0
    for kept, token in enumerate(truth):
        right = [child for child in children[row] if tree.tokens[child] == token]
        if not right:
            return kept
        row = right[0]
    return len(truth)
