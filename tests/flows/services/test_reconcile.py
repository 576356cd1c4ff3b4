"""Whose heart still beats is not called dead, however seldom it beats; whose heart has stopped is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from flows.services import reconcile as service_reconcile
from flows.services.client import HEARTBEAT_S, PREFECTS_HEARTBEAT_S, QUIET, WORK_POOL, Services, client_environment
from flows.services.reconcile import Reconciler

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Server:
    """What the reconciler asks Prefect's server, about one run whose heart beats every so many seconds."""

    def __init__(self, pool: str | None, every_s: float, stops_after_s: float) -> None:
        self.now, self.every_s, self.stops_after_s = 0.0, every_s, stops_after_s
        state = {"type": "RUNNING", "name": "Running", "timestamp": BEGAN.isoformat(), "id": "s"}
        self.run = {"id": "r", "name": "ada", "work_pool_name": pool, "state": state}
        self.crashed_at: float | None = None

    def get(self, path: str) -> Any:
        return self.run

    def post(self, path: str, body: Any) -> Any:
        if path == "/flow_runs/filter":
            wanted = body["flow_runs"].get("state", {}).get("type", {}).get("any_", [])
            return [self.run] if "RUNNING" in wanted and self.crashed_at is None else []
        if path == "/events/filter":
            if not self.every_s:
                return {"events": []}
            beat = min(self.now, self.stops_after_s) // self.every_s * self.every_s
            return {"events": [{"occurred": (BEGAN + timedelta(seconds=beat)).isoformat()}]}
        if path.endswith("/set_state"):
            assert body["state"]["type"] == "CRASHED"
            self.crashed_at = self.now
            return {"status": "ACCEPT"}
        return []


def crashed_at(
    server: Server, until_s: float, monkeypatch: pytest.MonkeyPatch, *, has_worker: bool = True
) -> float | None:
    """When it is called dead within this time, with a look every five seconds."""
    monkeypatch.setattr(service_reconcile, "processes_by", lambda variable: {})
    monkeypatch.setattr(service_reconcile, "time", SimpleNamespace(monotonic=lambda: server.now))
    monkeypatch.setattr(
        service_reconcile,
        "seconds_since",
        lambda moment: server.now - (datetime.fromisoformat(moment) - BEGAN).total_seconds(),
    )
    reconciler = Reconciler(server, has_worker)  # type: ignore[arg-type]
    while server.now < until_s:
        reconciler.tick(None)
        server.now += 5.0
    return server.crashed_at


@pytest.mark.parametrize(("pool", "every_s"), [(WORK_POOL, HEARTBEAT_S), (None, PREFECTS_HEARTBEAT_S), ("theirs", 30)])
def test_a_run_that_gives_signs_of_life_is_left_alone(
    pool: str | None, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert crashed_at(Server(pool, every_s, stops_after_s=1e9), 3600, monkeypatch) is None


@pytest.mark.parametrize(("pool", "within_s"), [(WORK_POOL, 150), (None, 450)])
def test_a_run_that_has_fallen_silent_gets_its_end(
    pool: str | None, within_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = crashed_at(Server(pool, 30, stops_after_s=600), 3600, monkeypatch)
    assert at is not None and 600 < at < 600 + within_s


@pytest.mark.parametrize(
    ("pool", "every_s"), [(WORK_POOL, PREFECTS_HEARTBEAT_S), (None, PREFECTS_HEARTBEAT_S), ("theirs", 0)]
)
def test_without_a_worker_here_runs_may_beat_as_seldom_as_prefect_has_it(
    pool: str | None, every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert crashed_at(Server(pool, every_s, stops_after_s=1e9), 3600, monkeypatch, has_worker=False) is None


@pytest.mark.parametrize("every_s", [HEARTBEAT_S, PREFECTS_HEARTBEAT_S, 0])
def test_without_a_worker_here_a_silent_run_gets_its_end_even_if_it_never_beat(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = crashed_at(Server(WORK_POOL, every_s, stops_after_s=600), 3600, monkeypatch, has_worker=False)
    assert at is not None and (600 if every_s else 360) < at < 600 + 450


def test_every_run_of_ours_beats_as_often_as_it_is_asked_whoever_named_the_server() -> None:
    services = Services("http://127.0.0.1:4200/api", "", "", "", WORK_POOL, 1)
    for environment in (QUIET, client_environment(services)):
        assert float(environment["PREFECT_FLOWS_HEARTBEAT_FREQUENCY"]) == HEARTBEAT_S
