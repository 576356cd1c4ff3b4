"""A home with a store, and artifacts made the way the engine makes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from components.contract import Artifact
from components.rows import write_rows
from storage.artifacts.store import Store


@dataclass(frozen=True)
class ToyStep:
    """What keep needs of a planned step."""

    name: str
    uses: str = "bench.toy"
    kind: str = "Measurements"
    settings: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    reason: str = "new: never run"


Make = Callable[..., Artifact]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path / "home"


@pytest.fixture
def make(home: Path) -> Make:
    """make(key, rows=..., files=..., kind=..., **record) puts an artifact into the store of `home`."""

    def make_artifact(
        key: str,
        *,
        rows: Iterable[Any] = (),
        files: Mapping[str, Any] | None = None,
        kind: str = "Measurements",
        info: Mapping[str, Any] | None = None,
        **record: Any,
    ) -> Artifact:
        store = Store(home)
        out, _ = store.open_staging(key)
        write_rows(out, rows)
        for name, content in (files or {}).items():
            (out / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        known = {"pipeline": "toy", "step": "measure", "run_id": "r1", "seconds": 1.5, "machine": {"machine_id": "m1"}}
        return store.commit(key, kind, info or {}, {**known, **record})

    return make_artifact


@pytest.fixture
def step() -> type[ToyStep]:
    """step(name, ...) is a planned step."""
    return ToyStep


@pytest.fixture
def with_mlflow(home: Path, mlflow_template: Path) -> Path:
    """`home` with a database that is ready."""
    shutil.copytree(mlflow_template, home / "mlflow")
    return home
