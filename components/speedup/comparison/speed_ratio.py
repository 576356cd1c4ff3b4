"""The speed of one way of decoding over that of another, timed on the same prompts in the same processes.

ratio = (sum tokens / sum time of one) / (the same of the other), over the (prompt, process) pairs that both decoded;
repetitions of a pair become one steady time. Its interval has two levels. Prompts are resampled. The effect x_s of each
process on the ratio is fitted together with that of each prompt, log r_is = a_i + x_s, because a process may not have
decoded every prompt: one with the easy prompts is no faster for it. Where no prompt was decoded in two processes, the
effects cannot be separated, and x_s is the ratio within the process: the interval is then rather too wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from components.speedup.statistics.bootstrap import Estimate, Floats, draw_weights, pooled_ratio

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
