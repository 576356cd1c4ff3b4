"""Logs journals to MLflow: a run for each pipeline run, a child run for each executed step. It can be repeated.

`Tracker.sync` compares a journal with what MLflow has and logs what is missing, so logging as the run goes, logging
after MLflow was down, and logging into an empty database are the same code. The database is made once, under a lock,
since concurrent first use destroys it. MLflow takes a second to import, so it is imported where it is first needed.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from components.contract import UserError
from components.files import flush, locked
from storage import journal
from storage.artifacts.store import RECORD_FILE, Store
from storage.home import settle
from storage.redaction import without_secrets
from storage.registry.run_page import page_of

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient as MlflowClient
else:
    MlflowClient = Any

RUN_TAG, STEP_TAG, KEY_TAG, DONE_TAG = "draftsmith.run_id", "draftsmith.step", "draftsmith.key", "draftsmith.logged"
RELEASES = "releases"  # the experiment of releases that no run of a pipeline has made; it bears the registry's mark
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_SMALL_FILES = (".json", ".md", ".html", ".yaml", ".svg", ".csv")
_PICTURES = ("charts", "tables")  # folders of a Page whose files are shown beside it
_EVIDENCE = "evidence"  # the folder of the tables of a pipeline run
_SMALL_BYTES = 4 << 20
CHECKED_BYTES = 64 << 20  # of a database: read within a tenth of a second


class ServerDown(UserError):
    """MLflow's server, which $MLFLOW_TRACKING_URI names, does not answer or refuses."""

    def __init__(self, uri: str, error: Exception) -> None:
        message = " ".join(str(error).split())
        super().__init__(without_secrets(f"mlflow at {uri} does not answer: {message[:300]}"))


class DamagedDatabase(ServerDown):
    """The MLflow database of this home cannot be used; it can be made anew."""

    def __init__(self, file: Path, fault: str) -> None:
        UserError.__init__(
            self,
            f"{file}: {' '.join(fault.split())[:200]}; `draftsmith doctor --repair` sets it aside, and "
            "`draftsmith resync` makes it anew from the journals, releases and promotions",
        )


def database_fault(file: Path, *, whole: bool = False) -> str:
    """What is wrong with a file of SQLite, or ''.

    whole: compare its indexes with its tables too; else only the form of a file larger than CHECKED_BYTES is checked.
    """
    if not file.is_file():
        return "is no file"
    if file.stat().st_size == 0 and not _journals_of(file):
        return "is empty"
    try:
        with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as database:
            database.execute("BEGIN")  # while it lasts nobody writes into the file, but for a checkpoint of a WAL
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if missing := _missing_bytes(file):
                return f"is cut short by {missing} bytes"
            if whole or file.stat().st_size <= CHECKED_BYTES:
                check = "integrity_check" if whole else "quick_check"
                answer = str(database.execute(f"PRAGMA {check}(1)").fetchone()[0])
                return "" if answer == "ok" else f"is damaged ({answer})"
    except sqlite3.OperationalError as error:  # another process holds it, or its disk does not answer now
        return "" if re.search("locked|unable to open", str(error)) else f"cannot be read ({error})"
    except sqlite3.Error as error:
        return f"cannot be read ({error})"
    return ""


def _journals_of(file: Path) -> list[Path]:
    """The files beside a database while it is written: another process may be making it just now."""
    return [path for ending in ("-wal", "-journal") if (path := file.with_name(file.name + ending)).exists()]


def _missing_bytes(file: Path) -> int:
    """How much shorter a file of SQLite is than its first page says; 0 for one that keeps a write-ahead log."""
    with file.open("rb") as stream:
        head = stream.read(32)
    page, is_wal, pages = int.from_bytes(head[16:18]), head[18:19] == b"\2", int.from_bytes(head[28:32])
    expected = pages * (65536 if page == 1 else page)
    return 0 if is_wal else max(0, expected - file.stat().st_size)


def tracking_uri(home: Path) -> str:
    """$MLFLOW_TRACKING_URI, else the SQLite database of this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(home / 'mlflow' / 'mlflow.db').absolute()}"


@contextmanager
def mlflow_lock(home: Path, name: str) -> Iterator[None]:
    """Hold a lock beside MLflow's database."""
    directory = home / "mlflow"
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory / f"{name}.lock"):
        yield


def ensure_database(home: Path) -> str:
    """Make or upgrade this home's MLflow database, once, whoever comes first; returns its URI.

    A server named by $MLFLOW_TRACKING_URI looks after its own database.
    """
    _quieten()
    uri = tracking_uri(home)
    if not uses_home_database(home):
        return uri
    file = home / "mlflow" / "mlflow.db"
    ready = home / "mlflow" / f"ready-{installed_version('mlflow')}"
    with mlflow_lock(home, "create"):
        if file.exists() and any(file.parent.glob("ready-*")) and (fault := database_fault(file)):
            raise DamagedDatabase(file, fault)
        if not (ready.is_file() and file.is_file()):
            _make_database(file, whole=any(file.parent.glob("ready-*")))
            ready.touch()
        if line := settle(home):
            logging.getLogger(__name__).warning(line)
    return uri


