"""MLflow: a run for each pipeline run, a child run for each executed step; told from the journal, as often as you like.

`Tracker.sync` compares a journal with what MLflow has and logs what is missing, so logging as the run goes, logging
after MLflow was down, and logging into an empty database are the same code. The database is made once, under a lock,
since concurrent first use destroys it. mlflow is imported inside functions: it takes a second.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.contract import UserError
from storage import journal
from storage.artifacts import Store
from storage.locks import open_lock
from storage.redaction import without_secrets
from storage.whole_files import flush

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

RUN_TAG, STEP_TAG, KEY_TAG, DONE_TAG = "draftsmith.run_id", "draftsmith.step", "draftsmith.key", "draftsmith.logged"
RELEASES = "releases"  # the experiment of releases that no run of a pipeline has made; it bears the registry's mark
_STATUS = {"completed": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
_SMALL_FILES = (".json", ".md", ".html", ".yaml", ".txt", ".svg", ".csv")
_PICTURES = ("charts", "tables")  # folders of a Page whose files are shown beside it
_SMALL_BYTES = 4 << 20
CHECKED_BYTES = 64 << 20  # of a database: read within a tenth of a second


class ServerDown(UserError):
    """MLflow's server, which $MLFLOW_TRACKING_URI names, does not answer, or answers that it will not."""

    def __init__(self, uri: str, error: Exception) -> None:
        said = " ".join(str(error).split())
        super().__init__(without_secrets(f"mlflow at {uri} does not answer: {said[:300]}"))


class DamagedDatabase(ServerDown):
    """The MLflow database of this home cannot be used; it can be made anew."""

    def __init__(self, place: Path, why: str) -> None:
        UserError.__init__(
            self,
            f"{place}: {' '.join(why.split())[:200]}; `draftsmith doctor --repair` sets it aside, and "
            "`draftsmith resync` makes it anew from the journals, releases and promotions",
        )


def broken_database(place: Path, *, whole: bool = False) -> str:
    """What is wrong with a file of SQLite, or ''.

    whole: hold its indexes against its tables too; without it of one larger than CHECKED_BYTES the form alone is looked
    at.
    """
    if not place.is_file():
        return "is no file"
    if place.stat().st_size == 0 and not _journals_of(place):
        return "is empty"
    try:
        with closing(sqlite3.connect(f"{place.absolute().as_uri()}?mode=ro", uri=True, timeout=10)) as database:
            database.execute("BEGIN")  # while it lasts nobody writes into the file, but for a checkpoint of a WAL
            database.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if missing := _missing_bytes(place):
                return f"is cut short by {missing} bytes"
            if whole or place.stat().st_size <= CHECKED_BYTES:
                check = "integrity_check" if whole else "quick_check"
                said = str(database.execute(f"PRAGMA {check}(1)").fetchone()[0])
                return "" if said == "ok" else f"is damaged ({said})"
    except sqlite3.OperationalError as error:  # somebody holds it, or it lies on a disk that cannot be asked now
        return "" if re.search("locked|unable to open", str(error)) else f"cannot be read ({error})"
    except sqlite3.Error as error:
        return f"cannot be read ({error})"
    return ""


def _journals_of(place: Path) -> list[Path]:
    """What SQLite keeps beside a database while it is written: somebody may be making it just now."""
    return [file for ending in ("-wal", "-journal") if (file := place.with_name(place.name + ending)).exists()]


def _missing_bytes(place: Path) -> int:
    """How much shorter a file of SQLite is than its first page says; 0 for one that keeps a write-ahead log."""
    with place.open("rb") as stream:
        head = stream.read(32)
    page, is_wal, pages = int.from_bytes(head[16:18]), head[18:19] == b"\2", int.from_bytes(head[28:32])
    wanted = pages * (65536 if page == 1 else page)
    return 0 if is_wal else max(0, wanted - place.stat().st_size)


