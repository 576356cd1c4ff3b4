"""How many outputs may part from plain decoding at a tie: as many as the rounding noise measured there makes, no more.

A single tie cannot be told from a verifier that is lenient within the noise, but their number can. Two counts are held
against what is expected of rounding alone: prompts whose output parts from plain at all, and tokens beside which
another one is likelier. On the built-in target, with outputs of 96 tokens: in float32 none of 120 parted (expected:
fewer than one in 10,000), so the first count decides; in bfloat16 58 to 75 % part (expected 78 %), so that it cannot,
and the second decides: 0.6 to 1.1 % of tokens (expected 1.1 to 1.2 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from components.rows import Request

SLACK: Final = 1.5
"""How far the expected number may be too low: its model of noise is normal, and true noise has heavier tails."""

FALSE_ALARM: Final = 1e-4
"""The share of honest arms, at most, that have more than the limit. One tie is never too many."""


class Ties(NamedTuple):
    """Of one arm. Outputs of one prompt part at the same places: they count as one, each in part."""

    tied_share: float | None = None  # of prompts, those whose output parts from plain at a tie; None: not compared
    tied_share_limit: float | None = None  # more are not made by rounding; None: not known
    rounded_tokens: float | None = None  # tokens of an output beside which another is likelier, by less than the noise
    rounded_tokens_limit: float | None = None

    @property
    def too_many(self) -> bool:
        """Whether more than rounding parts these outputs from plain decoding."""
        pairs = ((self.tied_share, self.tied_share_limit), (self.rounded_tokens, self.rounded_tokens_limit))
        return any(found is not None and limit is not None and found > limit for found, limit in pairs)


def ties_of(compared: Iterable[Request]) -> Ties:
    """The ties of one arm's outputs that were compared with plain decoding."""
    by_prompt: dict[str, list[Request]] = {}
    for request in compared:
        by_prompt.setdefault(request.prompt_id, []).append(request)
    if not by_prompt:
        return Ties()
    num_prompts, outputs = len(by_prompt), list(by_prompt.values())
    tied = sum(_mean([float(bool(r.tie)) for r in rows]) for rows in outputs)
    chances = [_mean([r.tie_chance for r in rows if r.tie_chance is not None]) for rows in outputs]
    limit = _most(sum(chances)) if all(r.tie_chance is not None for rows in outputs for r in rows) else None
    share_limit = None if limit is None else min(1.0, limit / num_prompts)
    if any(r.rounded_tokens is None or r.rounded_expected is None for rows in outputs for r in rows):
        return Ties(tied / num_prompts, share_limit)
    rounded = sum(_mean([float(r.rounded_tokens or 0) for r in rows]) for rows in outputs)
    expected = sum(_mean([r.rounded_expected or 0.0 for r in rows]) for rows in outputs)
    return Ties(tied / num_prompts, share_limit, rounded, _most(expected))


def _most(expected: float) -> float:
    """The smallest count, 1 or more, that is passed with a probability of FALSE_ALARM at most.

    Of independent events with this expected number; Poisson's law has the heaviest tail of them.
    """
    rate, count = max(SLACK * expected, 1e-12), 0
    passed = -math.expm1(-rate)
    while count < 1 or passed > FALSE_ALARM:
        count += 1
        passed -= math.exp(count * math.log(rate) - rate - math.lgamma(count + 1.0))
    return float(count)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
