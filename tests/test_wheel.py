"""The wheel: what pip puts on a machine is enough for the demo, and its steps have the same keys as in a clone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("flows", "components", "storage", "benchmarks/published")
QUICKSTART = [sys.executable, "-P", "-m", "flows.cli", "plan", "quickstart", "--json", "--file"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip unpacks the wheel; building it needs no index."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in ("pyproject.toml", "LICENSE", "pipelines.yaml"):
        shutil.copy(ROOT / name, source / name)
    for name in ROOMS:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", wheels, source], check=True)
    (wheel,) = wheels.iterdir()
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_the_wheel_holds_every_file_that_the_code_may_read(installed: Path) -> None:
    listed = subprocess.run(["git", "ls-files", *ROOMS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = set(listed.splitlines())
    assert "flows/pipelines.yaml" in files and any(name.endswith(".safetensors") for name in files)
    assert {name for name in files if not (installed / name).is_file()} == set()
    assert (installed / "flows" / "pipelines.yaml").read_bytes() == (ROOT / "pipelines.yaml").read_bytes()


def test_steps_of_an_installed_wheel_have_the_keys_that_they_have_in_a_clone(installed: Path, tmp_path: Path) -> None:
    home = {"DRAFTSMITH_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def keys(place: Path, file: Path) -> dict[str, str]:
        settings = {**os.environ, **home, "PYTHONPATH": str(place)}
        done = subprocess.run(
            [*QUICKSTART, file], cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return {step["name"]: step["key"] for step in json.loads(done.stdout)}

    there = keys(installed, installed / "flows" / "pipelines.yaml")
    assert len(there) > 12
    assert there == keys(ROOT, ROOT / "pipelines.yaml")
    asked = [sys.executable, "-P", "-c", "import flows.spec.schema as s; print(s.__file__, s.SHIPPED)"]
    said = subprocess.run(
        asked, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, check=True
    )
    assert said.stdout.decode().split() == [
        str(installed / name) for name in ("flows/spec/schema.py", "flows/pipelines.yaml")
    ]
