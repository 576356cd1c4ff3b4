"""Simulation with known truth: the depth that is taken loses little, "use" is seldom wrong, intervals hold the truth.

Six populations (populations.py), with what prompts, processes and blocks do to a study. Seeds are fixed: a failure is a
change of the code. Each test states its number of studies, and what a worse rule or interval would show.
"""

from __future__ import annotations

import numpy as np
import pytest
from populations import POPULATIONS, RULE, Population, study

from components.speedup.bootstrap import near_best
from components.speedup.prediction.flags import weight_issues
from components.speedup.prediction.predict import Speeds, pick


def taken(speeds: Speeds) -> int:
    """Column of the depth that the rule takes, whether or not it beats plain decoding."""
    return 1 + near_best(speeds.draws[:, 1:], RULE.tolerance, RULE.confidence)[0]


def fastest(speeds: Speeds) -> int:
    """Column of the depth that came out fastest."""
    return 1 + int(np.argmax([s.value for s in speeds.speedup[1:]]))


def best_bound(speeds: Speeds) -> int:
    """Column that unpaired lower bounds take, as the rule was before: the smallest within 1 % of the best bound."""
    bounds = [s.interval()[0] for s in speeds.speedup[1:]]
    return 1 + min(i for i, bound in enumerate(bounds) if bound >= max(bounds) * (1.0 - RULE.tolerance))


@pytest.mark.parametrize(("num_prompts", "at_most"), [(24, 0.005), (8, 0.009)])
def test_the_depth_that_is_taken_loses_little_on_every_population(num_prompts: int, at_most: float) -> None:
    """250 studies of each population in 3 processes. Measured: 0.23 % on average at 24 prompts, 0.55 % at 8.

    The mean of 250 has a standard error of 0.03 to 0.07 %: a rule that loses 0.25 % more at 24 fails. Unpaired lower
    bounds lose 1 to 5 % (the next test).
    """
    for name, population in POPULATIONS.items():
        truth = population.truth()
        losses: dict[str, list[float]] = {"taken": [], "fastest": []}
        for number in range(250):
            speeds = study(population, num_prompts, 3, np.random.default_rng([1, num_prompts, number]))
            losses["taken"].append(1.0 - truth[taken(speeds) - 1] / truth.max())
            losses["fastest"].append(1.0 - truth[fastest(speeds) - 1] / truth.max())
        mean = {rule: float(np.mean(lost)) for rule, lost in losses.items()}
        assert mean["taken"] <= at_most, (name, mean)
        assert mean["taken"] <= mean["fastest"] + 0.002, (name, mean)


def test_unpaired_bounds_would_lose_several_times_as_much() -> None:
    """What the paired rule is for: 60 studies of 24 prompts of each population, by the rule as it was."""
    losses = []
    for population in POPULATIONS.values():
        truth = population.truth()
        for number in range(60):
            speeds = study(population, 24, 3, np.random.default_rng([1, 24, number]))
            losses.append([1.0 - truth[rule(speeds) - 1] / truth.max() for rule in (taken, best_bound)])
    paired, unpaired = np.mean(losses, axis=0)
    assert unpaired > 0.008 and unpaired > 3.0 * paired, (paired, unpaired)


@pytest.mark.parametrize("num_prompts", [4, 8, 24, 64])
def test_use_is_seldom_said_of_what_is_slower(num_prompts: int) -> None:
    """True best 0.98x: 100 studies of each population, 600 in all, at most 5 % of them "use".

    A true rate of 9 % passes once in 4,000 sets of seeds. By raw draws of one session it was 11 % at 4 prompts.
    """
    slower = [population.scaled_to(0.98) for population in POPULATIONS.values()]
    used = [_verdict(population, num_prompts, number) == "use" for population in slower for number in range(100)]
    assert np.mean(used) <= 0.05, np.mean(used)


def test_what_is_faster_is_used_and_too_few_prompts_decide_nothing() -> None:
    """True best 1.4x at 24 prompts is nearly always used; the same with three prompts never is."""
    faster = [population.scaled_to(1.4) for population in POPULATIONS.values()]
    told = [_verdict(population, 24, number) for population in faster for number in range(20)]
    assert told.count("use") >= 0.85 * len(told) and "do_not_speculate" not in told
    assert {_verdict(population, 3, number) for population in faster for number in range(10)} == {"undecided"}


def _verdict(population: Population, num_prompts: int, number: int) -> str:
    speeds = study(population, num_prompts, 3, np.random.default_rng([3, num_prompts, number]))
    return pick(speeds.depths, speeds.speedup, RULE).verdict


@pytest.mark.parametrize(("num_prompts", "num_studies", "most"), [(8, 200, 0.98), (24, 300, 0.97), (200, 150, 0.97)])
def test_intervals_hold_the_truth(num_prompts: int, num_studies: int, most: float) -> None:
    """Coverage of AL and of S at depth 3 from prompts and 3 processes, nominally 95 %, over studies of each population.

    Lengths of one order: 93 to 97 % on average over the four populations (at 24 prompts 1,200 studies, standard error
    0.6 %: a coverage of 91 % passes once in 700); over eight prompts rather too wide, up to 98 %. Where a few prompts
    hold most rounds, at least 93 %, rather too wide an interval than too short a one, and from 24 prompts on a flag.
    """
    even: list[tuple[bool, bool]] = []
    for name, population in POPULATIONS.items():
        lengths, speeds = population.lengths_kept(), population.truth()
        held, flagged = [], 0
        for number in range(num_studies):
            found = study(population, num_prompts, 3, np.random.default_rng([2, num_prompts, number]))
            (al_lo, al_hi), (lo, hi) = found.al[3].interval(), found.speedup[3].interval()
            held.append((al_lo <= lengths[2] <= al_hi, lo <= speeds[2] <= hi))
            flagged += bool(weight_issues(found.al[3]))
        if name in ("heavy tails", "one dominant prompt"):
            assert np.mean(held, axis=0).min() >= 0.93, (name, np.mean(held, axis=0))
            assert num_prompts < 24 or flagged > 0.5 * num_studies, (name, flagged)
        else:
            assert flagged == 0
            even += held
    al, speedup = np.mean(even, axis=0)
    assert 0.93 <= al <= most and 0.93 <= speedup <= most, (al, speedup)
