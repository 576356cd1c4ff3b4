"""Limits on the outputs that differ from plain decoding at a tie: those that the measured rounding noise explains.

A single tie looks like a verifier that is lenient within the noise, but the number of ties does not. Two counts are
compared with the expectation from rounding alone: prompts whose output differs from plain decoding at all, and tokens
with a likelier alternative. On the built-in target, with outputs of 96 tokens: in float32 none of 120 differed
(expected: fewer than one in 10,000), so the first count decides; in bfloat16 58 to 75 % differ (expected 78 %), so that
it cannot, and the second decides: 0.6 to 1.1 % of tokens (expected 1.1 to 1.2 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from components.rows import Request

SLACK: Final = 1.5
"""Factor on the expected number: its model of noise is normal, and true noise has heavier tails."""

FALSE_ALARM: Final = 1e-4
"""The largest share of correct arms beyond the limit. A single tie is never too many."""


class Ties(NamedTuple):
    """The ties of one arm. Outputs of one prompt differ at the same places, so a prompt counts once, as their mean."""

    tied_share: float | None = None  # share of prompts whose output differs at a tie; None: not compared
    tied_share_limit: float | None = None  # the most that rounding explains; None: not known
    rounded_tokens: float | None = None  # tokens with a likelier alternative, within the noise
    rounded_tokens_limit: float | None = None

    @property
    def too_many(self) -> bool:
        """Whether rounding alone does not explain the differences from plain decoding."""
        pairs = ((self.tied_share, self.tied_share_limit), (self.rounded_tokens, self.rounded_tokens_limit))
        return any(value is not None and limit is not None and value > limit for value, limit in pairs)


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
    limit = _count_limit(sum(chances)) if all(r.tie_chance is not None for rows in outputs for r in rows) else None
    share_limit = None if limit is None else min(1.0, limit / num_prompts)
    if any(r.rounded_tokens is None or r.rounded_expected is None for rows in outputs for r in rows):
        return Ties(tied / num_prompts, share_limit)
    rounded = sum(_mean([float(r.rounded_tokens or 0) for r in rows]) for rows in outputs)
    expected = sum(_mean([r.rounded_expected or 0.0 for r in rows]) for rows in outputs)
    return Ties(tied / num_prompts, share_limit, rounded, _count_limit(expected))


def _count_limit(expected: float) -> float:
    """The smallest count, 1 or more, that chance exceeds with a probability of at most FALSE_ALARM.

    expected: mean of a sum of independent events; Poisson's law is the one with the heaviest tail.
    """
    rate, count = max(SLACK * expected, 1e-12), 0
    passed = -math.expm1(-rate)
    while count < 1 or passed > FALSE_ALARM:
        count += 1
        passed -= math.exp(count * math.log(rate) - rate - math.lgamma(count + 1.0))
    return float(count)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