def _make_database(file: Path, *, whole: bool) -> None:
    """Make an MLflow database, or upgrade the one that is there, beside its file: a kill in between ruins nothing.

    whole: the one that is there was finished once. One that was not is what a kill has left of a first start, and is
    moved aside.
    """
    partial = file.with_name("building.db")
    for leftover in file.parent.glob("building.db*"):  # by a process that died
        leftover.unlink()
    if file.is_file() and not whole:
        file.rename(file.with_name(f"mlflow.db.broken-{time.time_ns()}"))
    if file.is_file():
        with closing(sqlite3.connect(file)) as present, closing(sqlite3.connect(partial)) as copy:
            present.backup(copy)
    upgrade_database(f"sqlite:///{partial.absolute()}")
    flush(partial)
    os.replace(partial, file)
    flush(file.parent)


def upgrade_database(uri: str) -> None:
    """Make an MLflow database, or bring its schema up to date. Hold a lock: two at once destroy it."""
    import mlflow.db

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    assert mlflow.db.upgrade.callback is not None
    mlflow.db.upgrade.callback(uri)  # what `mlflow db upgrade URI` runs; its argument would show the password


def prepare_database(uri: str) -> None:
    """Upgrade a database of several servers, with the first experiment, which two at once would both make and fail."""
    upgrade_database(uri)
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(uri, "mlflow-artifacts:/")


def has_database(home: Path) -> bool:
    """Whether MLflow can be queried: on a server that was named, or in the database of this home. Makes nothing."""
    return not uses_home_database(home) or (home / "mlflow" / "mlflow.db").is_file()


def uses_home_database(home: Path) -> bool:
    """Whether MLflow's tracking URI is the database of this home."""
    return tracking_uri(home) == f"sqlite:///{(home / 'mlflow' / 'mlflow.db').absolute()}"


def open_client(home: Path) -> MlflowClient:
    """A client for tracking and registry.

    Raises:
        ServerDown: a server was named and cannot be asked.
    """
    uri = ensure_database(home)
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # It raises what it logs as an error; the logged traceback would stand in the middle of our progress.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        client.search_experiments(max_results=1)
    except mlflow_error() as error:
        if uri.startswith("http"):
            raise ServerDown(uri, error) from error
        if uses_home_database(home):
            raise DamagedDatabase(home / "mlflow" / "mlflow.db", str(error)) from error
        raise
    return client


def mlflow_error() -> type[MlflowException]:
    """The class of MLflow's errors, for `except`: it is imported once something was raised."""
    from mlflow.exceptions import MlflowException

    return MlflowException


@contextmanager
def translated_errors(home: Path) -> Iterator[None]:
    """Raise DamagedDatabase for errors of MLflow that only a damaged database of this home gives."""
    try:
        yield
    except mlflow_error() as error:
        if uses_home_database(home) and (error.error_code == "INTERNAL_ERROR" or "sqlite3." in str(error)):
            raise DamagedDatabase(home / "mlflow" / "mlflow.db", str(error)) from error
        raise


