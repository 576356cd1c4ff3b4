"""Runs a plan: each step in a supervised child process, its result sealed into the store. Knows no Prefect.

For one step: take the lock of its key (a second process that wants the same waits, then reuses), take the machine
(measuring steps alone, others shared), start the child, pass its events on, seal what it made. `UserError` is final,
anything else is retried as often as the step allows. Killed at any moment, the same plan goes on where it was.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from components.contract import KINDS, Artifact, Conversations, NothingNew, Prompts, Target
from components.files import try_lock, wait_for_lock
from components.machine import describe_machine, num_usable_cores
from components.outside_json import JsonObject
from components.positions import positions_fault, prompts_fault, read_prompt_lengths
from components.refusals import PROMPTS, evidence_of, too_few_prompts
from components.source_code import code_state
from flows.execution.messages import (
    ArtifactHandle,
    ClusterOrder,
    Event,
    RunConnection,
    StepFailed,
    StepOrder,
)
from flows.execution.step_process import PRELOAD, ChildEnd, run_child
from flows.planning.plan import Plan, PlannedStep, StepHistory
from flows.planning.this_machine import cpu_features, library_versions, open_machine_lock
from flows.spec.diagnostics import InputError, page_of_step
from flows.spec.placement import HERE
from storage.artifacts.remote import drain_problems
from storage.artifacts.sessions import read_record, session_of
from storage.artifacts.store import Store

OnEvent = Callable[[PlannedStep, Event], None]
OnFinished = Callable[[PlannedStep, Artifact, JsonObject, float, bool], None]


class Engine:
    """Runs the steps of one plan.

    on_event(step, event): events of the step itself (progress, metrics, note, set_aside) and of its life:
        {"event": "start" | "waiting" | "retry" | "reused" | "done" | "nothing_new" | "failed", ...}.
    on_finished(step, artifact, record, seconds, reused): called once for each step, whether it was made or reused;
        `record` is the "record" of artifact.json: how the artifact was made.
    """

    def __init__(
        self,
        store: Store,
        plan: Plan,
        on_event: OnEvent | None = None,
        on_finished: OnFinished | None = None,
        *,
        run_id: str = "",
        num_threads: int | None = None,
        preload: tuple[str, ...] = PRELOAD,
    ) -> None:
        self.store, self.plan = store, plan
        self.on_event: OnEvent = on_event or (lambda step, event: None)
        self.on_finished: OnFinished = on_finished or (lambda step, artifact, record, seconds, reused: None)
        self.num_threads = num_threads or num_usable_cores()
        self.run_id, self.preload = run_id, preload
        self.history = StepHistory(store.home, plan.pipeline)
        self.connection: Callable[[], RunConnection] | None = None  # how a child reaches the run around this engine

    def run(self) -> dict[str, Artifact]:
        """Run every step of the plan in order; returns the artifact of each, by step name.

        Raises:
            NothingNew: a step found nothing to do; the steps after it are not run.
            UserError: the input of a step was wrong.
            StepFailed: a step failed after its retries.
        """
        artifacts: dict[str, Artifact] = dict(self.plan.sources)
        for step in self.plan.steps:
            artifacts[step.name] = self.run_step(step, artifacts)
        return {step.name: artifacts[step.name] for step in self.plan.steps}

    def run_step(self, step: PlannedStep, artifacts: Mapping[str, Artifact]) -> Artifact:
        """Reuse or make one step. `artifacts` holds at least everything named in its inputs."""
        started = time.monotonic()
        if step.collected:
            content = self.store.record_of(step.key)
            bare = KINDS[step.kind](key=step.key, path=self.store.path_of(step.key), info=dict(content["info"]))
            self.on_event(step, {"event": "reused", "seconds": 0.0, "key": step.key})
            self.on_finished(step, bare, dict(content["record"]), 0.0, True)
            return bare
        with self._key_lock(step):
            self.store.settle(step.key)  # of a kill just before it was in its place: it is an earlier session then
            reusable = self._reusable(step)
            if reusable is None:
                with self._machine(step):
                    started = time.monotonic()
                    artifact, record = self._make(step, artifacts)
            else:
                artifact, record = reusable, dict(self.store.record_of(step.key)["record"])
            self.history.remember(step.name, step.parts)
        seconds, reused = time.monotonic() - started, reusable is not None
        self.on_event(step, {"event": "reused" if reused else "done", "seconds": seconds, "key": step.key})
        self.on_finished(step, artifact, record, seconds, reused)
        if isinstance(artifact, Target):
            self._check_positions(step.name, artifact)
        elif isinstance(artifact, Conversations) and artifact.path.is_dir():
            self._check_prompts(step, artifacts, artifact)
        elif isinstance(artifact, Prompts):
            self._check_number(step, {**artifacts, step.name: artifact})
        return artifact

    def _check_positions(self, name: str, target: Target) -> None:
        """Raise InputError where a step of the plan needs more positions than this target, made by step `name`, has.

        Most are told when a pipeline is checked; a target from a hub, or one that a step trains, is not there by then.
        """
        positions = target.info.get("shape", {}).get("max_position_embeddings")
        faults = (
            (step, *positions_fault(step.uses, step.settings, positions))
            for step in self.plan.steps
            if positions is not None and step.inputs.get("target") == name
        )
        lines = {f"step '{step.name}': setting '{setting}': {fault}": None for step, setting, fault in faults if fault}
        if lines:
            raise InputError(list(lines), ["my-model"] * len(lines))

    def _check_prompts(self, step: PlannedStep, artifacts: Mapping[str, Artifact], answers: Conversations) -> None:
        """Raise InputError where too few of the test prompts beside these answers fit a step that measures with them.

        Said here, before a drafter is trained; what is left out without a fault becomes a note of step `answers`.
        """
        target, lengths = artifacts.get(str(step.inputs.get("target"))), read_prompt_lengths(answers.path)
        positions = target.info.get("shape", {}).get("max_position_embeddings") if target else None
        if positions is None:
            return
        faults = dict[str, None]()
        for later in self.plan.steps:
            if any(later.inputs.get(name) != step.inputs.get(name) for name in ("target", "prompts")):
                continue
            counted, fault = prompts_fault(later.uses, later.settings, positions, lengths)
            if fault:
                faults[f"step '{later.name}': prompts: {fault}"] = None
            elif counted:
                self.on_event(step, {"event": "note", "message": f"step '{later.name}': {counted}: it leaves them out"})
        if faults:
            raise InputError(list(faults), ["my-model"] * len(faults))

    def _check_number(self, step: PlannedStep, artifacts: Mapping[str, Artifact]) -> None:
        """Raise InputError where a verdict that is still to come needs more test prompts than it has with these.

        Traffic waits for another night. Where no step asks for a verdict, few prompts become a note.
        """
        settings = {each.name: each.settings for each in self.plan.steps}
        steps = {each.name: (each.uses, each.inputs) for each in self.plan.steps}
        verdicts = [evidence for evidence in evidence_of(steps) if step.name in evidence.prompts]
        for names in [evidence.prompts for evidence in verdicts if not self.plan.step(evidence.decides).reused]:
            if not all(name in artifacts for name in names):
                continue  # the last of them tells
            number = sum(artifacts[name].info.get("num_test", PROMPTS.decide) for name in names)
            if not (fault := too_few_prompts(number, [settings[name] for name in names if name in settings])):
                continue
            if step.uses == "data.collect_traffic":
                message = f"{fault.partition(':')[0]}; they wait"
                self.on_event(step, {"event": "nothing_new", "message": message})
                raise NothingNew(message)
            raise InputError([f"step '{step.name}': {fault}"], [page_of_step(step.uses)])
        number = artifacts[step.name].info.get("num_test", 0)
        if number and not verdicts and (few := too_few_prompts(number, [step.settings])):
            self.on_event(step, {"event": "note", "message": f"{few} (no step here asks for one)"})

    def log_of(self, step: PlannedStep) -> Path:
        """Where the output of this step goes."""
        folder = self.store.home / "logs" / self.plan.pipeline
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{step.name}.{step.key[:12]}.log"

    def _reusable(self, step: PlannedStep) -> Artifact | None:
        if step.forced:
            return None
        state = self.store.verify_local(step.key)
        if state.artifact is None and state.fault != "absent":
            place = self.store.quarantine(step.key)
            self.on_event(step, {"event": "note", "message": f"{state.fault}; the broken artifact is in {place}"})
        artifact = state.artifact or self.store.download(step.key)
        for line in drain_problems():
            self.on_event(step, {"event": "note", "message": line})
        if artifact is not None:
            self.store.discard_staging(step.key)  # left by a kill between the last rename and the end
        return artifact

    def _make(self, step: PlannedStep, artifacts: Mapping[str, Artifact]) -> tuple[Artifact, JsonObject]:
        if step.forced:
            self.store.discard_staging(step.key)
        log = self.log_of(step)
        for name in step.input_names():
            if not artifacts[name].path.is_dir():  # what was to be reused has turned out to be broken
                message = f"its input '{name}' was collected by `draftsmith gc`; the same command makes both now"
                raise StepFailed(step.name, message, log)
        started_at, began = time.time(), time.monotonic()  # a clock may be set meanwhile: durations do not follow it
        attempts = step.retries + 1
        for attempt in range(1, attempts + 1):
            self.on_event(step, {"event": "start", "attempt": attempt, "log": str(log)})
            end = self._attempt(step, artifacts, log)
            if end.how == "made":
                inputs = [artifacts[name] for name in step.input_names()]
                span = started_at, time.monotonic() - began
                record = self._record(step, inputs, end, span, attempt)
                artifact = self.store.commit(step.key, end.kind, end.info, record)
                for line in drain_problems():
                    self.on_event(step, {"event": "note", "message": line})
                return artifact, record
            if end.how == "nothing_new":
                self.store.discard_staging(step.key)
                self.on_event(step, {"event": "nothing_new", "message": end.message})
                raise NothingNew(end.message)
            if end.how == "user_error":
                self.on_event(step, {"event": "failed", "message": end.message})
                lines = [f"step '{step.name}': {line}" for line in end.message.splitlines() or [""]]
                raise InputError(lines, [page_of_step(step.uses)] * len(lines))
            self.on_event(step, {"event": "retry" if attempt < attempts else "failed", "message": end.message})
        raise StepFailed(step.name, end.message, log)

    def _attempt(self, step: PlannedStep, artifacts: Mapping[str, Artifact], log: Path) -> ChildEnd:
        out, scratch = self.store.open_staging(step.key)
        order: StepOrder = {
            "address": step.uses,
            "packages": list(self.plan.packages),
            "settings": step.settings,
            "inputs": {
                slot: [_handle(artifacts[name]) for name in value]
                if isinstance(value, list)
                else _handle(artifacts[value])
                for slot, value in step.inputs.items()
            },
            "key": step.key,
            "out": str(out),
            "scratch": str(scratch),
            "device": step.device,
            "seed": step.seed,
            "num_threads": self.num_threads,
            "machine": dataclasses.asdict(self.plan.machine or describe_machine(step.device)),
            "log": str(log),
            "lock": str(self.store.home / "locks" / f"{step.key}.worker"),
            "cluster": self._cluster(step),
            "remote_code": list(self.plan.remote_code),
            "rehearsed": self.plan.rehearsed,
        }
        return run_child(
            order,
            on_event=lambda event: self.on_event(step, event),
            timeout_s=step.timeout_minutes * 60 if step.timeout_minutes is not None else None,
            preload=self.preload,
        )

    def _cluster(self, step: PlannedStep) -> ClusterOrder | None:
        """What the child needs to put its shards on a cluster; None where it works on them itself."""
        if step.runs_on.cluster is None:
            return None
        if self.connection is None:
            self.on_event(step, {"event": "note", "message": f"without Prefect here, not on {step.runs_on.cluster}"})
            return None
        return {
            "step": step.name,
            "cluster": step.runs_on.cluster,
            "workers": step.runs_on.workers,
            "address": step.runs_on.address,
            "gpus_per_shard": step.runs_on.gpus_per_shard,
            "remote_code": list(self.plan.remote_code),
            **self.connection(),
        }

    def _record(
        self, step: PlannedStep, inputs: Sequence[Artifact], end: ChildEnd, span: tuple[float, float], attempt: int
    ) -> JsonObject:
        """How the artifact came to be; kept in artifact.json."""
        code = code_state()
        machine = self.plan.machine or describe_machine(step.device)
        return {
            "pipeline": self.plan.pipeline,
            "run_id": self.run_id,
            "params": self.plan.params,
            "step": step.name,
            "uses": step.uses,
            "settings": step.settings,
            "inputs": step.parts["inputs"],
            "input_sessions": {artifact.key: session_of(read_record(artifact.path) or {}) for artifact in inputs},
            "seed": step.seed,
            "device": step.device,
            "num_threads": self.num_threads,
            "started_at": span[0],
            "seconds": span[1],
            "attempts": attempt,
            "peak_rss_mib": end.peak_rss_mib,
            "machine": dataclasses.asdict(machine),
            "versions": library_versions(),
            "runs_on": str(step.runs_on if self.connection is not None else HERE),
            "cpu_features": list(cpu_features()),
            "git_commit": code.commit,
            "git_changed": code.changed,
            "parts": step.parts,
        }

    @contextmanager
    def _key_lock(self, step: PlannedStep) -> Iterator[None]:
        with self.store.lock(step.key, wait=False) as acquired:
            if acquired:
                yield
                return
        self.on_event(step, {"event": "waiting", "message": "another process is making the same artifact"})
        with self.store.lock(step.key):
            yield

    @contextmanager
    def _machine(self, step: PlannedStep) -> Iterator[None]:
        """A measuring step has the machine to itself; other steps share it. Held across all homes of this user.

        A rehearsal, to be done in minutes, goes on beside what measures; what would measure waits for its step.
        """
        with open(open_machine_lock(), closefd=True) as file:
            if not try_lock(file, shared=not step.measures) and not self.plan.rehearsed:
                what = "a step that measures alone" if not step.measures else "other steps: it measures alone"
                self.on_event(step, {"event": "waiting", "message": f"waiting for {what}"})
                wait_for_lock(file, shared=not step.measures)
            yield


def _handle(artifact: Artifact) -> ArtifactHandle:
    return {
        "kind": type(artifact).__name__,
        "key": artifact.key,
        "path": str(artifact.path),
        "info": dict(artifact.info),
    }
