"""Times of kernels are remembered for a machine, dtype, number of threads and shape, and for nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from components.targets.forward import kernel_times
from components.targets.forward.linear import Linear, lay_out


def test_kernels_are_timed_once_for_a_machine_dtype_threads_and_shape(
    timings: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(kernel: str = "auto", dtype: torch.dtype = torch.float32, rows: int = 160) -> tuple[str, bool]:
        """The kernels, and whether they were timed for it."""
        timings.clear()
        said = lay_out([Linear(torch.ones(rows, 128, dtype=dtype)), Linear(torch.ones(4, 4, dtype=dtype))], kernel)
        return said, bool(timings)

    first, timed = opened()
    assert timed and opened() == (first, False)
    assert opened(dtype=torch.bfloat16)[1] and opened(rows=192)[1] and not opened(rows=192)[1]
    assert opened("thorough")[1], "a measurement never takes what is remembered"
    assert not opened()[1], "and its own times are remembered"
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert opened()[1]
    finally:
        torch.set_num_threads(before)
    file = tmp_path / "kernels.json"
    whole = file.read_text()
    for damaged in (whole[:-9], whole.replace("plain", "plane")):
        file.write_text(damaged)
        assert opened()[1] and not opened()[1]
    monkeypatch.setattr(kernel_times, "_machine_id", lambda: "another processor, or another torch")
    assert opened()[1]


def test_without_a_home_to_write_to_every_opening_times(
    timings: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "file" / "home"))
    for _ in range(2):
        timings.clear()
        lay_out([Linear(torch.ones(160, 128))], "auto")
        assert timings
