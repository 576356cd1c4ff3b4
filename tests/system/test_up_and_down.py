"""`draftsmith up` on real servers: healthy, small, closed to strangers, and keeping no secret it was given."""

from __future__ import annotations

import base64
import json
import os
import signal
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from behind_caddy import HOST, behind_caddy, look_from_outside
from browser import Browser
from pipeline_builder import step
from served_home import ENDED, REAL, ServedHome, free_port, served_home
from toy_garden import GARDEN
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin, Subprotocol

from flows.services.client import PrefectApi
from flows.services.control import memory_mib
from flows.services.supervisor import processes_of_home

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]
LINKS = {  # what `status` calls them: a piece of the address, and what the page must show
    "pipelines, runs": ("/deployments", "garden"),
    "models, numbers": ("/experiments/", "garden"),
    "newest report": ("/reports/", "fern"),
    "dashboard": ("/dashboard/", "garden"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedHome]:
    with served_home(tmp_path_factory.mktemp("services")) as place:
        yield place


def answer(url: str, method: str = "GET", body: object = None, **headers: str) -> int:
    """The status of a plain request with these headers (an underscore stands for a dash)."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json", **named}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=300) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_status_and_doctor_find_everything_well(place: ServedHome) -> None:
    status = place.draftsmith("status")
    assert status.returncode == 0, status.stdout + status.stderr
    assert "takes runs from pool draftsmith" in status.stdout
    doctor = place.draftsmith("doctor")
    assert doctor.returncode == 0, doctor.stdout + doctor.stderr
    assert "corpus: next run at" in doctor.stdout, "a cron deployment must get its SCHEDULED run"
    assert "BAD" not in doctor.stdout
    for name in ("prefect", "mlflow"):
        assert f"{name}'s database is up to date" in doctor.stdout


def test_all_of_it_takes_less_than_a_gigabyte(place: ServedHome) -> None:
    assert 200 < memory_mib(place.home) < 1000


def test_a_second_up_says_where_the_first_is_and_another_home_needs_another_port(place: ServedHome) -> None:
    again = place.up()
    assert again.returncode == 0
    assert f"already up, as process {place.services.pid}" in again.stdout
    elsewhere = ServedHome(place.home.parent / "elsewhere", place.file, place.ports, "")
    refused = elsewhere.up()
    assert refused.returncode == 2
    assert f"port {place.ports[0]}" in refused.stderr and "--prefect-port" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1


def test_nothing_listens_beyond_loopback(place: ServedHome) -> None:
    listening = []
    for process in [*processes_of_home(place.home), psutil.Process(place.services.pid)]:
        with suppress(psutil.NoSuchProcess):  # of a run that is just ending
            found = process.net_connections("inet")
            listening += [connection for connection in found if connection.status == psutil.CONN_LISTEN]
    assert {connection.laddr.port for connection in listening} >= set(place.ports)
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}


def test_strangers_are_refused(place: ServedHome) -> None:
    url, auth = place.services.prefect_api_url, place.services.auth_string
    basic = "Basic " + base64.b64encode(auth.encode()).decode()
    listing = f"{url}/flow_runs/filter"
    assert answer(f"{url}/health", Host="stranger.example") == 400
    assert answer(f"{url}/health", Host=f"localhost:{place.ports[0]}") == 200
    assert answer(listing, "POST", {}) in (401, 403)
    assert answer(f"{url}/admin/version") == 401
    assert answer(f"{url}/admin/version", Authorization="Basic " + base64.b64encode(b"draftsmith:x").decode()) == 401
    assert answer(f"{url}/admin/version", Authorization=basic) == 200
    assert answer(listing, "POST", {}, Authorization=basic) == 403, "a change needs the token against forged requests"
    api = PrefectApi(url, auth)
    assert api.post("/flow_runs/filter", {}) is not None
    token = {"Prefect_Csrf_Client": api._client, "Prefect_Csrf_Token": api._token, "Authorization": basic}
    assert answer(listing, "POST", {}, **token) == 200
    assert answer(listing, "POST", {}, Origin="http://stranger.example", **token) == 403
    assert answer(listing, "POST", {}, Origin=place.services.prefect_ui_url, **token) == 200


def test_mlflow_refuses_strangers_too(place: ServedHome) -> None:
    url = place.services.mlflow_url
    basic = "Basic " + base64.b64encode(place.services.auth_string.encode()).decode()
    assert answer(f"{url}/", Host="stranger.example", Authorization=basic) == 400
    search, most = f"{url}/api/2.0/mlflow/experiments/search", {"max_results": 1}
    assert answer(search, "POST", most) == 401
    assert answer(search, "POST", most, Authorization="Basic " + base64.b64encode(b"draftsmith:x").decode()) == 401
    assert answer(search, "POST", most, Authorization=basic) == 200
    assert answer(search, "POST", most, Authorization=basic, Origin="http://stranger.example") == 403
    assert answer(search, "POST", most, Authorization=basic, Origin="http://localhost:9") == 403, "another local port"
    create = f"{url}/ajax-api/2.0/mlflow/experiments/create"
    outside = {"name": "outside", "artifact_location": f"file://{place.home}"}
    assert answer(create, "POST", outside, Authorization=basic) == 403
    assert answer(create, "POST", {"name": "inside"}, Authorization=basic, Origin=url) == 200
    request = urllib.request.Request(f"{url}/version", headers={"Origin": "http://localhost:9", "Authorization": basic})
    with urllib.request.urlopen(request, timeout=300) as found:
        assert found.headers.get("Access-Control-Allow-Origin") is None


def test_searches_of_runs_in_mlflow_side_by_side_are_all_answered(place: ServedHome) -> None:
    basic = "Basic " + base64.b64encode(place.services.auth_string.encode()).decode()
    url, every = f"{place.services.mlflow_url}/api/2.0/mlflow/runs/search", {"experiment_ids": ["0"]}
    with ThreadPoolExecutor(8) as people:
        asked = [people.submit(answer, url, "POST", every, Authorization=basic) for _ in range(40)]
        assert {one.result() for one in asked} == {200}


def test_a_foreign_page_opens_no_web_socket(place: ServedHome) -> None:
    url = place.services.prefect_api_url.replace("http:", "ws:") + "/events/out"
    protocol = [Subprotocol("prefect")]
    with pytest.raises(InvalidStatus, match="403"):
        connect(url, origin=Origin("http://stranger.example"), subprotocols=protocol, proxy=None)
    with connect(url, origin=Origin(place.services.prefect_ui_url), subprotocols=protocol, proxy=None) as socket:
        socket.send(json.dumps({"type": "auth", "token": "wrong"}))
        with pytest.raises(ConnectionClosed):
            socket.recv(timeout=120)


def test_the_browser_is_told_of_no_foreign_origin(place: ServedHome) -> None:
    request = urllib.request.Request(
        f"{place.services.prefect_api_url}/health", headers={"Origin": "http://evil.example"}
    )
    with urllib.request.urlopen(request, timeout=300) as found:
        assert found.headers.get("Access-Control-Allow-Origin") is None


def test_no_secret_is_kept_anywhere_but_in_its_file(place: ServedHome) -> None:
    """Neither the password nor a token from the environment in logs, databases, journals, MLflow or artifacts."""
    run = place.trigger("corpus", {})
    ended = place.until(run, *ENDED)
    assert ended["state"]["type"] == "COMPLETED", ended["state"]
    for database in (place.home / "prefect" / "prefect.db", place.home / "mlflow" / "mlflow.db"):
        with sqlite3.connect(database) as open_database:
            open_database.execute("PRAGMA wal_checkpoint(FULL)")
    password = place.services.auth_string.partition(":")[2]
    encoded = base64.b64encode(place.services.auth_string.encode()).decode()
    found = set()
    for file in filter(Path.is_file, place.home.rglob("*")):
        with suppress(FileNotFoundError):  # a partial file may just be renamed
            content = file.read_bytes()
            secrets = [secret for secret in (password, encoded, place.secret) if secret.encode() in content]
            found |= {f"{file.relative_to(place.home)}: {secret[:4]}..." for secret in secrets}
    assert found == {f"prefect/auth: {password[:4]}..."}
    for process in [*processes_of_home(place.home), psutil.Process(place.services.pid)]:
        with suppress(psutil.NoSuchProcess):  # the run's own, which are just ending
            assert password not in " ".join(process.cmdline())


def test_the_links_open_on_what_one_wants_and_two_runs_are_compared_in_mlflow(
    place: ServedHome, tmp_path: Path
) -> None:
    decided = replace(GARDEN, params={**GARDEN.params, "speedup": {"type": "float", "default": 1.5}})
    place.deploy_toys(decided.with_steps(depth=step("decisions.decide", speedup="${params.speedup}")).text)
    for parameters in ({"steps": 2}, {"steps": 4, "speedup": 1.62}):
        place.until(place.trigger("garden", parameters), "COMPLETED")
    said = place.draftsmith("status").stdout
    links = {what: line.split(what, 1)[1].strip() for line in said.splitlines() for what in LINKS if what in line}
    assert set(links) == set(LINKS), said
    opened = links["models, numbers"].split("/experiments/")[1].split("/")[0]
    database = sqlite3.connect(f"file:{place.home}/mlflow/mlflow.db?mode=ro", uri=True)
    names = database.execute("SELECT name FROM experiments WHERE experiment_id = ?", (opened,)).fetchall()
    assert names == [("garden",)], "not an experiment without runs"
    with Browser(tmp_path / "browser", width=1280, height=1160) as page:
        for what, (where, seen) in LINKS.items():
            assert where in links[what]
            password = (place.home / "prefect" / "auth").read_text(encoding="utf-8").strip()
            if what != "pipelines, runs":  # the browser itself asks, and remembers: an address may answer it
                page.open(links[what].partition("#")[0].replace("://", f"://{password}@", 1))
            page.open(links[what])
            if what == "pipelines, runs":
                page.fill("input", password)
                page.click("button", "Login")
            page.wait_for_text(seen)
            page.screenshot(tmp_path / f"{what.replace(' ', '-')}.png")
        compare_two_runs(page, links["models, numbers"], tmp_path / "compared.png")


def compare_two_runs(page: Browser, runs: str, picture: Path) -> None:
    """What docs/operate.md says: select the runs and press Compare; their parameters and numbers stand side by side."""
    page.open(runs)
    page.wait_for_text("1.62x")
    page.click("button", "Close")  # MLflow's assistant, which lies over the table
    page.click("input[aria-label='Select all runs']")
    page.click("button", "Compare")
    page.wait_for("location.hash.startsWith('#/compare-runs')")
    page.click("[role=button]", "Visualizations")
    for table in ("Parameters", "Metrics"):
        page.click(f"[aria-label='{table} - Show diff only']")
    page.wait_for("!document.body.innerText.includes('sunny')")  # is the same in both
    to_the_end = "document.querySelectorAll('.ReactVirtualized__Grid').forEach(e => { e.scrollTop = e.scrollHeight })"
    page.wait_for(f"({to_the_end}, document.body.innerText.includes('speedup/measured'))")  # rows come as one scrolls
    parameters, metrics = page.text().split("\nParameters\n")[-1].split("\nMetrics\n")
    assert {"speedup\t1.62\t1.5", "steps\t4\t2"} <= {line.strip() for line in parameters.splitlines()}
    assert "\n1.62\n1.5\n" in metrics.split("\nArtifacts")[0]
    page.ask("document.querySelector('h1, h2').scrollIntoView()")
    page.screenshot(picture)


def test_behind_a_proxy_then_a_dead_supervisor_leaves_nothing_and_ctrl_c_ends_all_of_the_next(tmp_path: Path) -> None:
    file, port = tmp_path / "pipelines.yaml", free_port()
    file.write_text(REAL.text, encoding="utf-8")
    fresh = ServedHome(tmp_path / "home", file, (free_port(), free_port()), "")
    up = fresh.draftsmith("up", "--detach", *fresh.options, "--public-url", f"https://{HOST}:{port}")
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"https://{HOST}:{port}/mlflow/#/experiments/" in up.stdout and "127.0.0.1" not in up.stdout
    with behind_caddy(tmp_path, fresh.ports, fresh.services.auth_string, port):
        look_from_outside(port, tmp_path)
    below = processes_of_home(fresh.home)
    assert len(below) >= 4
    os.kill(fresh.services.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(below, timeout=300)
    assert not alive, [process.cmdline() for process in alive]
    status = fresh.draftsmith("status")
    assert status.returncode == 1 and "not running" in status.stdout
    with fresh.up_in_the_foreground() as shown:
        for line in shown.stdout or ():
            if line.startswith("Ctrl-C stops everything"):
                break
        assert len(processes_of_home(fresh.home)) >= 4
        shown.send_signal(signal.SIGINT)
        rest, _ = shown.communicate(timeout=600)
    assert shown.returncode == 0 and rest.strip() == "stopped"
    assert processes_of_home(fresh.home) == []
    down = fresh.draftsmith("down")
    assert down.returncode == 0 and "nothing was running" in down.stdout
