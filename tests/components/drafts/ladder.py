"""What the rungs of the parity ladder share."""

from __future__ import annotations

from components.decoding.chain import Decoded
from components.drafts.interface import Sampling

DEPTH = 3


SAMPLE_TOKENS = 36  # of the answer that is learnt by heart


HOT = Sampling(temperature=1.0)


NUM_SAMPLED, SIGNIFICANCE = 600, 1e-4
"""Of the chi-square tests: a shift of Cohen's w = 0.35 is found with a probability of 0.99 (noncentral chi-square, 11
degrees of freedom, noncentrality 600 w^2 = 73.5). Wrong rules shift far more; one of the tests shows it."""


def accepted_share(run: Decoded) -> float:
    return sum(r.accepted for r in run.rounds) / max(1, sum(r.drafted for r in run.rounds))
