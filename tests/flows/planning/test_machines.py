"""Machines are found by name and number; a user's file adds and changes, and its faults are told by line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from components.contract import UserError
from components.machine import describe_machine
from flows.planning.machines import KNOWN, find_machine

NAMED = ("h100", "h200", "b200", "b300", "a100", "l40s", "rtx4090", "m4", "epyc9654")


def test_every_known_machine_is_whole_and_names_its_sources(tmp_path: Path) -> None:
    assert set(yaml.safe_load(KNOWN.read_text(encoding="utf-8"))["machines"]) == set(NAMED)
    for name in NAMED:
        machine = find_machine(name, tmp_path / "pipelines.yaml")
        assert machine.device.sources and machine.device.seen_as
        assert 1 < machine.flops("bfloat16") / machine.bandwidth < 1000, "operations a byte"


def test_a_number_after_the_name_counts_gpus(tmp_path: Path) -> None:
    machine = find_machine("h100x8", tmp_path / "pipelines.yaml")
    assert (machine.count, machine.memory, machine.disk) == (8, 80_000_000_000, 8 * 3_840_000_000_000)
    assert machine.is_like({"device_name": "NVIDIA H100 80GB HBM3", "cpu_model": "Xeon"})
    assert not machine.is_like({"device_name": "NVIDIA H200", "cpu_model": "Xeon"})
    with pytest.raises(UserError, match="m4 can be one"):
        find_machine("m4x2", tmp_path / "pipelines.yaml")
    with pytest.raises(UserError, match=r"--on h10x8: no such machine \(did you mean 'h100'\?\)"):
        find_machine("h10x8", tmp_path / "pipelines.yaml")


def test_here_is_this_machine(tmp_path: Path) -> None:
    machine = find_machine("here", tmp_path / "pipelines.yaml")
    assert machine.is_like({"machine_id": describe_machine().machine_id})
    assert not machine.is_gpu


def test_a_file_beside_the_pipelines_changes_single_values_and_adds(tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text(
        "machines:\n"
        "  h100: {price: 2.5}\n"
        "  mine:\n"
        "    {about: My GPU, kind: gpu, tflops: {float32: 30, bfloat16: 60}, memory_gb: 16, bandwidth_gb_s: 500}\n"
    )
    pipelines = tmp_path / "pipelines.yaml"
    assert find_machine("h100x4", pipelines).price == 10.0
    assert find_machine("h100", pipelines).memory == 80_000_000_000
    mine = find_machine("mine", pipelines)
    assert (mine.memory, mine.disk, mine.price) == (16_000_000_000, None, None)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("h100: {prize: 2}", r"machines.yaml:2: machine 'h100': unknown word 'prize' \(did you mean 'price'\?\)"),
        ("h100: {memory_gb: -1}", r"machines.yaml:2: machine 'h100': 'memory_gb': input should be greater than 0"),
        ("h100: {tflops: {float32: 1}}", r"machines.yaml:2: machine 'h100': 'tflops.bfloat16' is missing"),
        ("new: {kind: gpu}", r"machines.yaml:2: machine 'new': 'about' is missing"),
    ],
)
def test_faults_of_the_file_are_told_by_line(line: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "machines.yaml").write_text(f"machines:\n  {line}\n")
    with pytest.raises(UserError, match=told):
        find_machine("h100", tmp_path / "pipelines.yaml")
