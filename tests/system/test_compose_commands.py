"""deploy/compose.yaml at work without Docker: the very commands of its services, from the first start to a restore.

PostgreSQL is Debian's and the object store moto's. MinIO's own programs (its server, `mc`) are not run.
"""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from behind_caddy import HOST, OFFERED, answered, behind_caddy
from compose_services import FOLDER, ComposeServices, compose_services
from object_store import ObjectStore, object_store
from postgres import Postgres, postgres, program
from served_home import ENDED, free_port
from tiny_pipeline import main_job
from tiny_targets import make_tiny_target

from flows.services.client import PrefectApi

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]
GIVEN = {
    "POSTGRES_PASSWORD": "LettersAndDigits1",
    "PREFECT_PASSWORD": "LettersAndDigits2",
    "S3_ACCESS_KEY": "ada",
    "S3_SECRET_KEY": "LettersAndDigits3",
}
OURS = ("prefect", "mlflow", "worker", "watch", "reconcile")


@dataclass(frozen=True)
class Team:
    """The services, the database and the objects below them, and the port of the proxy before them."""

    services: ComposeServices
    database: Postgres
    objects: ObjectStore
    port: int

    @property
    def api(self) -> PrefectApi:
        """A client of Prefect's server, at its own port."""
        return PrefectApi(
            f"http://127.0.0.1:{self.services.ports['prefect']}/api", f"draftsmith:{GIVEN['PREFECT_PASSWORD']}"
        )

    def get(self, address: str) -> str:
        """What a person gets at a public address; it must be a page."""
        place = f"https://{HOST}:{self.port}"
        assert address.startswith(place), address
        asked = {**OFFERED, "Accept": "text/html, */*"}
        status, text = answered(self.port, "GET", address.removeprefix(place).partition("#")[0], asked)
        assert status == 200, f"{address}: {status} {text[:300]}"
        return text


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    folder, port = tmp_path_factory.mktemp("compose"), free_port()
    job = main_job(make_tiny_target("llama", folder / "model"))
    job = job.with_step_keys("draft", {"matrix": {"method": ["mtp"]}})  # one is enough for a page and a version
    job = job.with_setting("end_to_end", seconds=1, num_processes=1)
    (folder / "pipelines.yaml").write_text(job.text, encoding="utf-8")
    given = {**GIVEN, "DRAFTSMITH_PUBLIC_URL": f"https://{HOST}:{port}"}
    with postgres(GIVEN["POSTGRES_PASSWORD"]) as database, object_store() as objects:
        places = {"postgres:5432": f"127.0.0.1:{database.port}", "s3:9000": objects.endpoint.removeprefix("http://")}
        with compose_services(folder, given, places, [Path(program("pg_dump")).parent]) as services:
            for statement in re.findall(r"^CREATE .+;", (FOLDER / "databases.sql").read_text(), re.MULTILINE):
                database.ask("postgres", statement)
            services.until_healthy("postgres")
            _, bucket = services.command("bucket")[-1].split("/")
            objects.client().create_bucket(Bucket=bucket)
            services.start(*OURS)
            ports = (services.ports["prefect"], services.ports["mlflow"])
            with behind_caddy(folder, ports, f"draftsmith:{GIVEN['PREFECT_PASSWORD']}", port):
                yield Team(services, database, objects, port)


@dataclass(frozen=True)
class Finished:
    """A run that somebody started on Prefect's page: Prefect's id, and the links of its card by their labels."""

    flow_run: str
    links: dict[str, str]


@pytest.fixture(scope="module")
def finished(team: Team) -> Finished:
    (deployment,) = team.api.post("/deployments/filter", {"deployments": {"name": {"any_": ["tiny"]}}})
    run = str(team.api.post(f"/deployments/{deployment['id']}/create_flow_run", {})["id"])
    deadline = time.monotonic() + 1500
    while (state := team.api.get(f"/flow_runs/{run}")["state"])["type"] not in ENDED:
        assert time.monotonic() < deadline, f"{state}\n{team.services.said('worker')}"
        time.sleep(0.5)
    assert state["type"] == "COMPLETED", f"{state}\n{team.services.said('worker')}"
    (card,) = team.api.post("/artifacts/filter", {"flow_runs": {"id": {"any_": [run]}}})
    assert "registered model version 1" in card["data"], card["data"]
    return Finished(run, dict(re.findall(r"\[([^]]+)\]\((http[^)]+)\)", card["data"])))


def test_links_of_the_verdict_open_at_the_public_address(team: Team, finished: Finished) -> None:
    assert set(finished.links) == {"the report", "numbers, charts and evidence in MLflow"}
    report = team.get(finished.links["the report"])
    assert "<title>" in report
    page = finished.links["numbers, charts and evidence in MLflow"]
    team.get(page)
    mlflow, run = re.sub(r"#.*", "", page), page.rpartition("/")[2]
    assert '"FINISHED"' in team.get(f"{mlflow}api/2.0/mlflow/runs/get?run_id={run}")
    assert team.get(f"{mlflow}get-artifact?path=report/report/index.html&run_uuid={run}") == report, "from the bucket"


def test_the_dashboard_has_the_run_its_report_and_its_page(team: Team, finished: Finished) -> None:
    place = f"https://{HOST}:{team.port}"
    seen = team.get(f"{place}/dashboard/")
    key = finished.links["the report"].removeprefix(f"{place}/reports/").rstrip("/")
    links = (f"/dashboard/reports/{key}/index.html", f"/v2/runs/flow-run/{finished.flow_run}")
    assert [link for link in links if f'"{link}"' not in seen] == []
    for link in links:
        team.get(place + link)


@pytest.mark.parametrize(
    ("name", "path"),
    [("prefect", "/api/flows/x"), ("prefect", "/dashboard/"), ("mlflow", "/"), ("mlflow", "/reports/x/")],
)
def test_a_server_called_by_its_name_shows_nothing_without_the_password(team: Team, name: str, path: str) -> None:
    asked = urllib.request.Request(f"http://127.0.0.1:{team.services.ports[name]}{path}", headers={"Host": name})
    with pytest.raises(urllib.error.HTTPError, match="401"):  # 400: it does not know the name
        urllib.request.urlopen(asked, timeout=300)


def test_what_the_backup_took_stands_again_after_a_restore(team: Team, finished: Finished) -> None:
    """One database is lost whole, the other has lost its rows; the servers then start on both."""
    team.services.run("backup-databases")
    team.services.stop(*reversed(OURS))
    team.database.ask("postgres", "DROP DATABASE mlflow")
    team.database.ask("prefect", "DELETE FROM flow_run")
    team.services.run("restore-databases")
    team.services.start("prefect", "mlflow")
    assert team.api.get(f"/flow_runs/{finished.flow_run}")["state"]["type"] == "COMPLETED"
    page = finished.links["numbers, charts and evidence in MLflow"]
    run = page.rpartition("/")[2]
    assert '"FINISHED"' in team.get(re.sub(r"#.*", "", page) + f"api/2.0/mlflow/runs/get?run_id={run}")
