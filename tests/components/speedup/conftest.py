"""Artifacts and contexts for the speedup steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from components.contract import Context, Measurements
from components.policy import Policy, read_policy
from components.rows import AcceptanceByContext, DepthChoice, DepthEval, read_rows, write_rows
from components.speedup import choose_depth


@pytest.fixture
def measurements(tmp_path: Path) -> Callable[..., Measurements]:
    """Rows -> a Measurements artifact."""

    def make(rows: list[object]) -> Measurements:
        path = tmp_path / f"m{len(list(tmp_path.iterdir()))}"
        path.mkdir()
        write_rows(path, rows)
        return Measurements(key=path.name, path=path)

    return make


@pytest.fixture
def new_ctx(tmp_path: Path) -> Callable[..., Context]:
    """A fresh context."""

    def make(seed: int = 0) -> Context:
        path = tmp_path / f"c{len(list(tmp_path.iterdir()))}"
        (path / "scratch").mkdir(parents=True)
        return Context(key=path.name, out=path, scratch=path / "scratch", seed=seed)

    return make


@pytest.fixture
def choose(measurements: Callable[..., Measurements], new_ctx: Callable[..., Context]) -> Callable[..., Policy]:
    """Maps and cells -> the policy that choose_depth makes of them."""

    def run(maps: list, cells: list, **settings: object) -> Policy:
        made = choose_depth([measurements(maps)], [measurements(cells)], ctx=new_ctx(), **settings)  # type: ignore[arg-type]
        policy = read_policy(made.path)
        assert read_rows(made.path, DepthChoice) == [*policy.choices, *policy.contexts]
        assert read_rows(made.path, DepthEval) == [*policy.evals, *policy.trees]
        assert read_rows(made.path, AcceptanceByContext) == policy.acceptance_by_context
        assert (made.path / "policy.md").read_text().startswith("# Depth policy")
        return policy

    return run
