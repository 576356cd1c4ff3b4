"""Reports are served from the store as they were sealed, alone in a sandbox, and nothing else of the home is."""

from __future__ import annotations

from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from flows.services.report_pages import ReportPages
from flows.services.server_guard import OwnConnectionsOnly
from storage.artifacts.store import Store


@pytest.fixture
def client(tmp_path: Path) -> TestClient:
    store = Store(tmp_path)
    for key, kind in (("a" * 64, "Page"), ("b" * 64, "Draft")):
        out, _ = store.open_staging(key)
        (out / "charts").mkdir()
        (out / "index.html").write_text("<title>a report</title>")
        (out / "charts" / "speedup.svg").write_text("<svg/>")
        store.commit(key, kind, {}, {"run_id": "r"})
    return TestClient(OwnConnectionsOnly(ReportPages(Starlette(), tmp_path)))


@pytest.mark.parametrize("file", ["", "index.html", "charts/speedup.svg"])
def test_a_page_and_its_charts_are_served_in_a_sandbox(client: TestClient, file: str) -> None:
    answer = client.get(f"/reports/{'a' * 64}/{file}")
    assert answer.status_code == 200 and answer.text in ("<title>a report</title>", "<svg/>")
    (rule,) = answer.headers.get_list("content-security-policy")
    assert rule.startswith("sandbox") and "default-src 'none'" in rule


@pytest.mark.parametrize(
    "path", [f"{'b' * 64}/", f"{'c' * 64}/", f"{'a' * 64}/artifact.json", f"{'a' * 64}/%2e%2e/x", "..%2f..%2fauth", ""]
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/reports/{path}").status_code == 404


def test_a_page_of_another_machine_comes_from_the_shared_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_STORE", (tmp_path / "shared").as_uri())
    worker, key = Store(tmp_path / "worker"), "d" * 64
    out, _ = worker.open_staging(key)
    (out / "index.html").write_text("<title>a report</title>")
    worker.commit(key, "Page", {}, {"run_id": "r"})
    served = TestClient(ReportPages(Starlette(), tmp_path / "server"))
    assert served.get(f"/reports/{key}/").text == "<title>a report</title>"
    assert served.get(f"/reports/{'e' * 64}/").status_code == 404


def test_other_pages_may_ask_their_own_server_alone(client: TestClient) -> None:
    assert client.get("/elsewhere").headers["content-security-policy"] == "connect-src 'self' data: blob:"
