"""No run stays Running for ever: what has lost its process gets its end, what has lost its run gets none to live on.

Prefect learns how a run ended from the run itself or from the worker that watches it; when both die, from nobody.
Every few seconds the supervisor compares what Prefect believes with what lives on this machine (a run's processes carry
its id in their environment, so neither a reused process id nor a reader in between can mislead) and with the run's
heartbeats, for runs that live elsewhere:

    Running, its processes were seen here and are gone          -> Crashed, 10 s later
    Running, never seen here, no heartbeat for a minute         -> Crashed, when that stays so for half a minute more
      (six minutes for a run that our work pool did not start, whose heart may beat as seldom as Prefect has it)
    Pending for a minute and nobody starts it (worker killed)   -> Scheduled again: nothing of it has run
    Cancelling for 10 s (1 s without its worker) and still here -> its processes are killed; gone -> Cancelled
    ended, but processes of it are still here without a worker  -> they are killed

Task runs of an ended run are ended with it. A state is set only while the run is still in the state that was judged.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from flows.service_address import HEARTBEAT_S, PREFECTS_HEARTBEAT_S, WORK_POOL
from flows.service_api import ApiError, PrefectApi

RUN_VARIABLE = "PREFECT__FLOW_RUN_ID"
REPORT_GRACE_S = 10.0  # a worker or the run itself may still be telling how it ended
SILENT_AFTER_S = 2.0 * HEARTBEAT_S
FOREIGN_SILENT_AFTER_S = 2.0 * PREFECTS_HEARTBEAT_S  # a run that somebody started with Prefect's own settings
SILENCE_OBSERVED_S = HEARTBEAT_S + 5.0  # a machine that slept beats again within this time
PENDING_TOO_LONG_S = 60.0
CANCEL_ORPHAN_S, CANCEL_AT_ONCE_S = 1.0, 10.0
ALIVE = ("RUNNING", "PENDING", "CANCELLING", "PAUSED")
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@dataclass
class Reconciler:
    """Compares and mends, once a `tick`. What it has seen is only a hint: a new one starts from nothing."""

    api: PrefectApi
    home: Path
    seen: dict[str, float] = field(default_factory=dict)  # run id -> when its processes were last seen here
    silent: dict[str, float] = field(default_factory=dict)  # run id -> since when it looks dead

    def lost_sight(self) -> None:
        """The server is away: silence means nothing until it has been back for a while."""
        self.silent.clear()

    def tick(self, worker: int | None) -> list[str]:
        """Mend what is wrong now; one line for each thing done.

        worker: process id of the worker under this supervisor, None while there is none.
        """
        try:
            return self._tick(worker)
        except ApiError as error:
            self.lost_sight()
            return [f"reconciler: {error}"] if error.status else []

    def _tick(self, worker: int | None) -> list[str]:
        now = time.monotonic()
        here = processes_of_runs()
        wanted = {"flow_runs": {"state": {"type": {"any_": list(ALIVE)}}}, "limit": 200}
        runs = {str(run["id"]): run for run in self.api.post("/flow_runs/filter", wanted)}
        self.seen = {run: now if run in here else at for run, at in self.seen.items() if run in runs} | {
            run: now for run in here if run in runs
        }
        self.silent = {run: since for run, since in self.silent.items() if run in runs and run not in here}
        said: list[str] = []
        for run_id, run in runs.items():
            said += self._with_processes(run, here[run_id], worker) if run_id in here else self._without(run, now)
        said += self._end_the_dead({run: found for run, found in here.items() if run not in runs}, worker)
        said += self._end_tasks()
        return said

    def _with_processes(self, run: Mapping[str, Any], found: list[psutil.Process], worker: int | None) -> list[str]:
        """A run whose processes are here: only a cancel that does not come through is our business."""
        if run["state"]["type"] != "CANCELLING":
            return []
        age = seconds_since(run["state"]["timestamp"])
        orphaned = not below(found, worker)
        if age < (CANCEL_ORPHAN_S if orphaned else CANCEL_AT_ONCE_S):
            return []
        kill(found)  # asked politely and without its worker, Prefect's engine would say Crashed
        return [f"run {run['name']}: cancelled {age:.0f} s ago and still here: ended {len(found)} processes"]

    def _without(self, run: Mapping[str, Any], now: float) -> list[str]:
        """A run of which nothing is here: dead, elsewhere, or just coming."""
        state, run_id = run["state"], str(run["id"])
        if state["type"] == "PAUSED" and state["name"] != "Paused":
            return []  # suspended: it has given its process back on purpose
        if run_id in self.seen:
            if now - self.seen[run_id] < REPORT_GRACE_S:
                return []
        elif not self._has_fallen_silent(run, now):
            return []
        if state["type"] == "CANCELLING":
            return self._set(run, "CANCELLED", "Cancelled", "every process of it has ended")
        if state["type"] == "PENDING" and run.get("work_pool_name") == WORK_POOL:
            return self._set(run, "SCHEDULED", "Scheduled", "its worker died before it began: scheduled again")
        return self._set(run, "CRASHED", "Crashed", "its process is gone; a retry goes on from the finished steps")

    def _has_fallen_silent(self, run: Mapping[str, Any], now: float) -> bool:
        """No sign of life for a while, and long enough watched for it."""
        run_id, age = str(run["id"]), seconds_since(run["state"]["timestamp"])
        ours = run.get("work_pool_name") == WORK_POOL
        if age < PENDING_TOO_LONG_S or (not ours and run["state"]["type"] == "PENDING" and run.get("work_pool_name")):
            return False
        last = self._last_heartbeat(run_id)
        if last is None and not ours:
            return False  # started by somebody whose runs give no heartbeats
        if last is not None and last < (SILENT_AFTER_S if ours else FOREIGN_SILENT_AFTER_S):
            self.silent.pop(run_id, None)
            return False
        return now - self.silent.setdefault(run_id, now) >= SILENCE_OBSERVED_S

    def _last_heartbeat(self, run_id: str) -> float | None:
        """Seconds since the run's last sign of life; None when it never gave one."""
        about = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run_id}"]},
            "order": "DESC",
        }
        events = self.api.post("/events/filter", {"filter": about, "limit": 1})["events"]
        return seconds_since(events[0]["occurred"]) if events else None

    def _end_the_dead(self, here: Mapping[str, list[psutil.Process]], worker: int | None) -> list[str]:
        """Kill processes without a worker whose run has ended a while ago."""
        said: list[str] = []
        orphans = {run: found for run, found in here.items() if not below(found, worker)}
        if not orphans:
            return said
        wanted = {"flow_runs": {"id": {"any_": list(orphans)}}, "limit": 200}
        for run in self.api.post("/flow_runs/filter", wanted):
            ended = run["state"]["type"] in ENDED and seconds_since(run["state"]["timestamp"]) > REPORT_GRACE_S
            if ended:
                kill(orphans[str(run["id"])])
                said.append(f"run {run['name']}: has ended, its processes had not: killed")
        return said

    def _end_tasks(self) -> list[str]:
        """Task runs do not outlive their flow run."""
        wanted = {
            "task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}},
            "flow_runs": {"state": {"type": {"any_": ["FAILED", "CRASHED", "CANCELLED"]}}},
            "limit": 200,
        }
        said = []
        for task in self.api.post("/task_runs/filter", wanted):
            if seconds_since(task["state"]["timestamp"]) > REPORT_GRACE_S:
                state = {"type": "CRASHED", "name": "Crashed", "message": "its flow run has ended"}
                self.api.post(f"/task_runs/{task['id']}/set_state", {"state": state, "force": True})
                said.append(f"task {task['name']}: ended with its run")
        return said

    def _set(self, run: Mapping[str, Any], kind: str, name: str, why: str) -> list[str]:
        run_id = str(run["id"])
        current = self.api.get(f"/flow_runs/{run_id}")
        if current["state"]["id"] != run["state"]["id"]:
            return []  # somebody has just told how it goes on
        state = {"type": kind, "name": name, "message": why}
        # a run that begins again must be free of the rules for one that has begun
        self.api.post(f"/flow_runs/{run_id}/set_state", {"state": state, "force": kind == "SCHEDULED"})
        self.seen.pop(run_id, None)
        self.silent.pop(run_id, None)
        return [f"run {run['name']}: {name}, {why}"]


def processes_of_runs() -> dict[str, list[psutil.Process]]:
    """Every process on this machine that belongs to a run, by the run's id."""
    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone by now
            run = process.environ().get(RUN_VARIABLE)
            if run and process.status() != psutil.STATUS_ZOMBIE:
                found.setdefault(run, []).append(process)
    return found


def below(processes: Iterable[psutil.Process], worker: int | None) -> bool:
    """One of these stands below the worker, which therefore watches it."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if worker is not None and any(parent.pid == worker for parent in process.parents()):
                return True
    return False


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL to each."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def seconds_since(moment: str) -> float:
    """How long ago an ISO time with its zone was."""
    then = datetime.fromisoformat(moment)
    return (datetime.now(then.tzinfo) - then).total_seconds()
