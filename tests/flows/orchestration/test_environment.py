"""Prefect's environment: quiet, at home below ours, and at the server that answers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from flows.orchestration import environment
from flows.services.client import QUIET


@pytest.fixture(autouse=True)
def no_prefect_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PREFECT_")]:
        monkeypatch.delenv(name)
    for name in (*QUIET, "PREFECT_HOME", "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is taken back
        monkeypatch.delenv(name)


def test_without_a_server_prefect_is_quiet_and_lives_in_our_home(tmp_path: Path) -> None:
    assert environment.prepare(tmp_path) == ""
    assert os.environ["PREFECT_HOME"] == str(tmp_path / "prefect") and (tmp_path / "prefect").is_dir()
    assert all(os.environ[name] == value for name, value in QUIET.items())


def test_a_server_that_is_named_and_answers_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setattr(environment, "answers", lambda url: True)
    assert environment.prepare(tmp_path) == "http://127.0.0.1:4200/api"
    with environment.prefect_server(tmp_path) as server:
        assert server is None, "a server that is there is not started again"


def test_a_server_that_is_named_and_silent_is_told_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://me:secret@127.0.0.1:9/api")
    assert environment.prepare(tmp_path) == ""
    told = capsys.readouterr().err
    assert "taking a temporary one" in told and "secret" not in told
