"""`draftsmith doctor`: looks for what breaks the servers without an error message.

It checks for versions that Prefect allows and cannot run with, a full disk, databases of another version, ports and
processes of a killed supervisor, and damaged files; and with a running server, that every schedule has its next run. It
changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.version import Version

from components.contract import UserError
from components.machine import c_compiler
from flows.services.client import (
    ApiError,
    PrefectApi,
    Services,
    auth_file,
    fetch,
    mlflow_headers,
    pid_file,
    read_auth_string,
    running,
    worker_is_online,
)
from flows.services.processes import Settings, check_ports
from flows.services.supervisor import processes_of_home
from storage.artifacts.store import Store
from storage.home import read_identity, settle
from storage.registry.tracking import database_fault
from storage.repair import find_damage, repair

BREAKS_SERVER = {
    "fastapi": ("0.151", "turns null into an error and breaks deploying; from 0.155 Prefect's server does not start"),
    "sqlalchemy": ("2.1", "Prefect's scheduler fails without a word: no scheduled run is ever made"),
}
LITTLE_DISK, NO_DISK = 5 << 30, 1 << 30
SCHEDULED_WITHIN_S = 90.0  # the scheduler looks every 60 s, at what was just changed every 5 s
SCRIPTS = {"prefect": "server/database/_migrations/versions/sqlite", "mlflow": "store/db_migrations/versions"}


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    verdict: Literal["ok", "note", "bad"]
    what: str
    remedy: str = ""


def check_versions() -> None:
    """Raise UserError where an installed version breaks the servers."""
    for finding in _check_versions():
        if finding.verdict == "bad":
            raise UserError(f"{finding.what}; {finding.remedy}")


def examine(home: Path) -> Iterator[Finding]:
    """Yield the findings of all checks of this home."""
    yield from _check_versions()
    yield _check_torch()
    yield _check_compiler()
    yield _check_disk(home)
    yield _check_identity(home)
    yield from _check_databases(home)
    yield from _check_damages(home)
    yield _check_password(home)
    services = running(home)
    yield from _check_leftovers(home, services)
    if services is None:
        yield _check_ports(home)
    else:
        yield from _check_servers(services)


def mend(home: Path) -> list[str]:
    """Set aside what is damaged in a home and make its history anew; a line for each thing that was done."""
    return repair(home, Store()) or ["nothing to repair"]


def _check_versions() -> Iterator[Finding]:
    for name, (too_new, problem) in BREAKS_SERVER.items():
        version = importlib.metadata.version(name)
        if Version(version) >= Version(too_new):
            yield Finding("bad", f"{name} {version}: {problem}", f'pip install "{name}<{too_new}"')
        else:
            yield Finding("ok", f"{name} {version}")
    for name in ("prefect", "mlflow", "duckdb"):
        yield Finding("ok", f"{name} {importlib.metadata.version(name)}")


def _check_torch() -> Finding:
    version = importlib.metadata.version("torch")
    cuda = (
        any(dist.name.lower().startswith("nvidia-") for dist in importlib.metadata.distributions()) or "+cu" in version
    )
    gpu = Path("/dev/nvidia0").exists()
    if gpu and not cuda:
        return Finding(
            "note", f"torch {version} is built for CPUs, but there is a GPU", "make clean, then TORCH_INDEX=any make"
        )
    if cuda and not gpu:
        return Finding("note", f"torch {version} is built for CUDA, but there is no GPU: gigabytes that nothing uses")
    return Finding("ok", f"torch {version}, built for {'CUDA' if cuda else 'CPUs'}, as this machine needs it")


def _check_compiler() -> Finding:
    compiler = c_compiler()
    if compiler is None:
        what = "no C compiler (CC or cc): on a CPU, targets and drafters run on PyTorch's kernels alone"
        return Finding("note", what, "install gcc: verifying drafts takes up to a quarter of the time with it")
    return Finding("ok", f"C compiler {compiler}, which makes decoding on a CPU quicker")


def _check_disk(home: Path) -> Finding:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    what = f"{free / (1 << 30):.1f} GiB free at {home}"
    if free < LITTLE_DISK:
        return Finding("bad" if free < NO_DISK else "note", what, "features and checkpoints take gigabytes: free some")
    return Finding("ok", what)


def _check_identity(home: Path) -> Finding:
    """Every command leads a home that was copied or moved to its new place; one that cannot be written stays behind."""
    identity = read_identity(home)
    if identity is None:
        return Finding("ok", f"{home}: no identity yet: the first run gives it one")
    if settle(home):
        remedy = "make it writable: the next command then leads its addresses here"
        return Finding("bad", f"{home} is home {identity.home_id[:8]} of {identity.path}, and was not led here", remedy)
    return Finding("ok", f"home {identity.home_id[:8]} is at its place")


def _check_databases(home: Path) -> Iterator[Finding]:
    for name, file in (("prefect", home / "prefect" / "prefect.db"), ("mlflow", home / "mlflow" / "mlflow.db")):
        if not file.exists():
            yield Finding("ok", f"{name}'s database: not made yet")
            continue
        if database_fault(file, whole=True):
            continue  # named with the other damages
        try:
            yield _check_database(name, file)
        except sqlite3.Error as error:
            yield Finding("bad", f"{name}'s database cannot be read: {error}", f"set {file} aside")


def _check_database(name: str, file: Path) -> Finding:
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True, timeout=10)) as database:
        at = {str(row[0]) for row in database.execute("SELECT version_num FROM alembic_version")}
        half = [
            row[0]
            for row in database.execute(
                "SELECT name FROM sqlite_master WHERE name LIKE '\\_alembic\\_tmp%' ESCAPE '\\'"
            )
        ]
    known_revisions, newest = revisions(name)
    if half:
        return Finding(
            "bad", f"{name}'s database was left in the middle of a migration: {half[0]}", f"set {file} aside"
        )
    if not at <= known_revisions:
        version = importlib.metadata.version(name)
        return Finding(
            "bad",
            f"{name}'s database was made by a newer version than {version}",
            f"upgrade {name}, or set {file} aside",
        )
    if at != newest:
        return Finding("note", f"{name}'s database is from an older version", "the next draftsmith up upgrades it")
    return Finding("ok", f"{name}'s database is up to date")


def revisions(package: str) -> tuple[set[str], set[str]]:
    """The revisions of all migrations of the installed version, and the newest ones; the package is not imported."""
    spec = find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is installed"
    present: set[str] = set()
    before: set[str] = set()
    for script in (Path(spec.origin).parent / SCRIPTS[package]).glob("*.py"):
        text = script.read_text(encoding="utf-8")
        for field, names in (("revision", present), ("down_revision", before)):
            if (line := re.search(rf"^{field}\b[^=\n]*=(.*)$", text, re.MULTILINE)) is not None:
                names.update(re.findall(r"[\"'](\w+)[\"']", line.group(1)))
    return present, present - before


def _check_damages(home: Path) -> Iterator[Finding]:
    """Read every file of the home: a failing disk changes neither time nor size."""

    store, is_whole = Store(home), True
    for damage in find_damage(home, store):
        is_whole = False
        remedy = "draftsmith resync" if damage.kind == "version" else "draftsmith doctor --repair"
        yield Finding("bad", f"{damage.kind}: {damage.name[:40]} {damage.fault}", remedy)
    if is_whole:
        yield Finding("ok", f"{len(store.keys())} artifacts, the history, journals and the promotion log are whole")


def _check_password(home: Path) -> Finding:
    file = auth_file(home)
    if not file.exists():
        return Finding("ok", "no password yet: draftsmith up makes one")
    try:
        read_auth_string(home)
    except UserError as error:
        return Finding("bad", *str(error).split("; ", 1))
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & 0o077:
        return Finding("bad", f"{file} can be read by others (mode {mode:o})", f"chmod 600 {file}")
    return Finding("ok", "only you can read Prefect's password")


def _check_leftovers(home: Path, services: Services | None) -> Iterator[Finding]:
    if services is None:
        leftovers = processes_of_home(home)
        if leftovers:
            pids = ", ".join(str(process.pid) for process in leftovers)
            yield Finding("bad", f"left over from a supervisor that was killed: processes {pids}", "draftsmith down")
        file = pid_file(home)
        if file.is_file() and file.read_bytes().strip():
            yield Finding("note", f"{file} is of a supervisor that was killed", "harmless: draftsmith up replaces it")
    else:
        yield Finding("ok", f"up, supervised by process {services.pid}")


def _check_ports(home: Path) -> Finding:
    try:
        check_ports(Settings(home, Path("pipelines.yaml")))
    except UserError as error:
        return Finding("note", str(error))
    return Finding("ok", "the usual ports are free")


def _check_servers(services: Services) -> Iterator[Finding]:
    api = PrefectApi(services.prefect_api_url, services.auth_string)
    try:
        yield Finding("ok", f"Prefect's server answers: version {api.get('/admin/version')}")
        if worker_is_online(api, services.work_pool):
            yield Finding("ok", f"a worker takes runs from pool {services.work_pool}")
        else:
            yield Finding("bad", f"no worker takes runs from pool {services.work_pool}", "see logs/services/worker.log")
        yield _check_strangers(services)
        yield from _check_schedules(api)
    except ApiError as error:
        yield Finding("bad", f"Prefect's server does not do its work: {error}", "see logs/services/prefect.log")
    try:
        version = fetch(services.mlflow_url + "/version", headers=mlflow_headers(services))
        yield Finding("ok", f"MLflow's server answers: version {version}")
    except ApiError as error:
        yield Finding("bad", f"MLflow's server does not answer: {error}", "see logs/services/mlflow.log")


def _check_strangers(services: Services) -> Finding:
    pages = {"Prefect's": (f"{services.prefect_api_url}/health", f"{services.prefect_api_url}/admin/version")}
    if services.mlflow_is_ours:
        pages["MLflow's"] = (f"{services.mlflow_url}/health", f"{services.mlflow_url}/version")
    for server, (open_url, guarded_url) in pages.items():
        stranger, nameless = _http_status(open_url, {"Host": "stranger.example"}), _http_status(guarded_url, {})
        if stranger not in (400, 403) or nameless != 401:
            return Finding(
                "bad", f"{server} server lets strangers in (foreign host: {stranger}, no password: {nameless})"
            )
    return Finding("ok", "the servers refuse foreign hosts, and visitors without the password")


def _http_status(url: str, headers: dict[str, str]) -> int:
    try:
        fetch(url, headers=headers)
    except ApiError as error:
        return error.status
    return 200


def _check_schedules(api: PrefectApi) -> Iterator[Finding]:
    """Check that every active schedule has its next run: with some versions the scheduler fails silently."""
    waiting = {
        str(deployment["id"]): deployment
        for deployment in api.post("/deployments/filter", {"limit": 200})
        if not deployment["paused"] and any(schedule["active"] for schedule in deployment["schedules"])
    }
    if not waiting:
        yield Finding("note", "no deployed pipeline has an active schedule: the scheduler was not tried")
    deadline = time.monotonic() + SCHEDULED_WITHIN_S
    while waiting:
        for deployment_id, deployment in list(waiting.items()):
            if (moment := _next_run(api, deployment_id)) is not None:
                yield Finding("ok", f"{deployment['name']}: next run at {moment:%Y-%m-%d %H:%M %Z}")
                del waiting[deployment_id]
        if waiting and time.monotonic() > deadline:
            for deployment in waiting.values():
                yield Finding(
                    "bad", f"{deployment['name']}: has a schedule and no scheduled run", "see logs/services/prefect.log"
                )
            return
        if waiting:
            time.sleep(1.0)


def _next_run(api: PrefectApi, deployment_id: str) -> datetime | None:
    query: dict[str, Any] = {
        "flow_runs": {"deployment_id": {"any_": [deployment_id]}, "state": {"type": {"any_": ["SCHEDULED"]}}},
        "sort": "EXPECTED_START_TIME_ASC",
        "limit": 1,
    }
    runs = api.post("/flow_runs/filter", query)
    return datetime.fromisoformat(runs[0]["expected_start_time"]) if runs else None
