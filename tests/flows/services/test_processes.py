"""Who gets which secret and which port, and whom a home's servers are believed to be."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from components.contract import UserError
from flows.services.client import (
    MLFLOW_PAGES,
    PASSWORD_VARIABLE,
    Services,
    auth_file,
    client_environment,
    mlflow_address,
    pid_file,
    report_address,
    running,
    write_address,
)
from flows.services.processes import (
    Part,
    Settings,
    check_ports,
    ensure_auth_string,
    parts_of,
    public_address,
    services_of,
)

DATABASE = "postgresql+asyncpg://user:hunter2@127.0.0.1/prefect"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    for name in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    return Settings(tmp_path / "home", tmp_path / "pipelines.yaml", prefect_port=14999, mlflow_port=15999)


def parts(settings: Settings) -> dict[str, Part]:
    return {part.name: part for part in parts_of(settings)}


def test_only_those_who_need_the_password_get_it_and_it_stands_on_no_command_line(settings: Settings) -> None:
    auth = ensure_auth_string(settings.home)
    for name, part in parts(settings).items():
        holds = {variable for variable, value in part.environment.items() if auth in value}
        own = {"prefect": "PREFECT_SERVER_API_AUTH_STRING", "mlflow": PASSWORD_VARIABLE}
        assert own.get(name, "PREFECT_API_AUTH_STRING") in holds, name
        assert not holds & (set(own.values()) - {own.get(name)}), f"{name} has another's"
        assert not any(auth in word for word in part.command), name


def test_the_database_of_the_server_is_no_business_of_a_run(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", DATABASE)
    monkeypatch.setenv("HF_TOKEN", "a token for the steps")
    found = parts(settings)
    assert DATABASE in found["prefect"].environment.values()
    for name in ("worker", "watch", "mlflow"):
        assert DATABASE not in found[name].environment.values(), name
    assert found["worker"].environment["HF_TOKEN"] == "a token for the steps"


def test_every_server_listens_on_loopback_and_tells_nobody_of_us(settings: Settings) -> None:
    ensure_auth_string(settings.home)
    for part in parts(settings).values():
        assert part.environment["DO_NOT_TRACK"] == "true"
        assert part.environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"
        assert part.environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
        assert not any("0.0.0.0" in word for word in part.command)
    assert "127.0.0.1" in parts(settings)["prefect"].command


def test_the_password_is_made_once_and_only_its_owner_may_read_it(settings: Settings) -> None:
    first = ensure_auth_string(settings.home)
    assert len(first) > 30
    assert ensure_auth_string(settings.home) == first
    assert stat.S_IMODE(auth_file(settings.home).stat().st_mode) == 0o600


def test_a_password_of_ones_own_is_used(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "me:mine")
    assert ensure_auth_string(settings.home) == "me:mine"
    assert parts(settings)["worker"].environment["PREFECT_API_AUTH_STRING"] == "me:mine"
    monkeypatch.setenv("PREFECT_SERVER_API_AUTH_STRING", "mine")
    with pytest.raises(UserError, match="name:password"):
        ensure_auth_string(settings.home)


def test_two_workers_never_share_a_name(settings: Settings) -> None:
    names = {parts(settings)["worker"].command[-1] for _ in range(3)}
    assert len(names) == 3


def test_a_taken_port_is_named_with_the_option_that_chooses_another(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"port {port}, wanted for MLflow.*process {os.getpid()}.*--mlflow-port"):
            check_ports(Settings(settings.home, settings.file, prefect_port=_free(), mlflow_port=port))
        with pytest.raises(UserError, match=rf"port {port}, wanted for Prefect.*--prefect-port"):
            check_ports(Settings(settings.home, settings.file, prefect_port=port, mlflow_port=_free()))
    check_ports(Settings(settings.home, settings.file, prefect_port=port, mlflow_port=_free()))


def test_addresses_that_a_killed_supervisor_left_behind_are_not_believed(settings: Settings) -> None:
    home = settings.home
    auth = ensure_auth_string(home)
    services = services_of(settings, os.getpid())
    write_address(home, services)
    assert running(home) is None
    with pid_file(home).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert running(home) == services
        assert services.auth_string == auth
    assert running(home) is None
    assert auth not in (home / "services.json").read_text()
    assert json.loads((home / "services.json").read_text())["pid"] == os.getpid()


def test_links_have_the_public_address_and_programs_here_the_one_of_loopback(settings: Settings) -> None:
    public = replace(settings, public_url=public_address("https://draft.example/"))
    services = services_of(public, 1)
    home = public.home
    ensure_auth_string(home)
    write_address(home, services)
    with pid_file(home).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert report_address(home, "abc") == "https://draft.example/reports/abc/"
        assert mlflow_address(home) == "https://draft.example/mlflow"
    assert (services.pages, services.prefect_pages) == ("https://draft.example", "https://draft.example/v2")
    assert client_environment(services)["PREFECT_API_URL"] == "http://127.0.0.1:14999/api"
    assert client_environment(services)["PREFECT_UI_URL"] == "https://draft.example/v2", "in links of notifications"
    prefect = parts(public)["prefect"].environment
    assert prefect["PREFECT_UI_URL"] == "https://draft.example/v2"
    assert prefect["DRAFTSMITH_PUBLIC_URL"] == "https://draft.example"
    assert parts(settings)["prefect"].environment["PREFECT_UI_URL"] == "http://127.0.0.1:14999/v2"
    for wrong in ("draft.example", "ftp://draft.example", "https://draft.example/path", "https://a:b@draft.example"):
        with pytest.raises(UserError, match="a scheme and a host alone"):
            public_address(wrong)


def test_a_worker_elsewhere_links_to_pages_by_the_addresses_of_its_environment(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def links() -> tuple[str, str]:
        return mlflow_address(settings.home), report_address(settings.home, "abc")

    for name in ("DRAFTSMITH_PUBLIC_URL", MLFLOW_PAGES, "DRAFTSMITH_STORE"):
        monkeypatch.delenv(name, raising=False)
    assert links() == ("", "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    assert links() == ("http://mlflow:5000", "")
    monkeypatch.setenv(MLFLOW_PAGES, "http://127.0.0.1:5000")
    assert links() == ("http://127.0.0.1:5000", ""), "without a shared store no server has its reports"
    monkeypatch.setenv("DRAFTSMITH_STORE", "s3://bucket/store")
    assert links() == ("http://127.0.0.1:5000", "http://127.0.0.1:5000/reports/abc/")
    monkeypatch.setenv("DRAFTSMITH_PUBLIC_URL", "https://draft.example/")
    assert links() == ("https://draft.example/mlflow", "https://draft.example/reports/abc/")


def test_a_client_is_told_where_and_with_which_password() -> None:
    services = Services("http://127.0.0.1:1/api", "http://127.0.0.1:1", "http://127.0.0.1:2", "a:b", "draftsmith", 1)
    found = client_environment(services)
    assert found["PREFECT_API_URL"] == "http://127.0.0.1:1/api"
    assert found["PREFECT_API_AUTH_STRING"] == "a:b"
    assert "MLFLOW_TRACKING_URI" not in found


def _free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])