def ensure_experiment(home: Path, client: MlflowClient, name: str) -> str:
    """The id of an experiment, made on first use; one that was deleted in MLflow is restored: it takes no runs."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        location = None  # a server has a location of its own for artifacts
        if tracking_uri(home).startswith("sqlite:"):
            location = (home / "mlflow" / "artifacts" / re.sub(r"[^\w.-]", "_", name)).absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except mlflow_error():
            experiment = client.get_experiment_by_name(name)  # somebody else has just made it
            if experiment is None:
                raise
    if experiment.lifecycle_stage == "deleted":
        client.restore_experiment(experiment.experiment_id)
    return str(experiment.experiment_id)


class Tracker:
    """Logs one pipeline run to MLflow, again and again as its journal grows."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._client: MlflowClient | None = None
        self.parent: str | None = None
        self._logged: set[str] = set()  # steps that are wholly in MLflow

    def sync(self, entries: list[journal.Entry]) -> str:
        """Log what is in the journal and not in MLflow yet; returns the id of the MLflow run."""
        start, end = journal.first(entries, "run"), journal.first(entries, "end")
        assert start is not None, "a journal starts with its run"
        if self._client is None:
            self._client = open_client(self.home)
        if self.parent is None:
            self.parent = self._find_or_start(self._client, start)
        parent = self.parent
        steps = [entry for entry in entries if entry["entry"] == "step"]
        for step in steps:
            if step["status"] != "reused" and step["step"] not in self._logged:
                self._log_step(self._client, start, parent, step)
                self._logged.add(step["step"])
        if end is not None:
            self._finish(self._client, parent, start, steps, end)
        return parent

    def experiment_and_run(self) -> tuple[str, str]:
        """(experiment, run) of this pipeline run in MLflow, for a link."""
        assert self._client is not None and self.parent is not None, "sync first"
        return str(self._client.get_run(self.parent).info.experiment_id), self.parent

    def child_run(self, step: str) -> str | None:
        """The MLflow run of an executed step."""
        assert self._client is not None and self.parent is not None, "sync first"
        return next((run.info.run_id for run in self._child_runs(self.parent, step)), None)

    def _find_or_start(self, client: MlflowClient, start: journal.Entry) -> str:
        experiment = ensure_experiment(self.home, client, start["pipeline"])
        runs = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{start['run_id']}' AND tags.`{STEP_TAG}` = '-'")
        if runs:
            parent = str(runs[0].info.run_id)
            self._logged = {
                run.data.tags[STEP_TAG] for run in self._child_runs(parent) if run.data.tags.get(DONE_TAG) == "yes"
            }
            return parent
        tags = {RUN_TAG: start["run_id"], STEP_TAG: "-"}
        if start["git_commit"]:
            tags["mlflow.source.git.commit"] = start["git_commit"]
        name = f"{start['pipeline']} {start['run_id']}"
        run = client.create_run(experiment, start_time=_milliseconds(start["time"]), tags=tags, run_name=name)
        _log_values(client, run.info.run_id, params=start["params"])
        return str(run.info.run_id)

    def _child_runs(self, parent: str, step: str | None = None) -> list[Any]:
        assert self._client is not None
        experiment = self._client.get_run(parent).info.experiment_id
        runs = self._client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'", max_results=1000)
        return [run for run in runs if step is None or run.data.tags[STEP_TAG] == step]  # a name may have a quote

    def _log_step(self, client: MlflowClient, start: journal.Entry, parent: str, step: journal.Entry) -> None:
        for unfinished in self._child_runs(parent, step["step"]):  # of a run that died while logging it
            client.delete_run(unfinished.info.run_id)
        tags = {
            RUN_TAG: start["run_id"],
            STEP_TAG: step["step"],
            KEY_TAG: step["key"],
            "draftsmith.uses": step["uses"],
            "draftsmith.why": step["why"],
            "mlflow.parentRunId": parent,
        }
        began = _milliseconds(step["time"] - (step["seconds"] or 0.0))
        experiment = client.get_run(parent).info.experiment_id
        child = client.create_run(experiment, start_time=began, tags=tags, run_name=step["step"]).info.run_id
        directory = _artifact_directory(self.home, step)
        _log_values(client, child, params=step["settings"], metrics=_metrics_of(directory, step))
        _log_lineage(client, child, step["inputs"])
        if directory is not None and step["kind"] != "Page":  # a report stands with the run, in `_finish`
            for file in _log_small_files(client, child, directory, ""):
                if uses_home_database(self.home):
                    second_name(self._logged_file(client, child, file.name), file)
        client.set_tag(child, DONE_TAG, "yes")
        status = "FINISHED" if step["status"] == "completed" else "FAILED"
        client.set_terminated(child, status, _milliseconds(step["time"]))

    def _logged_file(self, client: MlflowClient, run: str, name: str) -> Path:
        """Where a file of a run lies that MLflow keeps in this home."""
        return Path(url2pathname(urlsplit(client.get_run(run).info.artifact_uri).path)) / name

    def _finish(
        self,
        client: MlflowClient,
        parent: str,
        start: journal.Entry,
        steps: list[journal.Entry],
        end: journal.Entry,
    ) -> None:
        run = client.get_run(parent)
        if run.info.status != "RUNNING" and run.data.tags.get(DONE_TAG) == "yes":
            return
        client.log_dict(parent, {"run": dict(start), "steps": steps, "end": dict(end)}, "run.json")
        places = {step["step"]: folder for step in steps if (folder := _artifact_directory(self.home, step))}
        for step in steps:
            if step["kind"] == "Page" and step["step"] in places:
                folder, name = places[step["step"]], f"report/{step['step']}"
                _log_small_files(client, parent, folder, name)
                for pictures in _PICTURES:
                    _log_small_files(client, parent, folder / pictures, f"{name}/{pictures}")
        page = page_of(start, steps, end, places)
        present = {file.path for file in client.list_artifacts(parent, _EVIDENCE)}
        for name, table in page.tables.items():
            if f"{_EVIDENCE}/{name}" not in present:  # else MLflow would put the rows at its end
                client.log_table(parent, table, f"{_EVIDENCE}/{name}")
        tags = page.tags | {"mlflow.note.content": page.note, "mlflow.runName": page.title}
        for name, value in tags.items():
            client.set_tag(parent, name, value)
        at, new_metric = _milliseconds(end["time"]), _entities().Metric
        numbers = [new_metric(_mlflow_name(name), value, at, 0) for name, value in page.numbers.items()]
        for name, points in page.curves.items():
            numbers += [new_metric(_mlflow_name(name), value, at, depth) for depth, value in points]
        _log_values(client, parent, page.params, numbers)
        client.set_tag(parent, DONE_TAG, "yes")
        client.set_terminated(parent, _STATUS[end["status"]], _milliseconds(end["time"]))


