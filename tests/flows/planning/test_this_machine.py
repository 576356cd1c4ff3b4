"""The device of a run without torch; the folder for locks that all homes of a user share."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from components.contract import UserError
from flows.planning.this_machine import has_cuda, library_versions, resolve_device, runtime_folder


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


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return folder


def test_it_is_the_same_folder_each_time_and_its_owners_alone(temporary: Path) -> None:
    folder = runtime_folder()
    assert folder == runtime_folder() == temporary / f"draftsmith-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("how", ["file", "pipe", "link", "open to others"])
def test_a_place_that_is_taken_is_left_for_the_users_own_cache(temporary: Path, tmp_path: Path, how: str) -> None:
    taken = temporary / f"draftsmith-{os.getuid()}"
    if how == "file":
        taken.write_text("")
    elif how == "pipe":
        os.mkfifo(taken)
    elif how == "link":
        taken.symlink_to(tmp_path)
    else:
        taken.mkdir()
        taken.chmod(0o777)
    folder = runtime_folder()
    assert folder == runtime_folder() and folder.is_relative_to(tmp_path / "home" / ".cache")
    assert folder.stat().st_mode & 0o777 == 0o700


def test_where_nothing_can_be_made_the_error_says_what_to_set(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (temporary / f"draftsmith-{os.getuid()}").write_text("")
    (tmp_path / "home").write_text("")
    with pytest.raises(UserError, match="set TMPDIR"):
        runtime_folder()
