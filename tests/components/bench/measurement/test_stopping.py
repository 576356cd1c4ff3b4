"""A measurement may end when a clear winner is clear, or equal arms are known to be equal; on runs of known truth.

Statistics: noise is normal in the logarithm, seeds are fixed. A winner by 20 % at 1 % noise between processes is twenty
standard deviations away; equal arms at 5 % noise and three processes have a half-width near 8 %, at 0.2 % near 0.5 %.
"""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
from made_runs import arm_run, group_run

from components.bench.end_to_end.arms import PLAIN, RIVAL, Arm
from components.bench.end_to_end.timed_runs import GroupRun
from components.bench.measurement.stopping import check_settled, cost_half_widths
from components.rows import CostCell

ONE, TWO, LOOKUP = Arm("mtp", "m", 1), Arm("mtp", "m", 2), Arm("ngram", "", 4)
PRECISION = 0.03


def measured(
    costs: dict[Arm, float], *, noise: float, processes: int, seed: int = 0, emitted: int = 2, size: int = 1
) -> list[GroupRun]:
    """costs: of a round over a plain step; `noise` is the standard deviation of its logarithm between processes. Every
    process is by itself up to 30 % slower than another, which hits all of its arms alike."""
    dice, found = random.Random(seed), []
    for process in range(1, processes + 1):
        pace = 1e6 * dice.uniform(1.0, 1.3)
        times = {arm: pace * cost * math.exp(dice.gauss(0.0, noise)) for arm, cost in costs.items()}
        for number in (1, 2):
            runs = [
                arm_run(arm, [[round(ns)] * 8] * 4, emitted=1 if arm.is_plain else emitted, size=size)
                for arm, ns in times.items()
            ]
            found.append(group_run(process, number, [f"p{number}{place}" for place in range(size)], runs))
    return found


def test_a_clear_winner_settles_it_and_what_is_in_between_is_no_question() -> None:
    where = check_settled(measured({PLAIN: 1.0, ONE: 1.5, TWO: 1.2}, noise=0.01, processes=3), (), PRECISION)
    assert list(where.arms) == [] and where.summary.startswith("mtp k=2 is the fastest")
    slower = check_settled(measured({PLAIN: 1.0, ONE: 2.6, TWO: 2.8}, noise=0.01, processes=3), (), PRECISION)
    assert list(slower.arms) == [] and slower.summary.startswith("plain is the fastest")


def test_equal_arms_are_open_while_processes_disagree_and_settled_once_they_agree() -> None:
    noisy = check_settled(measured({PLAIN: 1.0, ONE: 1.2, TWO: 1.2}, noise=0.05, processes=3), (), PRECISION)
    assert set(noisy.arms) == {ONE, TWO}, "plain decoding is out of the question, the others are it"
    assert "not told apart" in noisy.summary and "+-" in noisy.summary
    calm = check_settled(measured({PLAIN: 1.0, ONE: 1.2, TWO: 1.2}, noise=0.002, processes=3), (), PRECISION)
    assert list(calm.arms) == [] and "as good as it" in calm.summary
    assert check_settled(measured({PLAIN: 1.0, ONE: 1.2, TWO: 1.2}, noise=0.05, processes=3), (), 0.5).arms == []


def test_more_processes_settle_what_few_leave_open() -> None:
    costs = {PLAIN: 1.0, ONE: 1.2, TWO: 1.26}
    assert set(check_settled(measured(costs, noise=0.02, processes=2, seed=1), (), PRECISION).arms) >= {ONE, TWO}
    assert check_settled(measured(costs, noise=0.02, processes=16, seed=1), (), PRECISION).arms == []


def test_one_process_settles_nothing() -> None:
    where = check_settled(measured({PLAIN: 1.0, ONE: 1.2, TWO: 1.9}, noise=0.0, processes=1), (), PRECISION)
    assert set(where.arms) == {PLAIN, ONE, TWO}


def test_arms_beside_the_decision_and_the_second_baseline_keep_nothing_open() -> None:
    costs = {PLAIN: 1.0, RIVAL: 1.0, ONE: 1.2, LOOKUP: 1.2}
    found = measured(costs, noise=0.05, processes=3)
    assert LOOKUP in check_settled(found, (), PRECISION).arms
    assert check_settled(found, [LOOKUP], PRECISION).arms == []


def test_plain_decoding_counts_at_its_quickest_kernel() -> None:
    """A drafter that beats only the slower of two baselines does not win."""
    found = measured({PLAIN: 1.0, RIVAL: 0.5, ONE: 1.5}, noise=0.005, processes=3)
    assert check_settled(found, (), PRECISION).summary.startswith("plain is the fastest")
    quick = check_settled(measured({PLAIN: 1.0, RIVAL: 1.0, ONE: 1.5}, noise=0.005, processes=3), (), PRECISION)
    assert quick.summary.startswith("mtp k=1 is the fastest")


