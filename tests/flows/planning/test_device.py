"""The device of a run is chosen without torch, and a name that is none costs one line."""

from __future__ import annotations

import pytest

from components.contract import UserError
from flows.planning.device import has_cuda, library_versions, resolve_device


def test_no_gpu_is_seen_where_the_environment_hides_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    has_cuda.cache_clear()
    assert resolve_device("auto") == "cpu"
    with pytest.raises(UserError, match="--device cuda:0: no GPU that torch can use here"):
        resolve_device("cuda:0")
    has_cuda.cache_clear()


def test_an_unknown_device_is_told_with_those_that_are_known() -> None:
    with pytest.raises(UserError, match=r"--device tpu: unknown device \(known: auto, cpu, cuda, cuda:N\)"):
        resolve_device("tpu")


def test_versions_of_what_changes_a_result_are_recorded() -> None:
    assert {"python", "torch", "numpy"} <= library_versions().keys()