def resync(home: Path) -> int:
    """Log every ended run that MLflow lacks wholly or partly; returns the number of journals.

    Runs of a pipeline that was deleted stay out of it, those of one that was renamed are under its present name.
    """
    count, fates = 0, journal.former_pipelines(map(journal.read, journal.journals(home)))
    for entries in journal.all_runs(home):
        name = fates.get(entries[0]["pipeline"], entries[0]["pipeline"])
        if name and not journal.is_fate(entries):
            with translated_errors(home):
                Tracker(home).sync([{**entries[0], "pipeline": name}, *entries[1:]])
        count += 1
    return count


def _quieten() -> None:
    """Turn off telemetry, long retries against a server that is down, and notices in the middle of our progress."""
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK", "true")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _entities() -> ModuleType:
    """The classes of what is logged."""
    from mlflow import entities

    return entities


def _log_values(client: MlflowClient, run: str, params: Mapping[str, Any], metrics: list[Any] | None = None) -> None:
    # MLflow refuses empty values in some back ends and cuts at 6,000 characters; run.json keeps the whole
    entities = [
        _entities().Param(_mlflow_name(name), (_as_text(value) or '""')[:6000]) for name, value in params.items()
    ]
    for at in range(0, len(entities), 100):
        client.log_batch(run, params=entities[at : at + 100])
    for at in range(0, len(metrics or []), 1000):
        client.log_batch(run, metrics=(metrics or [])[at : at + 1000])


def _metrics_of(directory: Path | None, step: journal.Entry) -> list[Any]:
    """Training metrics from metrics.jsonl, the numbers in the artifact's info, and how long it took."""
    new_metric, at = _entities().Metric, _milliseconds(step["time"])
    metrics = [new_metric("seconds", float(step["seconds"]), at, 0)] if step["seconds"] is not None else []
    for name, value in step.get("info", {}).items():
        if _is_number(value):
            metrics.append(new_metric(_mlflow_name(f"info.{name}"), float(value), at, 0))
    file = directory / "metrics.jsonl" if directory is not None else None
    if file is None or not file.is_file():
        return metrics
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step" and _is_number(value):
                metrics.append(new_metric(_mlflow_name(name), float(value), at, int(row["step"])))
    return metrics


def _log_small_files(client: MlflowClient, run: str, directory: Path, folder: str) -> list[Path]:
    """Log the small files of a folder for people to read; returns them. folder: the folder in MLflow, "" for the top.

    Not an artifact's record: what it says for people are the parameters, metrics and inputs of the run.
    """
    small = [
        file
        for file in (sorted(directory.iterdir()) if directory.is_dir() else [])
        if file.suffix in _SMALL_FILES and file.name != RECORD_FILE and file.stat().st_size <= _SMALL_BYTES
    ]
    for file in small:
        client.log_artifact(run, str(file), folder or None)
    return small


def second_name(file: Path, other: Path) -> bool:
    """Make a file a second name of another with the same content; whether the file system has such names."""
    beside = file.with_name(f".{file.name}.second")
    try:
        os.link(other, beside)
    except OSError:  # it has none, or the other lies on another one
        return False
    os.replace(beside, file)
    return True


def _log_lineage(client: MlflowClient, run: str, inputs: Mapping[str, Any]) -> None:
    """Log one dataset input for each input artifact; its digest is the start of the artifact's key."""
    entities, datasets = _entities(), []
    for parameter, pairs in inputs.items():
        for name, key in pairs:
            source = json.dumps({"artifact_key": key})
            dataset = entities.Dataset(name=name, digest=key[:32] or "-", source_type="draftsmith", source=source)
            datasets.append(entities.DatasetInput(dataset, tags=[entities.InputTag("mlflow.data.context", parameter)]))
    if datasets:
        client.log_inputs(run, datasets)


def _artifact_directory(home: Path, step: journal.Entry) -> Path | None:
    """The directory of a step's artifact, in the session of this run; None when the step failed."""
    if not step["path"]:
        return None
    session = step.get("session")
    return home / step["path"] if session is None else Store(home).path_of_session(step["key"], session)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _mlflow_name(name: str) -> str:
    """The name with characters that MLflow refuses replaced by _; at most 250 characters."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _milliseconds(seconds: float) -> int:
    return int(seconds * 1000)
