"""Computes the hidden states of whole conversations: groups rows into forward passes, and cuts the padding off.

It is used both to store features and to compute them while training, so that both give the same. Rows of similar length
share a pass and are padded on the right, which needs no mask: attention is causal, so padding cannot affect the row
before it. Another grouping changes the order of sums, so the states equal those of a pass over the row alone up to
rounding. In a mixture of experts, rounding may also route a token with nearly equal router scores to another expert,
which changes that token's states (see the tests).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.interface import AbstractTarget


class States(NamedTuple):
    """One row's states, bf16, on the target's device."""

    taps: Tensor  # [T, 3H]
    last: Tensor  # [T, H], before the final norm


def group_rows(lengths: Sequence[int], tokens_per_pass: int) -> list[list[int]]:
    """Groups of row indices that share a pass: similar lengths, at most `tokens_per_pass` tokens with padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= tokens_per_pass:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def padded_tokens(lengths: Sequence[int], tokens_per_pass: int) -> int:
    """Tokens in the passes over rows of these lengths, padding included."""
    return sum(len(group) * max(lengths[index] for index in group) for group in group_rows(lengths, tokens_per_pass))


def forward_pass(model: AbstractTarget, rows: Sequence[Tensor]) -> list[States]:
    """Compute the states of rows of token ids, int64 [T] each, in one forward pass.

    Raises UserError where a state is infinite or not a number: a drafter could not learn from it.
    """
    lengths = [len(row) for row in rows]
    ids = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
    for place, row in enumerate(rows):
        ids[place, : len(row)] = row
    passed = model.forward(ids, model.new_cache(*ids.shape), logits="none", features=True)
    assert passed.taps is not None and passed.last is not None
    both = zip(passed.taps, passed.last, lengths, strict=True)
    states = [States(taps[:n].to(torch.bfloat16), last[:n].to(torch.bfloat16)) for taps, last, n in both]
    if not all(bool(torch.isfinite(part).all()) for row in states for part in row):
        raise UserError(
            "the target's hidden states are not finite on these conversations; record in float32, or mend it"
        )
    return states


def forward_passes(model: AbstractTarget, rows: Sequence[Tensor], tokens_per_pass: int) -> Iterator[dict[int, States]]:
    """For each pass, {index into `rows`: states} of the rows in it."""
    for group in group_rows([len(row) for row in rows], tokens_per_pass):
        yield dict(zip(group, forward_pass(model, [rows[index] for index in group]), strict=True))
