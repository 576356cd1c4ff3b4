"""Which path of a tree is kept, and which token follows it: pure functions on tensors.

One pass over the T rows of a tree gives the target's distribution after every row. A verdict keeps the rows of one path
from row 0 and adds one token of the target's own.

Greedy: the path that goes on while a child is the target's argmax; that argmax follows its last row. It is what plain
greedy decoding says.

Sampled: at each row its children are tried one after the other, and a rejected one leaves the target's distribution
changed, so that every emitted token is distributed as a draw from p whatever was guessed. For children drawn without
replacement: accept x with min(1, p(x)/q(x)); rejected: p <- norm(max(p - q, 0)), and x leaves q (multi-round
speculative sampling: Miao et al. 2023, "SpecInfer", arXiv:2305.09781, algorithm 3; without replacement as in Li et al.
2024, "EAGLE", arXiv:2401.15077, appendix). For a deterministic proposal q is 1 at the child being tried: accept with
p(x); rejected: x leaves p. When no child is left the token is drawn from what remains of p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.sampling import draw, draw_uniform
from components.decoding.tree import GuessRows


class TreeVerdict(NamedTuple):
    """What a round emits: the guesses on the kept path and one token of the target's own."""

    rows: list[int]  # kept rows of the pass, row 0 first: accepted + 1
    token_ids: list[int]  # accepted + 1: the kept guesses and the target's token

    @property
    def num_accepted(self) -> int:
        """Guesses kept."""
        return len(self.rows) - 1


def verify_tree_greedy(logits: Tensor, tree: GuessRows) -> TreeVerdict:
    """Logits [T, V] -> the longest path that plain greedy decoding would say, and its next token."""
    picks = logits.argmax(-1).tolist()
    row_of = {said: row for row, said in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows = [0]
    while (child := row_of.get((rows[-1], picks[rows[-1]]))) is not None:
        rows.append(child)
    return TreeVerdict(rows, [picks[row] for row in rows])


def verify_tree_sampled(probs: Tensor, tree: GuessRows, rng: torch.Generator) -> TreeVerdict:
    """Multi-round rejection sampling down a tree; see the module docstring.

    probs: [T, V] the target's p after each row, after temperature and cuts. rng: a generator on the CPU; one uniform
    number is drawn for every guess, tried or not.
    """
    children, uniform = tree.children, draw_uniform(len(tree.tokens), torch.device("cpu"), rng).tolist()
    rows = [0]
    while True:
        kept, left = _try_children(probs[rows[-1]], tree, rows[-1], children[rows[-1]], uniform)
        if kept is None:
            last = int(draw(left[None], rng))
            return TreeVerdict(rows, [tree.tokens[row] for row in rows[1:]] + [last])
        rows.append(kept)


def _try_children(
    p: Tensor, tree: GuessRows, row: int, children: list[int], uniform: list[float]
) -> tuple[int | None, Tensor]:
    """The child that is kept, or None; and the distribution [V] that is left when none is."""
    drawn_from = tree.draft_probs.get(row)
    q = None if drawn_from is None else drawn_from.to(p.device)
    for child in children:
        token = tree.tokens[child]
        at_child = 1.0 if q is None else float(q[token])
        # u * q < p instead of u < p / q: no division, and a guess the target cannot say (p = 0) is never kept.
        if uniform[child] * at_child < float(p[token]):
            return child, p
        rest = _without(p, token) if q is None else (p - q).clamp_min_(0.0)
        mass = float(rest.sum())
        # p = q up to rounding leaves nothing; a rejection is then rounding itself, and p is the right distribution.
        p = rest.div_(mass) if mass > 0 else p
        if q is not None and child != children[-1]:
            q = _without(q, token)
            q.div_(q.sum())
    return None, p


def _without(probs: Tensor, token: int) -> Tensor:
    """A copy that gives `token` nothing; not normalised."""
    probs = probs.clone()
    probs[token] = 0.0
    return probs
