"""Hidden states of whole conversations: which rows share a forward pass, and what of its outputs is theirs.

Used by the step that stores features and by the source that computes them while training, so that both do the same.
Rows of similar length share a pass and are padded on the right, which needs no mask: attention is causal, so what
stands behind a row cannot reach it, and what the padding gives is cut off. Another grouping is another order of sums:
the states are those of a pass of the row alone up to rounding. In a mixture of experts, rounding may also send a token
whose router scores are all but equal to another expert, and then that token's states are another's (see the tests).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.targets.model import AbstractTarget


class States(NamedTuple):
    """One row's states, bf16, on the target's device."""

    taps: Tensor  # [T, 3H]
    last: Tensor  # [T, H], before the final norm


def grouped(lengths: Sequence[int], tokens_per_pass: int) -> list[list[int]]:
    """Rows that go through the target together: similar lengths, at most `tokens_per_pass` tokens with padding."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if groups and (len(groups[-1]) + 1) * lengths[index] <= tokens_per_pass:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def padded_tokens(lengths: Sequence[int], tokens_per_pass: int) -> int:
    """Tokens that the passes over rows of these lengths run, padding included."""
    return sum(len(group) * max(lengths[index] for index in group) for group in grouped(lengths, tokens_per_pass))


def one_pass(model: AbstractTarget, rows: Sequence[Tensor]) -> list[States]:
    """The states of rows of token ids, int64 [T] each, from one forward pass.

    Raises UserError where a state is infinite or not a number: a drafter would learn nothing but that.
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


def all_passes(model: AbstractTarget, rows: Sequence[Tensor], tokens_per_pass: int) -> Iterator[dict[int, States]]:
    """Pass by pass, the states of each row that it held, by the row's place in `rows`."""
    for group in grouped([len(row) for row in rows], tokens_per_pass):
        yield dict(zip(group, one_pass(model, [rows[index] for index in group]), strict=True))