def tracking_uri(home: Path) -> str:
    """$MLFLOW_TRACKING_URI, else the SQLite database of this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(home / 'mlflow' / 'mlflow.db').absolute()}"


@contextmanager
def mlflow_lock(home: Path, name: str) -> Iterator[None]:
    """Hold a lock beside MLflow's database."""
    directory = home / "mlflow"
    directory.mkdir(parents=True, exist_ok=True)
    with open_lock(directory / f"{name}.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def ensure_database(home: Path) -> str:
    """Make or upgrade this home's MLflow database, once, whoever comes first; returns its URI.

    A server named by $MLFLOW_TRACKING_URI looks after its own database.
    """
    _quiet()
    uri = tracking_uri(home)
    if not is_own(home):
        return uri
    from mlflow.version import VERSION

    place = home / "mlflow" / "mlflow.db"
    ready = home / "mlflow" / f"ready-{VERSION}"
    with mlflow_lock(home, "create"):
        if place.exists() and any(place.parent.glob("ready-*")) and (why := broken_database(place)):
            raise DamagedDatabase(place, why)
        if not (ready.is_file() and place.is_file()):
            _make_database(place, whole=any(place.parent.glob("ready-*")))
            ready.touch()
    return uri


def _make_database(place: Path, *, whole: bool) -> None:
    """Make an MLflow database, or upgrade the one that is there, beside its place: a kill in between ruins nothing.

    whole: the one that is there was finished once. One that was not is what a kill has left of a first start, and is
    moved aside.
    """
    beside = place.with_name("building.db")
    for left in place.parent.glob("building.db*"):  # by a process that died
        left.unlink()
    if place.is_file() and not whole:
        place.rename(place.with_name(f"mlflow.db.broken-{time.time_ns()}"))
    if place.is_file():
        with closing(sqlite3.connect(place)) as there, closing(sqlite3.connect(beside)) as copy:
            there.backup(copy)
    upgrade_database(f"sqlite:///{beside.absolute()}")
    flush(beside)
    os.replace(beside, place)
    flush(place.parent)


def upgrade_database(uri: str) -> None:
    """Make an MLflow database, or bring its schema up to date. Call it holding a lock: two at once destroy it."""
    import mlflow.db

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    assert mlflow.db.upgrade.callback is not None
    mlflow.db.upgrade.callback(uri)  # what `mlflow db upgrade URI` runs; its argument would show the password


def has_database(home: Path) -> bool:
    """Whether there is anything to ask: a server that was named, or the database of this home. Makes nothing."""
    return not is_own(home) or (home / "mlflow" / "mlflow.db").is_file()


def is_own(home: Path) -> bool:
    """Whether MLflow stands on the database of this home."""
    return tracking_uri(home) == f"sqlite:///{(home / 'mlflow' / 'mlflow.db').absolute()}"


def open_client(home: Path) -> MlflowClient:
    """A client for tracking and registry.

    Raises:
        ServerDown: a server was named and cannot be asked.
    """
    uri = ensure_database(home)
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # What it logs as an error it raises as well; its traceback would stand in the middle of our progress.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        if uri.startswith("http"):
            raise ServerDown(uri, error) from error
        if is_own(home):
            raise DamagedDatabase(home / "mlflow" / "mlflow.db", str(error)) from error
        raise
    return client


@contextmanager
def asking(home: Path) -> Iterator[None]:
    """While MLflow is asked: a database of this home that says what it cannot say is named as damaged."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if is_own(home) and (error.error_code == "INTERNAL_ERROR" or "sqlite3." in str(error)):
            raise DamagedDatabase(home / "mlflow" / "mlflow.db", str(error)) from error
        raise


def experiment_of(home: Path, client: MlflowClient, name: str) -> str:
    """The id of an experiment, made on first use; one that was deleted in MLflow is restored: it takes no runs."""
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        place = None  # a server keeps what it is given in its own place
        if tracking_uri(home).startswith("sqlite:"):
            place = (home / "mlflow" / "artifacts" / re.sub(r"[^\w.-]", "_", name)).absolute().as_uri()
        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # somebody else has just made it
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


class Tracker:
    """Logs one pipeline run to MLflow, again and again as its journal grows."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._client: MlflowClient | None = None
        self.parent: str | None = None
        self._logged: set[str] = set()  # steps that are wholly in MLflow

    def sync(self, entries: list[dict[str, Any]]) -> str:
        """Log what the journal says and MLflow does not know yet; returns the id of the MLflow run."""
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

    def where(self) -> tuple[str, str]:
        """(experiment, run) of this pipeline run in MLflow, for a link."""
        assert self._client is not None and self.parent is not None, "sync first"
        return str(self._client.get_run(self.parent).info.experiment_id), self.parent

    def child_run(self, step: str) -> str | None:
        """The MLflow run of an executed step."""
        assert self._client is not None and self.parent is not None, "sync first"
        return next((run.info.run_id for run in self._children(self.parent, step)), None)

    def _find_or_start(self, client: MlflowClient, start: Mapping[str, Any]) -> str:
        experiment = experiment_of(self.home, client, start["pipeline"])
        found = client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{start['run_id']}' AND tags.`{STEP_TAG}` = '-'")
        if found:
            parent = str(found[0].info.run_id)
            self._logged = {
                run.data.tags[STEP_TAG] for run in self._children(parent) if run.data.tags.get(DONE_TAG) == "yes"
            }
            return parent
        tags = {RUN_TAG: start["run_id"], STEP_TAG: "-", "draftsmith.how": start["how"]}
        tags |= {"draftsmith.version": start["draftsmith_version"]}
        if start["git_commit"]:
            tags["mlflow.source.git.commit"] = start["git_commit"]
        name = f"{start['pipeline']} {start['run_id']}"
        run = client.create_run(experiment, start_time=_ms(start["time"]), tags=tags, run_name=name)
        _log(client, run.info.run_id, params=start["params"])
        return str(run.info.run_id)

    def _children(self, parent: str, step: str | None = None) -> list[Any]:
        assert self._client is not None
        experiment = self._client.get_run(parent).info.experiment_id
        found = self._client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{parent}'", max_results=1000)
        return [run for run in found if step is None or run.data.tags[STEP_TAG] == step]  # a name may have a quote

    def _log_step(self, client: MlflowClient, start: Mapping[str, Any], parent: str, step: Mapping[str, Any]) -> None:
        for half in self._children(parent, step["step"]):  # of a run that died while logging it
            client.delete_run(half.info.run_id)
        tags = {
            RUN_TAG: start["run_id"],
            STEP_TAG: step["step"],
            KEY_TAG: step["key"],
            "draftsmith.kind": step["kind"],
            "draftsmith.uses": step["uses"],
            "draftsmith.why": step["why"],
            "draftsmith.path": step["path"],
            "mlflow.parentRunId": parent,
        }
        began = _ms(step["time"] - (step["seconds"] or 0.0))
        experiment = client.get_run(parent).info.experiment_id
        child = client.create_run(experiment, start_time=began, tags=tags, run_name=step["step"]).info.run_id
        directory = _directory(self.home, step)
        _log(client, child, params=step["settings"], metrics=_metrics(directory, step))
        _log_lineage(client, child, step["inputs"])
        if directory is not None:
            _log_small_files(client, child, directory, "")
            for folder in _PICTURES if step["kind"] == "Page" else ():
                _log_small_files(client, child, directory / folder, folder)
        client.set_tag(child, DONE_TAG, "yes")
        client.set_terminated(child, "FINISHED" if step["status"] == "completed" else "FAILED", _ms(step["time"]))

    def _finish(
        self,
        client: MlflowClient,
        parent: str,
        start: Mapping[str, Any],
        steps: list[dict[str, Any]],
        end: Mapping[str, Any],
    ) -> None:
        run = client.get_run(parent)
        if run.info.status != "RUNNING":
            return
        client.log_dict(parent, {"run": dict(start), "steps": steps, "end": dict(end)}, "run.json")
        for step in steps:
            directory = _directory(self.home, step)
            if step["kind"] == "Page" and directory is not None:
                _log_small_files(client, parent, directory, f"report/{step['step']}")
        reused = [step["step"] for step in steps if step["status"] == "reused"]
        executed = [step["step"] for step in steps if step["status"] != "reused"]
        tags = {"draftsmith.reused": ", ".join(reused), "draftsmith.executed": ", ".join(executed)}
        for name, value in (tags | {"draftsmith.reason": end["reason"] or ""}).items():
            client.set_tag(parent, name, value)
        client.set_terminated(parent, _STATUS[end["status"]], _ms(end["time"]))


def resync(home: Path) -> int:
    """Log every ended run that MLflow does not have, or not wholly; returns how many journals were compared."""
    count = 0
    for entries in journal.all_runs(home):
        with asking(home):
            Tracker(home).sync(entries)
        count += 1
    return count


def _quiet() -> None:
    """No telemetry, no long retries against a server that is down, no notices in the middle of our progress."""
    os.environ["DO_NOT_TRACK"] = "true"
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    os.environ.setdefault("MLFLOW_SKIP_PIP_REQUIREMENTS_CHECK", "true")
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _log(client: MlflowClient, run: str, params: Mapping[str, Any], metrics: list[Any] | None = None) -> None:
    from mlflow.entities import Param

    # MLflow refuses empty values in some back ends and cuts at 6,000 characters; run.json keeps the whole
    listed = [Param(_name(name), (_text(value) or '""')[:6000]) for name, value in params.items()]
    for at in range(0, len(listed), 100):
        client.log_batch(run, params=listed[at : at + 100])
    for at in range(0, len(metrics or []), 1000):
        client.log_batch(run, metrics=(metrics or [])[at : at + 1000])


def _metrics(directory: Path | None, step: Mapping[str, Any]) -> list[Any]:
    """Training metrics from metrics.jsonl, the numbers in the artifact's info, and how long it took."""
    from mlflow.entities import Metric

    at = _ms(step["time"])
    found = [Metric("seconds", float(step["seconds"]), at, 0)] if step["seconds"] is not None else []
    for name, value in step.get("info", {}).items():
        if _is_number(value):
            found.append(Metric(_name(f"info.{name}"), float(value), at, 0))
    file = directory / "metrics.jsonl" if directory is not None else None
    if file is None or not file.is_file():
        return found
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step" and _is_number(value):
                found.append(Metric(_name(name), float(value), at, int(row["step"])))
    return found


def _log_small_files(client: MlflowClient, run: str, directory: Path, place: str) -> None:
    """The files of a folder that people look at. place: the folder in MLflow, "" for the top."""
    for file in sorted(directory.iterdir()) if directory.is_dir() else []:
        if file.suffix in _SMALL_FILES and file.stat().st_size <= _SMALL_BYTES:
            client.log_artifact(run, str(file), place or None)


def _log_lineage(client: MlflowClient, run: str, inputs: Mapping[str, Any]) -> None:
    """One dataset input for each artifact that went in; its digest is the start of the artifact's key."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    datasets = []
    for parameter, pairs in inputs.items():
        for name, key in pairs:
            source = json.dumps({"artifact_key": key})
            dataset = Dataset(name=name, digest=key[:32] or "-", source_type="draftsmith", source=source)
            datasets.append(DatasetInput(dataset, tags=[InputTag("mlflow.data.context", parameter)]))
    if datasets:
        client.log_inputs(run, datasets)


def _directory(home: Path, step: Mapping[str, Any]) -> Path | None:
    """Where a step's artifact lies, in the session that it had then; None when the step has failed."""
    if not step["path"]:
        return None
    session = step.get("session")
    return home / step["path"] if session is None else Store(home).path_of_session(step["key"], session)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _name(name: str) -> str:
    """A name that MLflow takes: letters, digits and _ - . space / only."""
    return re.sub(r"[^\w\-. /]", "_", name)[:250]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
