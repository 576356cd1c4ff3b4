"""Does speculation say what plain decoding says? And if not: is the difference rounding, or a fault?

A pass over k+1 rows is other arithmetic than a pass over one row. Where the two best tokens are closer than that
noise, either choice is right. A first divergence counts as a tie when the plain run's top-2 margin there is below ten
times the row-count noise measured on the same target; everything after it is another text and is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from components.decoding.session import Session
from components.targets.model import AbstractTarget

TIE_FACTOR = 10.0


class Identity(NamedTuple):
    """One output against the plain output of the same prompt; the last three are None when they are equal.

    identical: None where nothing was compared.
    """

    identical: bool | None
    first_divergence: int | None
    margin: float | None
    tie: bool | None


def first_divergence(tokens: Sequence[int], plain: Sequence[int]) -> int | None:
    """The first output position at which two runs differ; a missing token differs."""
    for index, (ours, theirs) in enumerate(zip(tokens, plain, strict=False)):
        if ours != theirs:
            return index
    return None if len(tokens) == len(plain) else min(len(tokens), len(plain))


def plain_margin(
    target: AbstractTarget, session: Session, prompt_ids: Sequence[int], plain: Sequence[int], index: int
) -> float:
    """The plain run's top-2 logit margin where it chose output token `index`: same passes, same rows, same bits."""
    cache = session.empty_cache(len(prompt_ids) + index + 1)
    with torch.inference_mode():
        ids = torch.tensor([list(prompt_ids)], device=target.device)
        logits = target.forward(ids, cache, logits="last").logits
        for token in plain[:index]:
            logits = target.forward(torch.tensor([[token]], device=target.device), cache, logits="last").logits
        assert logits is not None
        best = logits[0, -1].topk(2).values
    return float(best[0] - best[1])


def compare(
    target: AbstractTarget,
    session: Session,
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    plain: Sequence[int],
    noise: float,
) -> Identity:
    """Judge one output. noise: the largest logit difference that the row count alone makes."""
    index = first_divergence(tokens, plain)
    if index is None:
        return Identity(True, None, None, None)
    margin = plain_margin(target, session, prompt_ids, plain, min(index, len(plain) - 1))
    return Identity(False, index, margin, margin < TIE_FACTOR * noise)
