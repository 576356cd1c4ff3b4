"""Costs over depth: noise in cells is ironed out, what all processes show stays, and what contradicts is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from simulated_rows import make_cells

from components.contract import UserError
from components.rows import CostCell
from components.speedup.bootstrap import Floats
from components.speedup.prediction.costs import Setting, cells_to_measure_again, cost_curve, cost_table

DEPTHS = list(range(1, 8))
LINE = 1.1 + 0.15 * np.array(DEPTHS)


def by_process(cost: Floats, own: float, shared: float, num_processes: int, rng: np.random.Generator) -> Floats:
    """[depths, processes] of log ratios: what processes share, and what each cell has of its own."""
    noise = own * rng.standard_normal((len(cost), num_processes)) + shared * rng.standard_normal(num_processes)
    return np.asarray(np.log(cost)[:, None] + noise)


def test_without_chance_cells_stand_as_they_are() -> None:
    odd = LINE * np.array([1.0, 1.03, 0.99, 1.0, 1.02, 1.0, 1.01])
    curve = cost_curve(DEPTHS, np.repeat(np.log(odd)[:, None], 3, axis=1))
    assert (
        np.exp(curve.log_ratio) == pytest.approx(odd)
        and np.abs(curve.process).max() < 1e-12
        and not curve.contradictions
    )
    one = cost_curve(DEPTHS, np.zeros((7, 0)), np.log(odd))
    assert np.exp(one.log_ratio) == pytest.approx(odd) and one.process.shape == (7, 0)


def test_noise_in_cells_is_ironed_out_and_a_real_step_stays() -> None:
    """300 machines each: where the truth is a line the error falls by a quarter or more; of a step of 10 %, which all
    processes show, at least four fifths are left."""
    step = LINE * np.where(np.array(DEPTHS) >= 5, 1.10, 1.0)
    errors, heights = [], []
    for number in range(300):
        rng = np.random.default_rng([1, number])
        cells = by_process(LINE, 0.02, 0.015, 3, rng)
        rest = cells - np.log(LINE)[:, None]
        curve = cost_curve(DEPTHS, cells).log_ratio - np.log(LINE)
        # What all cells share is no matter of shape.
        errors.append([(curve - curve.mean()).std(), (rest.mean(axis=1) - rest.mean()).std()])
        found = cost_curve(DEPTHS, by_process(step, 0.01, 0.015, 3, rng)).log_ratio
        heights.append(found[4] - found[3])
    smooth, raw = np.mean(errors, axis=0)
    assert smooth < 0.75 * raw, (smooth, raw)
    assert np.mean(heights) > 0.8 * (np.log(step[4] / step[3]) - np.log(LINE[4] / LINE[3])) + np.log(LINE[4] / LINE[3])


def test_its_spread_is_what_processes_cause() -> None:
    """1,000 machines: the loadings' mean variance is the curve's about the truth, at the ends and in the middle."""
    off, said = [], []
    for number in range(1000):
        curve = cost_curve(DEPTHS, by_process(LINE, 0.02, 0.015, 3, np.random.default_rng([2, number])))
        off.append(curve.log_ratio - np.log(LINE))
        said.append((curve.process**2).sum(axis=1))
    ratio = np.mean(said, axis=0) / np.mean(np.square(off), axis=0)
    assert ((ratio > 0.8) & (ratio < 1.45)).all(), ratio  # rather too wide: a real step might have been ironed


def test_a_deeper_round_never_costs_less_unless_the_data_show_it() -> None:
    rng = np.random.default_rng(3)
    for _ in range(100):
        curve = cost_curve(DEPTHS, by_process(np.full(7, 1.5), 0.02, 0.01, 3, rng))
        shown = {c.depth_k for c in curve.contradictions if c.falls}
        falls = {DEPTHS[i] for i in range(1, 7) if curve.log_ratio[i] < curve.log_ratio[i - 1] - 1e-12}
        assert falls <= shown
    dip = LINE * np.array([1.0, 1.0, 1.0, 0.7, 1.0, 1.0, 1.0])
    curve = cost_curve(DEPTHS, by_process(dip, 0.005, 0.01, 4, rng))
    assert 4 in {c.depth_k for c in curve.contradictions if c.falls}
    assert curve.log_ratio[3] < curve.log_ratio[2]


def test_contradictions_are_beyond_chance() -> None:
    """1,000 machines whose costs are a line: a depth is named on 2 % of them; one that is 25 % off on most."""
    named, found = 0, 0
    for number in range(1000):
        rng = np.random.default_rng([4, number])
        named += bool(cost_curve(DEPTHS, by_process(LINE, 0.02, 0.015, 3, rng)).contradictions)
        off = LINE * np.array([1.0, 1.0, 1.25, 1.0, 1.0, 1.0, 1.0])
        found += 3 in {c.depth_k for c in cost_curve(DEPTHS, by_process(off, 0.02, 0.015, 3, rng)).contradictions}
    assert named <= 20, named
    assert found >= 800, found


def test_a_process_that_measured_other_depths_is_not_taken_for_a_slow_one() -> None:
    cells = np.log(LINE)[:, None] + np.array([0.0, 0.01, 0.3])
    cells[4:, 2] = np.nan
    curve = cost_curve(DEPTHS, cells)
    assert np.diff(curve.log_ratio - np.log(LINE)) == pytest.approx(np.zeros(6), abs=1e-9)


def processes(cells: list[CostCell], speed: dict[int, float]) -> list[CostCell]:
    """The cells of processes that run at other speeds, all phases alike."""
    return [dataclasses.replace(c, median_ns=c.median_ns * speed[c.process]) for c in cells]


def test_a_process_that_is_slow_in_everything_changes_nothing() -> None:
    """Each round is held against the plain step of its own process."""
    cells = make_cells(10.0, [11.0, 12.0, 13.0], [1.0, 2.0, 3.0], t_host=[0.1, 0.2, 0.3, 0.4])
    slowed = processes(cells, {1: 1.0, 2: 1.4, 3: 2.0})
    tables = [cost_table(rows, Setting(cells[0].draft_key, 1)) for rows in (cells, slowed)]
    ratios = [(t.times.verify + t.times.draft) / t.times.target for t in tables]
    assert ratios[0] == pytest.approx(ratios[1])
    assert tables[1].num_processes == 3 and np.abs(tables[1].process).max() < 1e-12


def test_one_process_stands_for_itself_alone() -> None:
    cells = make_cells(10.0, [11.0, 12.0], [1.0, 2.0], noise=0.03, num_processes=1, seed=1)
    table = cost_table(cells, Setting(cells[0].draft_key, 1))
    assert table.num_processes == 1 and np.abs(table.process[1:]).max() > 0.0


def test_cells_that_contradict_their_curve_are_named_while_measuring() -> None:
    cells = make_cells(10.0, [11.0 + k for k in range(6)], [1.0 + k for k in range(6)], noise=0.005, seed=2)
    assert cells_to_measure_again(cells) == {}
    odd = [dataclasses.replace(c, median_ns=c.median_ns * 1.4) if c.depth_k == 3 else c for c in cells]
    ((draft_key, depth),) = cells_to_measure_again(odd)
    assert (draft_key, depth) == (cells[0].draft_key, 3)
    assert cells_to_measure_again(odd)[draft_key, depth].by > 0.15


def test_rounds_that_no_process_timed_beside_plain_steps_are_one_line() -> None:
    cells = make_cells(10.0, [11.0, 12.0], [1.0, 2.0])
    apart = [dataclasses.replace(c, process=9) if c.phase == "draft" and c.depth_k == 2 else c for c in cells]
    with pytest.raises(UserError, match="no process timed a whole round") as error:
        cost_table(apart, Setting(cells[0].draft_key, 1))
    assert "\n" not in str(error.value)
    # A process that was given to some depths alone still counts for them.
    some = [c for c in cells if not (c.process == 3 and c.depth_k == 2)]
    assert cost_table(some, Setting(cells[0].draft_key, 1)).num_processes == 3
