"""A finished study to report on, made by the real steps from simulated measurements."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_study import make_ctx, make_report_study

from components.contract import DepthPolicy, Measurements, Page
from components.report import write_page


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything that write_page takes, and the policy before it was confirmed."""
    return make_report_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def page(study: dict[str, Any], tmp_path: Path) -> Callable[..., Page]:
    """Write the page of the study, with another policy if one is given."""

    def write(policy: DepthPolicy | None = None, title: str = "A report", tuning: Measurements | None = None) -> Page:
        return write_page(
            policy or study["policy"],
            [*study["acceptance"], *([tuning] if tuning is not None else [])],
            study["cost"],
            study["end_to_end"],
            study["release"],
            title=title,
            ctx=make_ctx(tmp_path / "page", "g" * 64),
        )

    return write
