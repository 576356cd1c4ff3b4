"""Verification of draft trees: the accepted path and the token after it; pure functions on tensors.

One pass over the T rows of a tree gives the target's distribution after every row. The result has the rows of one path
from row 0 and one token of the target's own.

Greedy: follow the path while a child is the target's argmax; the argmax after its last row is the next token. The
output equals plain greedy decoding.

Sampled: at each row its children are tried one after the other, and a rejected one leaves the target's distribution
changed, so that every emitted token is distributed as a draw from p whatever was drafted. For children drawn without
replacement: accept x with min(1, p(x)/q(x)); rejected: p <- norm(max(p - q, 0)), and x leaves q (multi-round
speculative sampling: Miao et al. 2023, "SpecInfer", arXiv:2305.09781, algorithm 3; without replacement as in Li et al.
2024, "EAGLE", arXiv:2401.15077, appendix). For a deterministic proposal q is 1 at the child being tried: accept with
p(x); rejected: x leaves p. When no child is left the token is drawn from what remains of p.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from components.decoding.session import draw, draw_uniform
from components.decoding.tree import DraftTreeRows


class TreeVerifyResult(NamedTuple):
    """The tokens emitted by a round: the draft tokens on the accepted path and one token of the target's own."""

    rows: list[int]  # accepted rows of the pass, row 0 first: accepted + 1
    token_ids: list[int]  # accepted + 1: the accepted draft tokens and the target's token

    @property
    def num_accepted(self) -> int:
        return len(self.rows) - 1


def verify_tree_greedy(logits: Tensor, tree: DraftTreeRows) -> TreeVerifyResult:
    """Logits [T, V] -> the longest path that plain greedy decoding would follow, and its next token."""
    picks = logits.argmax(-1).tolist()
    row_of = {key: row for row, key in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows = [0]
    while (child := row_of.get((rows[-1], picks[rows[-1]]))) is not None:
        rows.append(child)
    return TreeVerifyResult(rows, [picks[row] for row in rows])


def verify_tree_sampled(probs: Tensor, tree: DraftTreeRows, rng: torch.Generator) -> TreeVerifyResult:
    """Multi-round rejection sampling down a tree; see the module docstring.

    probs: [T, V] the target's p after each row, after temperature and cuts. rng: a generator on the CPU; one uniform
    number is drawn for every draft token, tried or not.
    """
    children, uniform = tree.children, draw_uniform(len(tree.tokens), torch.device("cpu"), rng).tolist()
    rows = [0]
    while True:
        accepted, residual = _try_children(probs[rows[-1]], tree, rows[-1], children[rows[-1]], uniform)
        if accepted is None:
            last = int(draw(residual[None], rng))
            return TreeVerifyResult(rows, [tree.tokens[row] for row in rows[1:]] + [last])
        rows.append(accepted)


def _try_children(
    p: Tensor, tree: DraftTreeRows, row: int, children: list[int], uniform: list[float]
) -> tuple[int | None, Tensor]:
    """The accepted child or None, and the residual distribution [V] if none is accepted."""
    drawn_from = tree.draft_probs.get(row)
    q = None if drawn_from is None else drawn_from.to(p.device)
    for child in children:
        token = tree.tokens[child]
        at_child = 1.0 if q is None else float(q[token])
        # u * q < p instead of u < p / q: no division, and a draft token of p = 0 is never accepted.
        if uniform[child] * at_child < float(p[token]):
            return child, p
        rest = _without(p, token) if q is None else (p - q).clamp_min_(0.0)
        mass = float(rest.sum())
        # Where p = q up to rounding, the residual is empty and the rejection is a rounding error: p is correct.
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
