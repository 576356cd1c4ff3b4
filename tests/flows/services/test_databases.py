"""Which database a server gets, and that its password is shown nowhere."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from components.contract import UserError
from flows.services.databases import SERVERS, VARIABLES, database_url, on_database

PREFECT, MLFLOW = (server.variable for server in SERVERS.values())
COMMAND = ("/usr/bin/python", "-m", "server")


def test_without_a_database_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert on_database("prefect", COMMAND, {"A": "1"}) == (COMMAND, {"A": "1"})


def test_a_server_gets_its_own_url_and_no_other_in_the_environment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFECT, "postgresql+asyncpg://ada:one@db/prefect")
    monkeypatch.setenv(MLFLOW, "postgresql://ada:two@db/mlflow")
    for name, password, other in (("prefect", "one", "two"), ("mlflow", "two", "one")):
        command, environment = on_database(name, COMMAND, {**os.environ, SERVERS[name].server_variable: "sqlite:///x"})
        assert command[-3:] == COMMAND and "flows.services.databases" in command
        assert not any(password in word for word in command)
        assert [key for key, value in environment.items() if f":{password}@" in value] == [
            SERVERS[name].server_variable
        ]
        assert not any(f":{other}@" in value for value in environment.values())


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("prefect", "postgresql://ada:hidden@db/prefect"),  # a driver that Prefect cannot use
        ("mlflow", "postgresql+asyncpg://ada:hidden@db/mlflow"),
        ("mlflow", "mysql://ada:hidden@db/mlflow"),
        ("prefect", "postgresql+asyncpg://ada:hidden@db"),
        ("prefect", "postgresql+asyncpg:///prefect?password=hidden"),
    ],
)
def test_a_wrong_url_is_refused_without_its_password(name: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVERS[name].variable, url)
    with pytest.raises(UserError, match=SERVERS[name].variable) as caught:
        database_url(name)
    assert "hidden" not in str(caught.value)


def test_a_database_that_is_down_ends_in_one_line_before_the_server_starts() -> None:
    pytest.importorskip("asyncpg")
    url = "postgresql+asyncpg://ada:hidden@127.0.0.1:9/prefect"  # nobody listens there
    done = subprocess.run(
        [sys.executable, "-m", "flows.services.databases", "prefect", sys.executable, "-c", "print('started')"],
        env={**os.environ, SERVERS["prefect"].server_variable: url},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "cannot be used" in done.stderr and "hidden" not in done.stderr
