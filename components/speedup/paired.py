"""The one comparison of A with B on the same prompts, for confirm_depth, the promotion gate and `draftsmith compare`.

The value of each is a ratio of sums over prompts (tokens over time, tokens over rounds); A over B is their quotient.
Its 95 % interval resamples prompts with both sides together, so that what a prompt does to both cancels. The draws are
seeded by the prompts themselves: the same rows give the same answer tomorrow.

Non-inferiority with a margin, as in clinical trials: "not worse" needs the lower end of that interval at 1 - margin or
above; that the interval holds 1, or that A was not shown to be worse, is no evidence of anything. The end of a 95 %
interval is nominally passed by 2.5 % at the boundary (a true ratio of 1 - margin). On few prompts of unlike lengths it
is 3 to 5 %, which is the error that is promised; a nominal 5 % would be 6 to 9 % (tests/components/speedup/
test_gate_errors.py has both, and how often an equal challenger passes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from components.promotion import Margins
from components.speedup.bootstrap import LEAST_PROMPTS, Estimate, Floats, draw_weights, pooled_ratio
from components.speedup.policy import ALL

NUM_DRAWS = 4000


@dataclass(frozen=True)
class Sums:
    """A numerator and a denominator of one side on one prompt."""

    above: float
    below: float


@dataclass(frozen=True)
class PromptPair:
    """What A and B did with one prompt in one process.

    plain_a, plain_b: plain decoding beside each of them where they ran in different measurements: each side's value is
    then taken over it. In one measurement it cancels and is None.
    """

    prompt_id: str
    workload: str
    process: int
    a: Sums
    b: Sums
    plain_a: Sums | None = None
    plain_b: Sums | None = None


@dataclass(frozen=True)
class Ratio:
    """A over B in one quantity on one workload: above 1, A is better. verdict: see PairedComparison in rows.py."""

    quantity: str  # decode_speed | speedup | acceptance_length
    workload: str
    a: float
    b: float
    ratio: float
    lo: float
    hi: float
    margin: float
    num_prompts: int
    verdict: str

    @property
    def not_worse(self) -> bool:
        """Whether A is shown to be not worse."""
        return self.verdict in ("better", "not_worse")


def compare_pairs(pairs: Iterable[PromptPair], quantity: str, margins: Margins) -> list[Ratio]:
    """One ratio over all prompts, and one for each workload where there are several; [] without a pair."""
    by_prompt: dict[str, list[PromptPair]] = {}
    for pair in pairs:
        by_prompt.setdefault(pair.prompt_id, []).append(pair)
    workloads = sorted({of_one[0].workload for of_one in by_prompt.values()} - {ALL})
    ratios = []
    for workload in [ALL, *(workloads if len(workloads) > 1 else [])] if by_prompt else []:
        chosen = [by_prompt[name] for name in sorted(by_prompt) if workload in (ALL, by_prompt[name][0].workload)]
        ratios.append(_ratio(chosen, quantity, workload, margins.of(quantity, pooled=workload == ALL)))
    return ratios


def verdict_of(lo: float, hi: float, margin: float, num_prompts: int) -> str:
    """better | not_worse | worse | undecided; see PairedComparison."""
    if num_prompts < LEAST_PROMPTS:
        return "undecided"
    if lo > 1.0:
        return "better"
    if lo >= 1.0 - margin:
        return "not_worse"
    return "worse" if hi < 1.0 - margin else "undecided"


def _ratio(prompts: Sequence[Sequence[PromptPair]], quantity: str, workload: str, margin: float) -> Ratio:
    """prompts: the pairs of each prompt, one for each process."""
    names = "\n".join(of_one[0].prompt_id for of_one in prompts)
    seed = int.from_bytes(hashlib.sha256(names.encode("utf-8")).digest()[:8], "big")
    weights = draw_weights(len(prompts), NUM_DRAWS, np.random.default_rng(seed))
    a = _value(weights, [[(pair.a, pair.plain_a) for pair in of_one] for of_one in prompts])
    b = _value(weights, [[(pair.b, pair.plain_b) for pair in of_one] for of_one in prompts])
    ratio = a.over(b)
    lo, hi = ratio.interval()
    verdict = verdict_of(lo, hi, margin, len(prompts))
    return Ratio(quantity, workload, a.value, b.value, ratio.value, lo, hi, margin, len(prompts), verdict)


def _value(weights: Floats, prompts: Sequence[Sequence[tuple[Sums, Sums | None]]]) -> Estimate:
    """The value of one side, over its plain decoding where it has one."""
    own = pooled_ratio(weights, *_columns([[side for side, _ in of_one] for of_one in prompts]))
    plain = [[beside for _, beside in of_one if beside is not None] for of_one in prompts]
    return own.over(pooled_ratio(weights, *_columns(plain))) if any(plain) else own


def _columns(prompts: Sequence[Sequence[Sums]]) -> tuple[Floats, Floats]:
    """Numerators and denominators by prompt, processes summed. -> [prompts], [prompts]."""
    above = np.array([sum(one.above for one in of_one) for of_one in prompts], dtype=np.float64)
    below = np.array([sum(one.below for one in of_one) for of_one in prompts], dtype=np.float64)
    return above, below
