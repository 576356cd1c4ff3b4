"""The program of the GPU benchmark, tried where there is no GPU: every cell, both ways of launching."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_sweep import sweep
from components.contract import Machine


def test_a_sweep_times_every_cell_with_and_without_recorded_passes(
    tmp_path: Path, machine: Machine, here_instead: None
) -> None:
    records = list(
        sweep(
            tmp_path,
            machine,
            shape="tiny",
            device="cpu",
            dtype="float32",
            batch_sizes=[1, 2],
            kv_lengths=[32],
            depths=1,
            seconds=0.1,
            processes=1,
            tokens=16,
            num_threads=1,
        )
    )
    assert [record["graphs"] for record in records] == [False, True]
    for record in records:
        assert record["kernel"].endswith("+graphs") == record["graphs"]
        assert record["left_out"] == [] and record["timer_overhead_ns"] > 0
        cells = record["medians_ms"]
        expected = {f"eagle3 {phase} k=1 batch={size}" for phase in ("verify", "draft", "host") for size in (1, 2)}
        assert expected | {"target_step batch=1", "target_step batch=2"} <= set(cells)
        assert all(ms > 0 for ms in cells.values())
