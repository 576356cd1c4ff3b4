"""Comparison of A with B on the same prompts, for confirm_depth, the promotion gate and `draftsmith compare`.

The value of each side is a ratio of sums over prompts (tokens over time, tokens over rounds); A over B is their
quotient, paired by prompt within a process, so that what a prompt, a process or a moment does to both cancels
(`speed_ratio`). The prompts themselves seed the draws: the same rows always give the same answer.

The 95 % interval of a speed ratio has two levels. Prompts are resampled. The effect x_s of each process on the ratio is
fitted together with that of each prompt, log r_is = a_i + x_s, because a process may not have decoded every prompt: one
with the easy prompts is no faster for it. Where no prompt was decoded in two processes, the effects cannot be
separated, and x_s is the ratio within the process: the interval is then rather too wide.

The verdict is a test of non-inferiority with a margin, as in clinical trials: "not worse" needs the lower end of that
interval at 1 - margin or above. An interval that holds 1, or a loss that was not shown, is no evidence. At the boundary
(a true ratio of 1 - margin) 0.2 to 4.5 % pass, so that the promised 5 % also holds on few prompts of unlike lengths and
in three unlike processes; the end of a 90 % interval would let 4 to 6 % pass, and half as many equals again
(tests/components/speedup/comparison/test_paired.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from components.promotion import Margins
from components.rows import ALL
from components.speedup.bootstrap import Estimate, Floats, draw_weights, pooled_ratio

TimedPairs = Mapping[tuple[str, int], tuple[float, float]]  # (prompt, process) -> tokens, time


class SpeedRatio(NamedTuple):
    """A ratio of speeds, with the prompts and processes behind it."""

    ratio: Estimate
    prompts: list[str]
    num_processes: int


def speed_ratio(a: TimedPairs, b: TimedPairs, processes: Sequence[int], num_draws: int, seed: int) -> SpeedRatio | None:
    """Tokens per time of a over those of b, or None where they share no prompt in any process.

    processes: all of the measurement, ascending, so that all its ratios share their draws of processes.
    """
    pairs = sorted(a.keys() & b.keys())
    prompts = sorted({prompt for prompt, _ in pairs})
    if not prompts:
        return None
    columns = [[np.zeros((len(prompts), len(processes))) for _ in range(2)] for _ in range(2)]
    row, column = ({name: i for i, name in enumerate(names)} for names in (prompts, processes))
    for prompt, process in pairs:
        for side, timed in zip(columns, (a, b), strict=True):
            for values, value in zip(side, timed[prompt, process], strict=True):
                values[row[prompt], column[process]] = value
    # A prompt counts once, whatever the number of its processes.
    count = (columns[0][1] > 0.0).sum(axis=1, keepdims=True)
    (tokens, times), (other_tokens, other_times) = ([part / count for part in side] for side in columns)
    weights = draw_weights(len(prompts), num_draws, np.random.default_rng([seed, 3]))
    ratio = pooled_ratio(weights, tokens.sum(axis=1), times.sum(axis=1)).over(
        pooled_ratio(weights, other_tokens.sum(axis=1), other_times.sum(axis=1))
    )
    used = times.sum(axis=0) > 0.0
    loading = np.zeros(len(processes))
    loading[used] = _loadings(*(part[:, used] for part in (tokens, times, other_tokens, other_times)))
    xi = np.random.default_rng([seed, 4]).standard_normal((num_draws, len(processes)))
    num_used = int(used.sum())
    estimate = ratio._replace(
        draws=ratio.draws * np.exp(np.einsum("ds,s->d", xi, loading)),
        process=loading * ratio.value if num_used > 1 else np.zeros(0),
        process_dof=float(num_used - 1) if num_used > 1 else np.inf,
    )
    return SpeedRatio(estimate, prompts, num_used)


def _loadings(tokens: Floats, times: Floats, other_tokens: Floats, other_times: Floats) -> Floats:
    """[processes]: effect of each on the log of the ratio, as loadings of Estimate.

    All arguments are [prompts, processes], 0 where a process did not decode a prompt.
    """
    num = times.shape[1]
    if num < 2:
        return np.zeros(num)
    timed = times > 0.0
    log_ratio = np.zeros(times.shape)
    log_ratio[timed] = np.log(tokens[timed] / times[timed] * other_times[timed] / other_tokens[timed])
    # Least squares without the level of each prompt; the weight of a pair is its time.
    weight = times / times.sum(axis=1, keepdims=True)
    normal_matrix = np.diag(times.sum(axis=0)) - times.T @ weight
    right = (times * (log_ratio - (weight * log_ratio).sum(axis=1, keepdims=True))).sum(axis=0)
    scaled = normal_matrix / np.trace(normal_matrix) if np.trace(normal_matrix) > 0.0 else normal_matrix
    if np.linalg.matrix_rank(scaled, tol=1e-9) == num - 1:
        effect = np.linalg.pinv(normal_matrix, rcond=1e-12) @ right
    else:
        sums = [part.sum(axis=0) for part in (tokens, times, other_tokens, other_times)]
        effect = np.log(sums[0] / sums[1] * sums[3] / sums[2])
    share = times.sum(axis=0) / times.sum()
    return np.asarray(share * (effect - share @ effect) * np.sqrt(num / (num - 1)))


NUM_DRAWS = 4000


@dataclass(frozen=True)
class Measurement:
    """Sums of one side: (prompt, process) -> (numerator, denominator).

    plain: plain decoding in the same measurement, where A and B ran in two measurements: the side's value is then taken
    over it. None where both ran in one measurement, since it cancels.
    """

    sums: TimedPairs
    plain: TimedPairs | None = None


@dataclass(frozen=True)
class Ratio:
    """A over B in one quantity on one workload; A is better above 1. verdict: see PairedComparison in rows.py."""

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


def compare_sides(
    a: Measurement, b: Measurement, workloads: Mapping[str, str], quantity: str, margins: Margins
) -> list[Ratio]:
    """One ratio over all prompts, and one for each workload where there are several; [] without a common prompt.

    workloads: prompt -> its workload.
    """
    shared = sorted(_common_prompts(a, b))
    names = sorted({workloads[prompt] for prompt in shared} - {ALL})
    ratios = []
    for workload in [ALL, *(names if len(names) > 1 else [])] if shared else []:
        prompts = [prompt for prompt in shared if workload in (ALL, workloads[prompt])]
        estimate, values = _quotient(a, b, prompts)
        lo, hi = estimate.interval()
        margin = margins.of(quantity, pooled=workload == ALL)
        verdict = verdict_of(lo, hi, margin, decisive=estimate.is_decisive)
        ratios.append(Ratio(quantity, workload, *values, estimate.value, lo, hi, margin, len(prompts), verdict))
    return ratios


def verdict_of(lo: float, hi: float, margin: float, *, decisive: bool) -> str:
    """better | not_worse | worse | undecided; see PairedComparison. decisive: whether there are enough prompts."""
    if not decisive:
        return "undecided"
    if lo > 1.0:
        return "better"
    if lo >= 1.0 - margin:
        return "not_worse"
    return "worse" if hi < 1.0 - margin else "undecided"


def _common_prompts(a: Measurement, b: Measurement) -> set[str]:
    """The prompts that both sides have in a common process, or each with plain decoding of its own measurement."""
    if a.plain is None or b.plain is None:
        return {prompt for prompt, _ in a.sums.keys() & b.sums.keys()}
    sides = ({prompt for prompt, _ in side.sums.keys() & (side.plain or {}).keys()} for side in (a, b))
    return set.intersection(*sides)


def _quotient(a: Measurement, b: Measurement, prompts: list[str]) -> tuple[Estimate, tuple[float, float]]:
    """(A over B, (value of A, value of B))."""
    seed = int.from_bytes(hashlib.sha256("\n".join(prompts).encode("utf-8")).digest()[:8], "big")
    if a.plain is None or b.plain is None:
        pairs = {pair for pair in a.sums.keys() & b.sums.keys() if pair[0] in set(prompts)}
        a_sums, b_sums = ({pair: side.sums[pair] for pair in pairs} for side in (a, b))
        ratio = speed_ratio(a_sums, b_sums, sorted({process for _, process in pairs}), NUM_DRAWS, seed)
        assert ratio is not None, "the prompts are those that both have"
        return ratio.ratio, (_ratio_of_sums(a_sums), _ratio_of_sums(b_sums))
    # Processes of two measurements are different ones: each gets its own number and its own draws.
    apart = [
        (_renumber_processes(side.sums, i, prompts), _renumber_processes(side.plain or {}, i, prompts))
        for i, side in enumerate((a, b))
    ]
    processes = sorted({process for sums, plain in apart for _, process in sums.keys() & plain.keys()})
    sides = [speed_ratio(sums, plain, processes, NUM_DRAWS, seed) for sums, plain in apart]
    assert sides[0] is not None and sides[1] is not None, "the prompts are those that both have"
    return sides[0].ratio.over(sides[1].ratio), (sides[0].ratio.value, sides[1].ratio.value)


def _renumber_processes(timed: TimedPairs, which: int, prompts: list[str]) -> TimedPairs:
    """The pairs of some prompts, with process numbers that differ between the two measurements. which: 0 or 1."""
    selected = set(prompts)
    return {(prompt, 2 * process + which): sums for (prompt, process), sums in timed.items() if prompt in selected}


def _ratio_of_sums(timed: TimedPairs) -> float:
    """Numerators over denominators; a prompt counts once, in however many processes it was decoded."""
    processes: dict[str, int] = {}
    for prompt, _ in timed:
        processes[prompt] = processes.get(prompt, 0) + 1
    above, below = (sum(sums[i] / processes[pair[0]] for pair, sums in sorted(timed.items())) for i in (0, 1))
    return above / below
