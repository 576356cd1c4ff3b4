"""Measures a target's logits along a given text and their rounding noise, by passes of several row counts.

Kernels add in another order for another number of rows, so logits differ in their last bits, in bfloat16 by a few
hundredths. Where two tokens are closer than that, either is a correct choice of the target. The noise differs between
positions and targets, so it is measured at each position.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from components.targets.interface import AbstractCache, AbstractTarget

ROW_COUNTS: Final = (128, 29, 13)
"""Rows of a pass in each reading; an answer of up to 129 tokens is one pass of the first. Wide passes are cheap; the
others are odd, since kernels work in blocks of 8 or 16 rows and coinciding blocks compute the same bits."""

CANDIDATES: Final = 16
"""Number of likeliest tokens at a position over which noise is measured."""


class Reading(NamedTuple):
    """The target's logits for each of a text's T tokens, given those before, in nats before the softmax."""

    lead: Tensor  # [T] float64: the token's logit minus that of the best other one, mean of the readings
    noise: Tensor  # [T] float64: standard deviation of one logit between readings, common shifts removed
    num_readings: int

    def chances(self) -> Tensor:
        """[T] float64: the probability that another pass prefers the other of the two best tokens, for normal noise.

        Both that pass and the mean of the readings are noisy.
        """
        spread = self.noise * math.sqrt(2.0 * (1.0 + 1.0 / self.num_readings))
        return torch.special.ndtr(-self.lead / spread)


def read_text(
    target: AbstractTarget,
    prompt_ids: Sequence[int],
    tokens: Sequence[int],
    row_counts: Sequence[int] = ROW_COUNTS,
) -> Reading:
    """Read `tokens` (at least one) after the prompt once with every row count, the prompt itself in one pass.

    Noise at a position is never less than that of the text as a whole (few readings may agree by chance), nor than the
    rounding of the logit itself in the target's dtype.
    """
    assert len(tokens) > 0 and len(row_counts) > 1, "noise is a difference of readings"
    device = target.device
    token_column = torch.tensor(list(tokens), device=device)[:, None]
    with torch.inference_mode():
        cache = target.new_cache(1, len(prompt_ids) + len(tokens))
        first = target.forward(torch.tensor([list(prompt_ids)], device=device), cache, logits="last").logits
        assert first is not None
        candidates: Tensor | None = None
        readings = []
        for rows in row_counts:
            parts = [first[0], *_logits_of_passes(target, cache, len(prompt_ids), token_column, rows)]
            if candidates is None:
                candidates = torch.cat([part.topk(min(CANDIDATES, part.shape[-1])).indices for part in parts])
            looked_at = torch.cat((token_column, candidates), dim=1).split([len(part) for part in parts])
            readings.append(torch.cat([part.gather(1, at) for part, at in zip(parts, looked_at, strict=True)]))
    assert candidates is not None
    logits = torch.stack(readings).double().cpu()
    mean, others = logits.mean(dim=0), (candidates != token_column).cpu()
    best_other = mean[:, 1:].masked_fill(~others, -torch.inf).max(dim=1).values
    return Reading(mean[:, 0] - best_other, _noise(logits[:, :, 1:], target.dtype), len(readings))


def _logits_of_passes(
    target: AbstractTarget, cache: AbstractCache, start: int, token_column: Tensor, rows: int
) -> list[Tensor]:
    """Logits [<= rows, V] of each pass over all tokens but the last, from a cache of which `start` columns are kept."""
    cache.truncate(torch.tensor([start]))
    parts = []
    for part in token_column[:-1, 0].split(rows) if len(token_column) > 1 else ():
        logits = target.forward(part[None], cache).logits
        assert logits is not None
        parts.append(logits[0])
    return parts


def _noise(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """Reading.noise [T] from the candidates' logits [readings, T, C]."""
    deviation = logits - logits.mean(dim=0)
    deviation = deviation - deviation.mean(dim=2, keepdim=True)  # a shift of all logits changes no choice
    num_readings, _, num_candidates = logits.shape
    variance = deviation.pow(2).sum(dim=(0, 2)) / ((num_readings - 1) * max(1, num_candidates - 1))
    # a number of this dtype near x is a multiple of the spacing: 2^exponent * eps
    spacing = torch.finfo(dtype).eps * torch.exp2(torch.frexp(logits.abs().amax(dim=(0, 2))).exponent - 1.0)
    return torch.stack((variance, variance.mean().expand_as(variance), spacing.pow(2) / 12)).amax(dim=0).sqrt()
