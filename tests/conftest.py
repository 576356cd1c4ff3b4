"""What all tests share: how property-based tests draw their examples, which files begin first, an MLflow database.

`make test` draws the same examples every time, so that it says the same of the same code; `make soak` runs all
property tests with new ones (HYPOTHESIS_PROFILE=explore), and what it finds becomes an `@example`. A loaded machine
makes drawing slow, which says nothing about the code under test.

Workers take whole files. Few tests in a file are often long ones: those files begin first, so that at the end all
workers still have something to do.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from components.source_code import objects_that_stay
from storage.registry.tracking import ensure_database

settings.register_profile("repeatable", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=500)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

LONGEST = (
    "test_main_job",
    "test_prefect_runs",
    "test_execution_clusters",
    "test_killed_services",
    "test_rehearse",
    "test_planted_faults",
    "test_eaglechat_mini",
    "test_secrets",
    "test_shared_store",
    "test_training_processes",
    "test_retry",
    "test_nightly",
    "test_up_and_down",
)
"""Files of a minute and more, longest first, by their unique names; the others begin by their number of tests."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of one marker (`-m system`) only files that name it are loaded: loading all costs each worker many seconds."""
    marker = str(config.option.markexpr)
    if collection_path.suffix == ".py" and marker in ("gpu", "system", "engines", "soak"):
        return f"mark.{marker}" not in collection_path.read_text(encoding="utf-8") or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Load all tests, and all that they import, without looking for garbage, and never look for any among it: where
    Python looked through all libraries at once, every measurement that begins with a clean memory took a second.
    """
    with objects_that_stay():
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Bring the files into the order in which they begin; tests of a file stay together and in theirs."""
    count = Counter(item.path for item in items)

    def place(path: Path) -> tuple[int, int, str]:
        return (LONGEST.index(path.stem) if path.stem in LONGEST else len(LONGEST), -count[path], str(path))

    items.sort(key=lambda item: place(item.path))


@pytest.fixture(scope="module")
def fresh_fork_server() -> None:
    """Processes of this file come from a fork server of its own: another file's has the environment that it began in
    (a tracking server that is down, say) and the imports that were asked for there.
    """
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def mlflow_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new MLflow database, made once: its migrations take seconds."""
    place = tmp_path_factory.mktemp("mlflow-template")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        ensure_database(place)
    return place / "mlflow"
