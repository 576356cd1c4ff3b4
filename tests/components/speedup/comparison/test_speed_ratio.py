"""Two arms on the same prompts in the same processes: the interval has both levels, whoever decoded what."""

from __future__ import annotations

import numpy as np
import pytest

from components.speedup.comparison.speed_ratio import TimedPairs, speed_ratio

PROMPTS_APART, PROCESSES_APART, NOISE = 0.12, 0.02, 0.02
TRUTH = 1.4 * np.exp(-(PROMPTS_APART**2) / 2)  # of a ratio of sums; prompts' own ratios are log-normal about 1.4


def decoded(num_prompts: int, num_processes: int, each: int, rng: np.random.Generator) -> tuple[TimedPairs, TimedPairs]:
    """Each process decodes `each` of the prompts at a pace of its own (30 %), and favours one arm or the other."""
    own = np.log(1.4) + PROMPTS_APART * rng.standard_normal(num_prompts)
    length = rng.uniform(1.0, 3.0, num_prompts)
    ours: dict[tuple[str, int], tuple[float, float]] = {}
    theirs: dict[tuple[str, int], tuple[float, float]] = {}
    for process in range(1, num_processes + 1):
        favour, pace = PROCESSES_APART * rng.standard_normal(), np.exp(0.3 * rng.standard_normal())
        for i in rng.choice(num_prompts, each, replace=False):
            plain, fast = length[i] * pace * np.exp(NOISE * rng.standard_normal(2))
            theirs[f"p{i:03d}", process] = (100.0 * length[i], plain)
            ours[f"p{i:03d}", process] = (100.0 * length[i], fast / np.exp(own[i] + favour))
    return ours, theirs


@pytest.mark.parametrize("each", [24, 12, 8])
def test_its_interval_holds_the_truth_whoever_decoded_what(each: int) -> None:
    """400 studies of 24 prompts in 3 processes, each decoding all of them, half, or a third: 95 % nominal.

    Standard error 1.1 %: a coverage of 88 %, about that of prompts alone, passes once in 2,000.
    """
    held = 0
    for number in range(400):
        ours, theirs = decoded(24, 3, each, np.random.default_rng([1, each, number]))
        found = speed_ratio(ours, theirs, [1, 2, 3], 500, number)
        assert found is not None and found.num_processes == 3
        lo, hi = found.ratio.interval()
        held += lo <= TRUTH <= hi
    assert 0.93 <= held / 400 <= 0.985, held / 400


def test_processes_that_differ_widen_it_and_prompts_that_one_met_do_not() -> None:
    pairs = [(f"p{i}", s) for i in range(12) for s in (1, 2, 3)]
    theirs = dict.fromkeys(pairs, (10.0, 1.0))
    # What a prompt does it does in every process: a process that met the quick ones is no faster for it.
    quick = {p: (10.0, 0.5 if int(p[0][1:]) % 2 else 0.9) for p in pairs if p[1] == 1 or int(p[0][1:]) > 3}
    found = speed_ratio(quick, theirs, [1, 2, 3], 400, 0)
    assert found is not None and np.abs(found.ratio.process).max() < 1e-9
    apart = {p: (10.0, 0.5 * (1.0, 1.1, 0.9)[p[1] - 1]) for p in pairs}
    found = speed_ratio(apart, theirs, [1, 2, 3], 400, 0)
    assert found is not None
    lo, hi = found.ratio.interval()
    assert lo < 1.75 < 2.25 < hi, "three processes 10 % apart leave as much in doubt"


def test_one_process_says_nothing_of_processes_and_no_shared_prompt_says_nothing_at_all() -> None:
    ours, theirs = decoded(6, 1, 6, np.random.default_rng(0))
    found = speed_ratio(ours, theirs, [1], 400, 0)
    assert found is not None and found.num_processes == 1 and not len(found.ratio.process)
    assert speed_ratio(ours, {("other", 1): (1.0, 1.0)}, [1], 400, 0) is None
    assert speed_ratio(ours, {(p, 2): t for (p, _), t in theirs.items()}, [1, 2], 400, 0) is None


def test_draws_of_two_arms_are_paired() -> None:
    """Two arms that the same processes favour alike: their ratio hardly varies, though each does."""
    rng = np.random.default_rng(2)
    ours, theirs = decoded(24, 3, 24, rng)
    other = {pair: (tokens, seconds * 1.02) for pair, (tokens, seconds) in ours.items()}
    one, two = (speed_ratio(arm, theirs, [1, 2, 3], 400, 0) for arm in (ours, other))
    assert one is not None and two is not None
    lo, hi = one.ratio.over(two.ratio).interval()
    assert (lo, hi) == pytest.approx((1.02, 1.02)) and one.ratio.interval()[1] > 1.01 * one.ratio.value
