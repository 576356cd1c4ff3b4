"""The statistics of blocks are what they say; the collector rests meanwhile; states of devices are read by name."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from components.bench.clock import (
    clock_mhz,
    device_state,
    parse_gpu_state,
    quiet_interpreter,
    slices_stat,
    timer_overhead_ns,
)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_the_median_of_a_slice_has_as_much_above_as_below(samples: list[float]) -> None:
    stat = slices_stat([samples])
    assert sum(x < stat.median for x in samples) <= len(samples) / 2
    assert sum(x > stat.median for x in samples) <= len(samples) / 2
    assert 0 <= stat.mad <= max(samples) - min(samples)
    assert stat.num_samples == len(samples)


def test_neither_a_preemption_nor_a_busy_second_moves_a_block() -> None:
    assert slices_stat([[5.0] * 9 + [900.0]]).median == 5.0
    assert slices_stat([[5.0] * 4, [5.0] * 4, [90.0] * 4, [70.0] * 4]) == (5.0, 32.5, 16)


@given(st.lists(st.lists(st.floats(1, 1e9), min_size=1, max_size=5), min_size=1, max_size=9))
def test_a_block_takes_as_long_as_its_quietest_slices(slices: list[list[float]]) -> None:
    medians = sorted(slices_stat([one]).median for one in slices)
    lower = medians[: min(3, (len(medians) + 1) // 2)]
    tolerance = 1e-9 * medians[-1]
    assert medians[0] - tolerance <= slices_stat(slices).median <= lower[-1] + tolerance


def test_the_collector_rests_while_time_is_measured_and_works_afterwards() -> None:
    """And what is set aside for good stays there: looking through all libraries takes a third of a second each time."""
    assert gc.isenabled()
    gc.freeze()
    with quiet_interpreter():
        assert not gc.isenabled()
    assert gc.isenabled() and gc.get_freeze_count() > 0
    assert 0 < timer_overhead_ns() < 100_000


def test_what_the_driver_tells_of_a_gpu_is_read_by_name_and_the_rest_is_absent() -> None:
    line = "1980, 1980, 2619, 41, 119.31, 700.00, P0, 0x0000000000000000, [N/A]\n"
    state = parse_gpu_state(line)
    assert (state["sm_clock_mhz"], state["power_w"], state["performance_state"]) == (1980.0, 119.31, "P0")
    assert state["throttle_reasons"] == "0x0000000000000000" and "utilisation_percent" not in state
    assert clock_mhz(state) == 1980.0
    assert parse_gpu_state("No devices were found") == {}
    assert clock_mhz({}) is None


def test_a_cpu_tells_its_cores() -> None:
    assert "num_physical_cores" in device_state(torch.device("cpu"))
