"""The rule that ends a chain of draft tokens before its depth, by the drafter's own confidence.

Pass j of a drafter (j from 1) gives the distribution q_j of draft token j. Its confidence c_j is the probability of the
likeliest token of q_j, at temperature 1 and before any cut, or what a head of the drafter's own says before token j is
drawn (DSpark). A calibration curve turns c_j into a_j, an estimate of the probability that the target accepts draft
token j where it accepted those before it. Then s_j = a_1 a_2 ... a_j is the survival: the probability that draft token
j is accepted at all. The rule compares it with two thresholds a depth:

- draft token j is verified where s_j >= verify_from[j]; otherwise the chain ends before it;
- pass j + 1 runs where s_j >= draft_from[j + 1]; otherwise the chain ends after draft token j.

Sequences that are drafted side by side have one length: a pass takes as long as its longest chain, so that a shorter
one saves nothing. Their s_j is the mean of the survivals of all: what one more draft token a sequence is expected to
add. (Where an engine verifies chains of different lengths side by side, the same comparison token by token ranks the
slots of all chains by survival against what a slot costs: vLLM's adaptive verification.)

In a tree s_j is the survival of a node, with the probability that the drafter gives to the node itself
(decoding/tree_shapes.py).

The output keeps its distribution. The rule decides on draft token j from q_1..q_j and the draft tokens before j, never
from draft token j itself: for the target, verifying the chain up to j, and taking its own token after it, is the same
procedure whatever the chain's length was, and a length fixed before a token is drawn cannot favour any token. A rule
that drew the token first and dropped the unlikely ones would verify draws of another distribution than q_j. (At
temperature 0 there is one choice, so both are the same; llama.cpp's `p_min` and vLLM's adaptive verification look at
the drawn token.)

speedup/stop_fitting.py fits calibration and thresholds to what a round costs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from components.outside_json import JsonObject

NEVER: Final = 2.0  # a threshold that no survival reaches


@dataclass(frozen=True)
class Calibration:
    """A curve from confidence to acceptance: straight lines between its knots, constant before and after them.

    confidence: ascending. accepted: the probability of acceptance at each, never falling.
    """

    confidence: tuple[float, ...]
    accepted: tuple[float, ...]

    def at(self, confidence: float) -> float:
        """The probability that a draft token of this confidence is accepted where those before it were."""
        right = bisect.bisect_right(self.confidence, confidence)
        if right == 0:
            return self.accepted[0]
        if right == len(self.confidence):
            return self.accepted[-1]
        low, high = self.confidence[right - 1], self.confidence[right]
        share = (confidence - low) / (high - low)
        return self.accepted[right - 1] + share * (self.accepted[right] - self.accepted[right - 1])


@dataclass(frozen=True)
class StopRule:
    """Calibration and thresholds of every depth; lists are over draft tokens 1..K."""

    calibration: tuple[Calibration, ...]
    draft_from: tuple[float, ...]  # the first is 0: the first pass commits positions and always runs
    verify_from: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.calibration) == len(self.draft_from) == len(self.verify_from) > 0
        assert self.draft_from[0] == 0.0, "the first pass always runs"

    @classmethod
    def of_least(cls, least: float, depth: int) -> StopRule:
        """A chain of at most `depth` tokens that ends before the first one of a lower probability: llama.cpp's `p_min`.

        The curve jumps from 0 to 1 at `least`, so that survival is 1 until the chain ends. Chains side by side end
        where fewer than half of them go on. A threshold of 0 ends none.
        """
        jump = Calibration((math.nextafter(least, -1.0), least), (0.0, 1.0))
        return cls((jump,) * depth, (0.0,) * depth, (0.5 if least > 0.0 else 0.0,) * depth)

    @property
    def is_single_threshold(self) -> bool:
        """Whether it is one of `of_least`."""
        return all(
            curve.accepted == (0.0, 1.0) and curve.confidence[0] == math.nextafter(curve.confidence[1], -1.0)
            for curve in self.calibration
        )

    @classmethod
    def of_json(cls, fields: JsonObject) -> StopRule:
        """The rule whose fields were written as JSON."""
        curves = tuple(Calibration(tuple(of["confidence"]), tuple(of["accepted"])) for of in fields["calibration"])
        return cls(curves, tuple(fields["draft_from"]), tuple(fields["verify_from"]))

    @property
    def depth(self) -> int:
        """The longest chain that it allows."""
        return len(self.calibration)

    @classmethod
    def of_depth(cls, calibration: tuple[Calibration, ...], depth: int) -> StopRule:
        """Chains of one depth, whatever the confidences; nothing beyond it is drafted."""
        return cls(calibration[:depth], (0.0,) * depth, (0.0,) * depth)

    @cached_property
    def num_read(self) -> int:
        """How many draft tokens have a confidence that a decision hangs on; those after them are not read."""
        thresholds = zip(self.verify_from, (*self.draft_from[1:], 0.0), strict=True)
        hangs = [any(0.0 < least < NEVER for least in of_token) for of_token in thresholds]
        return max((j + 1 for j, decided in enumerate(hangs) if decided), default=0)

    def survival(self, index: int, before: float, confidence: float) -> float:
        """s_j of draft token j = index + 1, given s_{j-1} and c_j."""
        return before * self.calibration[index].at(confidence)

    def end_at(self, index: int, survival: float) -> int | None:
        """The length of a chain that ends before or after draft token index + 1, of this survival; None: it goes on."""
        if survival < self.verify_from[index]:
            return index
        return index + 1 if index + 1 == self.depth or survival < self.draft_from[index + 1] else None

    def length(self, *confidences: Sequence[float]) -> tuple[int, int]:
        """(passes run, draft tokens verified) of a round whose sequences would have these confidences, side by side."""
        survivals, deepest = [1.0] * len(confidences), min(self.depth, *map(len, confidences))
        for index in range(deepest):
            survivals = [
                self.survival(index, before, of_one[index])
                for before, of_one in zip(survivals, confidences, strict=True)
            ]
            length = self.end_at(index, sum(survivals) / len(survivals))
            if length is not None:
                return index + 1, length
        return deepest, deepest
