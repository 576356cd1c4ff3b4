"""Ends runs that have lost their processes, and processes that have lost their run.

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

Where every worker is elsewhere (deploy/compose.yaml), this module is a process of its own that sees heartbeats alone;
then runs of our work pool, too, may beat as seldom as Prefect has it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

import psutil

from components.outside_json import JsonObject
from flows.services.client import HEARTBEAT_S, PREFECTS_HEARTBEAT_S, WORK_POOL, ApiError, PrefectApi

EVERY_S = 5.0
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
    """Compares Prefect's runs with the processes here, once a `tick`. Its memory is only a hint and starts empty."""

    api: PrefectApi
    has_worker: bool = True  # whether runs of our work pool are started on this machine
    last_seen: dict[str, float] = field(default_factory=dict)  # run id -> when its processes were last seen here
    silent_since: dict[str, float] = field(default_factory=dict)  # run id -> since when it looks dead

    def forget_silence(self) -> None:
        """Forget silent runs while the server is down: silence means nothing until it has been back for a while."""
        self.silent_since.clear()

    def tick(self, worker: int | None) -> list[str]:
        """Compare once and repair; returns one line for each change.

        worker: process id of the worker under this supervisor, None while there is none.
        """
        try:
            return self._tick(worker)
        except ApiError as error:
            self.forget_silence()
            return [f"reconciler: {error}"] if error.status else []

    def _tick(self, worker: int | None) -> list[str]:
        now = time.monotonic()
        here = processes_by(RUN_VARIABLE) if self.has_worker else {}
        query = {"flow_runs": {"state": {"type": {"any_": list(ALIVE)}}}, "limit": 200}
        runs = {str(run["id"]): run for run in self.api.post("/flow_runs/filter", query)}
        self.last_seen = {run: now if run in here else at for run, at in self.last_seen.items() if run in runs} | {
            run: now for run in here if run in runs
        }
        self.silent_since = {run: since for run, since in self.silent_since.items() if run in runs and run not in here}
        lines: list[str] = []
        for run_id, run in runs.items():
            lines += (
                self._with_processes(run, here[run_id], worker) if run_id in here else self._without_processes(run, now)
            )
        lines += self._kill_orphans({run: processes for run, processes in here.items() if run not in runs}, worker)
        lines += self._end_task_runs()
        return lines

    def _with_processes(self, run: JsonObject, processes: list[psutil.Process], worker: int | None) -> list[str]:
        """Handle a run whose processes are here: only a cancel that has no effect needs us."""
        if run["state"]["type"] != "CANCELLING":
            return []
        age = seconds_since(run["state"]["timestamp"])
        orphaned = not has_ancestor(processes, worker)
        if age < (CANCEL_ORPHAN_S if orphaned else CANCEL_AT_ONCE_S):
            return []
        kill_all(processes)  # asked politely and without its worker, Prefect's engine would say Crashed
        return [f"run {run['name']}: cancelled {age:.0f} s ago and still here: ended {len(processes)} processes"]

    def _without_processes(self, run: JsonObject, now: float) -> list[str]:
        """Handle a run without processes here: it is dead, elsewhere, or just starting."""
        state, run_id = run["state"], str(run["id"])
        if state["type"] == "PAUSED" and state["name"] != "Paused":
            return []  # suspended: it has given its process back on purpose
        if run_id in self.last_seen:
            if now - self.last_seen[run_id] < REPORT_GRACE_S:
                return []
        elif not self._has_fallen_silent(run, now):
            return []
        if state["type"] == "CANCELLING":
            return self._set_state(run, "CANCELLED", "Cancelled", "every process of it has ended")
        if state["type"] == "PENDING" and run.get("work_pool_name") == WORK_POOL:
            return self._set_state(run, "SCHEDULED", "Scheduled", "its worker died before it began: scheduled again")
        return self._set_state(
            run, "CRASHED", "Crashed", "its process is gone; a retry goes on from the finished steps"
        )

    def _has_fallen_silent(self, run: JsonObject, now: float) -> bool:
        """Whether a run gave no sign of life for long enough while it was watched."""
        run_id, age = str(run["id"]), seconds_since(run["state"]["timestamp"])
        is_ours = run.get("work_pool_name") == WORK_POOL
        if age < PENDING_TOO_LONG_S or (
            not is_ours and run["state"]["type"] == "PENDING" and run.get("work_pool_name")
        ):
            return False
        last = self._last_heartbeat(run_id)
        if last is None and not is_ours:
            return False  # started by somebody whose runs give no heartbeats
        if last is None and not self.has_worker:
            last = age
        limit = SILENT_AFTER_S if is_ours and self.has_worker else FOREIGN_SILENT_AFTER_S
        if last is not None and last < limit:
            self.silent_since.pop(run_id, None)
            return False
        return now - self.silent_since.setdefault(run_id, now) >= SILENCE_OBSERVED_S

    def _last_heartbeat(self, run_id: str) -> float | None:
        """Seconds since the run's last sign of life; None when it never gave one."""
        about = {
            "event": {"name": ["prefect.flow-run.heartbeat"]},
            "resource": {"id": [f"prefect.flow-run.{run_id}"]},
            "order": "DESC",
        }
        events = self.api.post("/events/filter", {"filter": about, "limit": 1})["events"]
        return seconds_since(events[0]["occurred"]) if events else None

    def _kill_orphans(self, here: Mapping[str, list[psutil.Process]], worker: int | None) -> list[str]:
        """Kill processes without a worker whose run ended more than REPORT_GRACE_S ago."""
        lines: list[str] = []
        orphans = {run: processes for run, processes in here.items() if not has_ancestor(processes, worker)}
        if not orphans:
            return lines
        query = {"flow_runs": {"id": {"any_": list(orphans)}}, "limit": 200}
        for run in self.api.post("/flow_runs/filter", query):
            has_ended = run["state"]["type"] in ENDED and seconds_since(run["state"]["timestamp"]) > REPORT_GRACE_S
            if has_ended:
                kill_all(orphans[str(run["id"])])
                lines.append(f"run {run['name']}: has ended, its processes had not: killed")
        return lines

    def _end_task_runs(self) -> list[str]:
        """End the task runs of ended flow runs."""
        query = {
            "task_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING"]}}},
            "flow_runs": {"state": {"type": {"any_": ["FAILED", "CRASHED", "CANCELLED"]}}},
            "limit": 200,
        }
        lines = []
        for task in self.api.post("/task_runs/filter", query):
            if seconds_since(task["state"]["timestamp"]) > REPORT_GRACE_S:
                state = {"type": "CRASHED", "name": "Crashed", "message": "its flow run has ended"}
                self.api.post(f"/task_runs/{task['id']}/set_state", {"state": state, "force": True})
                lines.append(f"task {task['name']}: ended with its run")
        return lines

    def _set_state(self, run: JsonObject, kind: str, name: str, message: str) -> list[str]:
        run_id = str(run["id"])
        current = self.api.get(f"/flow_runs/{run_id}")
        if current["state"]["id"] != run["state"]["id"]:
            return []  # its state has just changed
        state = {"type": kind, "name": name, "message": message}
        # a run that begins again must be free of the rules for one that has begun
        self.api.post(f"/flow_runs/{run_id}/set_state", {"state": state, "force": kind == "SCHEDULED"})
        self.last_seen.pop(run_id, None)
        self.silent_since.pop(run_id, None)
        return [f"run {run['name']}: {name}, {message}"]


