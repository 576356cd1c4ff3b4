"""What the tests of flows share: a home of their own, toy pipelines, and a machine that no other test measures on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pipeline_builder import Pipeline
from prefect_server import prefect_server
from toy_garden import GARDEN, PACKAGES, ROOT

from flows.cli import main
from flows.execution.engine import Engine
from flows.planning.plan import Plan, RunOptions, make_plan
from flows.spec.schema import load_spec
from storage.artifacts.store import Store
from storage.registry import tracking


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests do not wait for measurements of other tests or sessions on this machine."""
    folder = tmp_path / "machine"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))


@pytest.fixture(autouse=True)
def new_mlflow_databases_are_copies(mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home's first MLflow database is a copy of one that is new: its migrations would take seconds in every test."""
    make = tracking._make_database

    def copy(file: Path, *, whole: bool) -> None:
        if file.is_file():
            make(file, whole=whole)
        else:
            shutil.copyfile(mlflow_template / "mlflow.db", file)

    monkeypatch.setattr(tracking, "_make_database", copy)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home directory that the command line uses too."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API address of a Prefect server of our own, which also shows that the pinned versions can serve."""
    with prefect_server(tmp_path_factory.mktemp("prefect")) as url:
        yield url


@pytest.fixture
def store(home: Path) -> Store:
    return Store(home)


@pytest.fixture
def pipelines(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a pipelines.yaml and says where."""

    def write(text: str) -> Path:
        file = tmp_path / "pipelines.yaml"
        file.write_text(text)
        return file

    return write


@pytest.fixture
def file(pipelines: Callable[[str], Path]) -> Path:
    """The garden in a pipelines.yaml."""
    return pipelines(GARDEN.text)


@pytest.fixture
def plan_of(store: Store, pipelines: Callable[[str], Path]) -> Callable[..., Plan]:
    """Plans a pipeline, or the first of a text."""

    def plan(said: Pipeline | str = GARDEN, params: dict[str, object] | None = None, **options: object) -> Plan:
        spec = load_spec(pipelines(said.text if isinstance(said, Pipeline) else said))
        name = next(iter(spec.pipelines))
        return make_plan(spec, name, params or {}, RunOptions(device="cpu", packages=PACKAGES, **options), store)  # type: ignore[arg-type]

    return plan


@pytest.fixture
def engine_of(store: Store) -> Callable[..., Engine]:
    """An engine for a plan, with a fork server that loads nothing heavy."""

    def engine(plan: Plan, **options: object) -> Engine:
        return Engine(store, plan, num_threads=1, preload=(), **options)  # type: ignore[arg-type]

    return engine


@pytest.fixture
def draftsmith(capfd: pytest.CaptureFixture[str], home: Path) -> Callable[..., tuple[int, str, str]]:
    """The command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments], packages=PACKAGES)
        captured = capfd.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def start(home: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts a program of toy_garden.py as a process of its own, to be killed."""

    def start_program(program: str, *arguments: object) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "flows")])
        return subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": path, "DRAFTSMITH_HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return start_program