def test_the_decision_is_that_of_the_smallest_batch() -> None:
    alone = measured({PLAIN: 1.0, ONE: 1.2}, noise=0.005, processes=3)
    together = measured({PLAIN: 0.2, ONE: 0.6}, noise=0.005, processes=3, size=4)
    assert check_settled([*alone, *together], (), PRECISION).summary.startswith("mtp k=1 is the fastest")
    assert check_settled(together, (), PRECISION).summary.startswith("plain is the fastest")


def test_an_arm_whose_answers_end_in_their_first_round_keeps_nothing_open() -> None:
    short = [
        one._replace(runs=[*one.runs, arm_run(TWO, [[10**6]])])
        for one in measured({PLAIN: 1.0, ONE: 1.2}, noise=0.002, processes=3)
    ]
    assert check_settled(short, (), PRECISION).arms == []
    nothing = [group_run(1, 1, ["a"], [arm_run(PLAIN, []), arm_run(ONE, [[5]])])]
    assert set(check_settled(nothing, (), PRECISION).arms) == {PLAIN, ONE}


def test_an_arm_that_joined_only_some_processes_is_judged_by_those() -> None:
    found = measured({PLAIN: 1.0, ONE: 1.2, TWO: 1.9}, noise=0.005, processes=4)
    later = [one._replace(runs=[r for r in one.runs if r.arm != TWO]) if one.process > 3 else one for one in found]
    assert check_settled(later, (), PRECISION).summary.startswith("mtp k=1 is the fastest")


def cells(noise: float, processes: int, *, seed: int = 0, trees: bool = False) -> list[CostCell]:
    """Two depths of one drafter, whose rounds cost 1.5 and 1.8 plain steps; blocks of a process differ by nothing."""
    dice, found = random.Random(seed), []
    for process in range(1, processes + 1):
        pace = 1e6 * dice.uniform(1.0, 1.3)
        for depth, cost in ((0, 1.0), (1, 1.5), (2, 1.8)):
            plain_or_not = ("", "none") if depth == 0 else ("d", "mtp")
            ns = pace * cost * math.exp(dice.gauss(0.0, noise))
            shares = {"target_step": 0.9, "host": 0.1} if depth == 0 else {"verify": 0.7, "draft": 0.2, "host": 0.1}
            budgets = [None, 8] if trees and depth == 2 else [None]
            found += [
                CostCell("t", *plain_or_not, phase, depth, 1, 1, 128, block, 9, ns * part, 1.0, "float32", "plain", 1,
                         tree_budget=budget, process=process)
                for block in (1, 2)
                for phase, part in shares.items()
                for budget in budgets
            ]  # fmt: skip
    return found


def test_costs_are_known_better_by_more_processes_and_not_at_all_by_one() -> None:
    assert cost_half_widths([]) == {} and cost_half_widths(cells(0.02, 1)) == {}
    few, many = cost_half_widths(cells(0.02, 3)), cost_half_widths(cells(0.02, 24))
    assert set(few) == set(many) == {"mtp k=1", "mtp k=2"}
    assert all(many[name] < few[name] / 2 for name in few), "24 processes over 3: a third, and a smaller quantile"
    assert max(cost_half_widths(cells(0.0, 3)).values()) < 1e-9, "processes differ in pace alone: nothing is open"


def test_trees_are_arms_of_their_own_and_the_worst_setting_counts() -> None:
    mine = cells(0.01, 3, trees=True)
    assert set(cost_half_widths(mine)) == {"mtp k=1", "mtp k=2", "mtp k=2 tree of 8"}
    noisy = [dataclasses.replace(cell, batch_size=4) for cell in cells(0.05, 3, seed=5)]
    worst = cost_half_widths([*mine, *noisy])
    assert worst["mtp k=1"] == cost_half_widths(noisy)["mtp k=1"] > cost_half_widths(mine)["mtp k=1"]


def test_plain_steps_alone_leave_nothing_to_know() -> None:
    assert cost_half_widths([cell for cell in cells(0.01, 3) if cell.depth_k == 0]) == {}


@pytest.mark.parametrize("seed", range(5))
def test_a_false_winner_is_never_called_settled(seed: int) -> None:
    """Equal arms at 5 % noise: none is called clearly faster by any of five measurements."""
    where = check_settled(
        measured({ONE: 1.2, TWO: 1.2, PLAIN: 1.2 / 2}, noise=0.05, processes=3, seed=seed), (), PRECISION
    )
    assert where.arms or "as good as it" in where.summary
