"""The machine is described without torch; block statistics are what they say."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.bench.clock import block_stat, quiet_interpreter, timer_overhead_ns
from components.bench.machine import describe_machine
from components.contract import UserError


def test_describing_the_machine_needs_no_torch_and_is_stable() -> None:
    program = (
        "import sys\nfrom components.bench.machine import describe_machine\n"
        "print(describe_machine().machine_id, 'torch' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert said == [describe_machine().machine_id, "False"]


def test_another_device_is_another_machine() -> None:
    with pytest.raises(UserError, match="no such GPU"):
        describe_machine("cuda:97")


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=50))
def test_the_median_of_a_block_has_as_much_above_as_below(samples: list[float]) -> None:
    stat = block_stat(samples)
    assert sum(x < stat.median for x in samples) <= len(samples) / 2
    assert sum(x > stat.median for x in samples) <= len(samples) / 2
    assert 0 <= stat.mad <= max(samples) - min(samples)
    assert stat.num_samples == len(samples)


def test_one_preemption_does_not_move_a_block() -> None:
    assert block_stat([5.0] * 9 + [900.0]).median == 5.0


def test_the_collector_rests_while_time_is_measured_and_works_afterwards() -> None:
    assert gc.isenabled()
    with quiet_interpreter():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert 0 < timer_overhead_ns() < 100_000