def processes_by(variable: str) -> dict[str, list[psutil.Process]]:
    """Every living process of this user that has a variable in its environment, by the variable's value."""
    processes: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or gone by now
            value = process.environ().get(variable)
            if value and process.status() != psutil.STATUS_ZOMBIE:
                processes.setdefault(value, []).append(process)
    return processes


def has_ancestor(processes: Iterable[psutil.Process], worker: int | None) -> bool:
    """Whether one of these processes runs below the worker, which then watches it."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if worker is not None and any(parent.pid == worker for parent in process.parents()):
                return True
    return False


def kill_all(processes: Iterable[psutil.Process]) -> None:
    """Send SIGKILL to each process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def seconds_since(moment: str) -> float:
    """Seconds since an ISO time with a zone."""
    then = datetime.fromisoformat(moment)
    return (datetime.now(then.tzinfo) - then).total_seconds()


def log_line(line: str) -> None:
    """Write a line to the log of this process, which is its standard output."""
    sys.stdout.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}\n")
    sys.stdout.flush()


def main() -> None:
    """End lost runs of the server of $PREFECT_API_URL, whose workers are elsewhere, until this process is ended."""
    auth_string = os.environ.get("PREFECT_API_AUTH_STRING", "")
    api = PrefectApi(os.environ["PREFECT_API_URL"], auth_string, busy_for_s=0.0)  # the next round asks again
    reconciler = Reconciler(api, has_worker=False)
    while True:
        for line in reconciler.tick(None):
            log_line(line)
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
