"""Rounds that differ in draft tokens: a round costs the mean over kinds, whatever a block happened to draft."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import KERNELS, arm_run

from components.bench.end_to_end.arms import Arm
from components.bench.measurement.round_kinds import by_kind, mixed_stat
from components.bench.step_cost import BlockConditions, Setting, TimedBlock, cost_cells

TAKEN = BlockConditions("t", "float32", 1, KERNELS, 2, 5, 0.25, 3000.0)


def test_a_round_of_a_drafter_that_often_finds_nothing_costs_the_mean_over_what_it_drafted() -> None:
    # The first round of a generation is in no cell; of the other ten, two drafted three tokens and took twice as long.
    often, never = [0, *[0, 0, 0, 0, 3] * 2], [0] * 11
    arm = Arm("ngram", "n", 3)
    drafting = arm_run(arm, [[9999, *[400, 400, 400, 400, 800] * 2]], drafted=often)
    silent = arm_run(arm, [[9999, *[400] * 10]], drafted=never)
    cells = cost_cells([TimedBlock([run], Setting(1, 48), TAKEN) for run in (drafting, silent)])
    verify = [cell.median_ns for cell in cells if cell.phase == "verify"]
    assert verify == [(18 * 200 + 2 * 400) / 20] * 2, "a block in which it found nothing is no cheaper"
    assert [cell.reps_in_block for cell in cells if cell.phase == "verify"] == [10, 10]


@given(st.lists(st.integers(0, 4), min_size=3, max_size=40), st.integers(1, 7))
def test_rounds_that_take_a_time_of_their_kind_cost_their_mean(drafted: list[int], size_of_slice: int) -> None:
    times = [100 * (1 + kind) for kind in drafted]
    parts = [slice(start, start + size_of_slice) for start in range(0, len(times), size_of_slice)]
    slices = arm_run(Arm("suffix", "s", 4), [[9999], *(times[part] for part in parts)], drafted=[0, *drafted])
    whole = slices.whole_slices()
    kinds = by_kind(whole, [one.round_ns for one in whole])
    stat = mixed_stat(kinds, kinds, Counter(drafted))
    assert stat.median == pytest.approx(sum(times) / len(times)) and stat.num_samples == len(times)
