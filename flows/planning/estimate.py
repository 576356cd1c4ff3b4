"""What a run will take: seconds of every step by a roofline, its memory, disk and network, and what does not fit.

A step takes START_SECONDS, the time that its settings give it, and

    max(operations / peak, bytes / bandwidth) / efficiency + max(bytes between GPUs / link, between machines / network).

Efficiencies are those of steps that were measured on such a machine, wherever this home has any: the same step with the
same method, else with others. Else they are the defaults below.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from components.contract import Artifact, UserError
from components.data.collect.prompts import bytes_of_first_prompts
from components.outside_json import JsonObject
from components.positions import read_prompt_lengths
from flows.planning.machines import HERE as THIS_MACHINE
from flows.planning.machines import PlannedMachine, find_machine
from flows.planning.rehearsal import StandIns
from flows.planning.remedies import remedy
from flows.planning.wiring import WiredStep, Wiring
from flows.planning.workload import Kind, Lengths, Stage, Work, Workload, in_bytes, source_of
from flows.spec.placement import HERE
from storage.artifacts.records import ArtifactRecord
from storage.artifacts.store import DamagedRecord, Store

START_SECONDS = 2.0
OTHER_SECONDS = 5.0
"""Of a step whose work is not worked out, where none was measured."""
EFFICIENCY: Mapping[Kind, tuple[float, float]] = {
    "serving": (0.5, 0.3),
    "decoding": (0.3, 0.18),
    "passes": (0.4, 0.32),
    "training": (0.3, 0.45),
}
"""Kind of work -> the share of the roofline that is reached on a GPU and on a CPU, where nothing was measured.

Those of a CPU are what the built-in target and ten methods reached on two cores, at ASSUMED_TFLOPS_PER_CORE.
"""
GPU_PROGRAM_BYTES = 1_000_000_000
"""On a GPU without its tensors: context, kernels, workspaces."""
PROGRAM_BYTES: Mapping[Kind, int] = {
    "training": 700_000_000,
    "decoding": 500_000_000,
    "passes": 500_000_000,
    "budget": 500_000_000,
}
"""Of a process on a CPU without its tensors, with kernels and held-out evaluation, where nothing was measured."""
LEAST_PROGRAM_BYTES = 330_000_000
"""Of a process for any other kind of work."""
SERVER = "data.features_from_server"
LESS_DISK: Mapping[str, str] = {
    SERVER: "storage: none stores none",
    "data.record_features": "data.features_on_the_fly stores none",
}
"""Address of a step that stores hidden states -> what does not."""
UNKNOWN_NETWORK = "no network_gb_s is known of this machine, so what its machines send each other takes no time here"
SPARE = 0.05
"""Of a GPU's memory, that fragments and cannot be had."""
NOT_COUNTED = "not counted"
"""Where the time of a step is from, that has none."""
MAPPED = "mapped files"
"""The part of a step's memory that it gives back where others need it."""
MOST_TIMES_LARGER = 10.0
"""Than the work of a step that was timed, for its efficiency to speak for another: of a small one most is overhead."""
MOST_PER_CASE = 4
"""Steps that calibrate another, the newest."""
PROMPTS_SEEN = 200
"""Of a file of prompts, the first, which say how long they are before any is answered."""
BYTES_PER_TOKEN = 4
"""Of English, Chinese and code alike, roughly, where a target has a large vocabulary."""
TEMPLATE_TOKENS = 16
"""That a chat template adds to a question, roughly."""


@dataclass(frozen=True)
class Measured:
    """A step that was done on such a machine. raw: the seconds of its roofline at efficiency 1."""

    seconds: float
    peak_bytes: int
    raw: float
    counted: int  # bytes of memory, by the arithmetic


@dataclass(frozen=True)
class StepEstimate:
    """One step. seconds_by: where its time is from, in words; memory: of one device, by part.

    at_server: those of the devices that a server of features has.
    """

    name: str
    kind: Kind
    seconds: float
    seconds_by: str
    memory: dict[str, int]
    disk: int
    sure_disk: int
    network: int
    linked: int
    across: int
    devices: int
    machines: int
    at_server: int = 0
    notes: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class RunEstimate:
    """All steps of a run. assumed: what the numbers rest on, in words."""

    steps: tuple[StepEstimate, ...]
    skipped: tuple[tuple[str, str], ...]
    assumed: tuple[str, ...]
    faults: tuple[str, ...]
    seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", sum(step.seconds for step in self.steps))

    @property
    def machines(self) -> int:
        """Of those that one step runs on, the most: all are held as long as the run takes."""
        return max((step.machines for step in self.steps), default=1)

    @property
    def disk(self) -> int:
        return sum(step.disk for step in self.steps)

    @property
    def network(self) -> int:
        return sum(step.network for step in self.steps)


class Estimator:
    """Estimates runs on a machine, with what a home knows of such machines."""

    def __init__(
        self, machine: PlannedMachine, store: Store, config_of: Callable[[str], str], *, rough: bool = False
    ) -> None:
        """rough: at once, as a run says it before its first step (Workload); one step of the past speaks for others."""
        self.machine, self.store, self.config_of, self.rough = machine, store, config_of, rough
        self._records: dict[str, ArtifactRecord] = {}
        for key in store.keys():  # noqa: SIM118 (a store is no mapping)
            try:
                self._records[key] = store.record_of(key)
            except DamagedRecord:
                continue  # `doctor` says so; a plan does without
        self._works: dict[str, Work | None] = {}
        self._timed: dict[str, list[str]] = {}  # address -> steps that were timed on such a machine, newest first
        for key in reversed(self._records):
            record = self._records[key]["record"]
            alone = record.get("runs_on", str(HERE)) == str(HERE)
            if alone and machine.is_like(record.get("machine", {})) and record.get("seconds"):
                self._timed.setdefault(str(record["uses"]), []).append(key)

    def run(self, wiring: Wiring, pipeline: str, sources: Mapping[str, Artifact]) -> RunEstimate:
        """Estimate the steps of a pipeline. sources: its outside inputs, by the name of each."""
        measured = self._lengths(pipeline)
        workload = self._workload(measured | _lengths_seen(wiring.steps, measured))
        self._outside(workload, {name: artifact.key for name, artifact in sources.items()})
        steps = []
        for step in wiring.steps:
            inputs = {slot: tuple([names] if isinstance(names, str) else names) for slot, names in step.inputs.items()}
            stage = Stage(step.name, step.address, step.settings, inputs)
            estimate = self.step(stage, workload.of(stage))
            if estimate.faults and (helps := remedy(workload, stage, partial(self._fits, stage))):
                estimate = replace(estimate, faults=(f"{estimate.faults[0]}: set {helps}", *estimate.faults[1:]))
            steps.append(estimate)
        disk, faults = self.machine.disk, []
        if disk is not None and (needed := sum(step.disk for step in steps)) > disk:
            largest, step = max(zip(steps, wiring.steps, strict=True), key=lambda pair: pair[0].disk)
            where = f"{in_bytes(largest.disk)} of it by {largest.name}"
            faults.append(f"the run leaves {in_bytes(needed)} on a disk of {in_bytes(disk)}, {where}")
            if less := LESS_DISK.get(step.address):
                half = "storage: fp8 halves that, and " if step.settings["storage"] == "bf16" else ""
                faults[0] += f": {half}{less}"
        faults += [f"{step.name}: {fault}" for step in steps for fault in step.faults]
        return RunEstimate(tuple(steps), wiring.skipped, self._assumed(workload, steps), tuple(faults))

    def rest(self, pipeline: str, stages: Sequence[Stage], keys: Mapping[str, str]) -> tuple[StepEstimate, ...]:
        """Estimate the steps of a run that are still to be done. keys: name -> key of what they take that is there."""
        measured = self._lengths(pipeline)
        workload = self._workload(measured | _lengths_seen(stages, measured))
        self._outside(workload, keys)
        return tuple(self.step(stage, workload.of(stage)) for stage in stages)

    def step(self, stage: Stage, work: Work) -> StepEstimate:
        """One step by its work."""
        past = self._like(stage)
        seconds, by = self._seconds(work, past, self._like(stage, any_method=True) if not past else [])
        kind, notes = work.kind, work.notes
        if work.beside is not None:
            passes = self._like(replace(stage, address=SERVER, settings={}))
            served, served_by = self._seconds(work.beside, passes, [])
            how = "the slower counts" if self.machine.is_gpu else "on one processor, so both count"
            notes += (f"training takes {seconds:,.0f} s and its server {served:,.0f} s ({served_by}): {how}",)
            if not self.machine.is_gpu:
                seconds += served
            elif served > seconds:
                seconds, by, kind = served, served_by, work.beside.kind
        program = GPU_PROGRAM_BYTES if self.machine.is_gpu else PROGRAM_BYTES.get(work.kind, LEAST_PROGRAM_BYTES)
        if past and not self.machine.is_gpu:
            least = LEAST_PROGRAM_BYTES if work.memory else 0  # where more was counted than there was
            program = max(least, round(statistics.median(each.peak_bytes - each.counted for each in past)))
        return StepEstimate(
            name=stage.name,
            kind=kind,
            seconds=seconds,
            seconds_by=by,
            memory={"program": program, **work.memory, **({MAPPED: work.mapped} if work.mapped else {})},
            disk=work.disk,
            sure_disk=work.sure_disk,
            network=work.network,
            linked=round(work.linked),
            across=round(work.across),
            devices=work.devices,
            machines=work.machines,
            at_server=work.beside.devices if work.beside else 0,
            notes=notes + ((UNKNOWN_NETWORK,) if work.across and not self.machine.device.network_gb_s else ()),
            faults=tuple(self._faults(work, program)),
        )

    def _fits(self, stage: Stage, work: Work) -> bool:
        return not self.step(stage, work).faults

    def raw_seconds(self, work: Work) -> float:
        """Of a step, at efficiency 1 and without its start."""
        roofline = max(work.flops / self.machine.flops(work.dtype), work.moved / self.machine.bandwidth)
        return work.seconds + roofline + self.machine.seconds_of_sending(work.linked, work.across)

    def _seconds(self, work: Work, past: Sequence[Measured], alike: Sequence[Measured]) -> tuple[float, str]:
        """The seconds of a step, and where they are from. alike: the same step with other methods."""
        raw = self.raw_seconds(work)
        if past and (work.kind in ("other", "uncounted") or not raw):
            return statistics.median(each.seconds for each in past), "as measured"
        if past and work.kind == "budget":  # a longer time to measure in does not make its processes start slower
            rest = max(0.0, statistics.median(each.seconds - each.raw for each in past))
            return raw + rest, "its time budget and the measured rest"
        past, alike = ([each for each in of if raw <= MOST_TIMES_LARGER * each.raw] for of in (past, alike))
        if past:
            slowness = statistics.median(max(0.0, each.seconds - START_SECONDS) / each.raw for each in past)
            return START_SECONDS + raw * slowness, "measured efficiency"
        if work.kind in EFFICIENCY:
            timed = work.seconds + self.machine.seconds_of_sending(work.linked, work.across)
            efficiency = EFFICIENCY[work.kind][not self.machine.is_gpu]
            if rates := [each.raw / max(each.seconds - START_SECONDS, 0.1) for each in alike if each.raw]:
                return START_SECONDS + raw / statistics.median(rates), "efficiency of other methods"
            return START_SECONDS + timed + (raw - timed) / efficiency, "default efficiency"
        if work.kind == "uncounted":
            return 0.0, NOT_COUNTED
        if work.kind == "other":
            return OTHER_SECONDS, "assumed"
        return START_SECONDS + raw, {"budget": "its time budget"}.get(work.kind, "default rate")

    def _faults(self, work: Work, program: int) -> Iterable[str]:
        """What does not fit this machine."""
        room = self.machine.memory * (1.0 - SPARE) if self.machine.is_gpu else self.machine.memory
        needed = sum(work.memory.values()) + program
        if needed > room:
            largest = max(work.memory, key=lambda name: work.memory[name])
            what = f"needs {in_bytes(needed)} of {in_bytes(self.machine.memory)}"
            yield f"{what}, {in_bytes(work.memory[largest])} of it {largest}"
        if work.devices > self.machine.count * work.machines:
            each = " of each machine" if work.machines > 1 else ""
            yield f"needs {work.devices // work.machines} GPUs{each}, and {self.machine.name} has {self.machine.count}"
        yield from work.faults

    def _like(self, stage: Stage, *, any_method: bool = False) -> list[Measured]:
        """What this home knows of such a step on such a machine, the newest few; any_method: of other methods too."""
        steps: list[Measured] = []
        method = stage.settings.get("method")
        for key in self._timed.get(stage.address, ()):
            if len(steps) == (1 if self.rough else MOST_PER_CASE):
                break
            if any_method or self._records[key]["record"]["settings"].get("method") == method:
                steps += self._measured(key)
        return steps

    def _measured(self, key: str) -> list[Measured]:
        """A step that was done; none where its work cannot be worked out."""
        record = self._records[key]["record"]
        if key not in self._works:
            try:
                self._works[key] = self._done(key)
            except (UserError, KeyError):  # its target's files are gone, or its settings are of an older version
                self._works[key] = None
        work = self._works[key]
        if work is None or work.beside is not None:  # nothing says how long training waited for its server
            return []
        peak = round(record.get("peak_rss_mib", 0.0) * 2**20)
        counted = sum(work.memory.values()) + work.mapped
        return [Measured(record["seconds"], peak, self.raw_seconds(work), counted)]

    def _done(self, key: str) -> Work:
        """The work of a step that was done, by the counts of its artifact and of those behind it."""
        works: dict[str, Work] = {}
        self._go_through(key, self._workload({}), works)
        return works[key]

    def _go_through(self, key: str, workload: Workload, works: dict[str, Work]) -> None:
        if key in works or key not in self._records:
            return
        stage = self._stage_of(key)
        for name in (name for names in stage.inputs.values() for name in names):
            self._go_through(name, workload, works)
        works[key] = workload.of(stage)

    def _stage_of(self, key: str) -> Stage:
        record = self._records[key]["record"]
        inputs = {
            slot: tuple([keys] if isinstance(keys, str) else keys) for slot, keys in record.get("inputs", {}).items()
        }
        return Stage(key, str(record["uses"]), record["settings"], inputs, self._records[key]["info"])

    def _outside(self, workload: Workload, keys: Mapping[str, str]) -> None:
        """Let the workload know what is there already, by name -> key: it finds it under the names."""
        for name, key in keys.items():
            self._go_through(key, workload, {})
            workload.name_also(key, name)

    def _workload(self, lengths: Mapping[str, Lengths]) -> Workload:
        machine, host = self.machine, self.machine.device.host
        return Workload(
            on_gpu=machine.is_gpu,
            memory=machine.memory,
            lengths=lengths,
            config_of=self.config_of,
            count=machine.count,
            rough=self.rough,
            host_memory=int(host.memory_gb * 1e9 * machine.count) if host is not None else None,
        )

    def _lengths(self, pipeline: str) -> dict[str, Lengths]:
        """Mean lengths of what was answered here: by the name of a step of this pipeline, or by `source_of` prompts."""
        lengths: dict[str, Lengths] = {}
        for key, content in self._records.items():
            record, info = content["record"], content["info"]
            rows = sum(info["num_rows"].values()) if "num_answer_tokens" in info and "num_rows" in info else 0
            if not rows:
                continue
            most = record["settings"].get("max_new_tokens")
            answer, length = info["num_answer_tokens"] / rows, info["num_tokens"] / rows
            longest = max((test.tokens for test in read_prompt_lengths(self.store.path_of(key))), default=0)
            of_rows = Lengths(length - answer, answer / most if most else 1.0, length, longest, measured=True)
            prompts = self._records.get(str(record["inputs"].get("prompts")))
            if prompts is not None and (source := source_of(prompts["record"]["settings"])):
                lengths[source] = of_rows
            if record.get("pipeline") == pipeline:
                lengths[str(record["step"])] = of_rows
        return lengths

    def _assumed(self, workload: Workload, steps: Sequence[StepEstimate]) -> tuple[str, ...]:
        """What the numbers rest on."""
        defaults = [step for step in steps if step.seconds_by == "default efficiency"]
        words = list(workload.assumed)
        column = int(not self.machine.is_gpu)
        for kind in dict.fromkeys(step.kind for step in defaults):
            words.append(f"{kind} reaches {EFFICIENCY[kind][column]:.0%} of the roofline (a default, not measured)")
        if any(step.seconds_by == "assumed" for step in steps):
            words.append(f"a step whose work is not worked out takes {OTHER_SECONDS:g} s (assumed)")
        return tuple(words)


def configs_beside(file: Path) -> Callable[[str], str]:
    """How the configurations of models are found without a hub: in `configs` beside the pipelines file too."""
    return StandIns(_no_server, configs=file.resolve().parent / "configs").model


def _no_server(engine: str) -> str:
    raise AssertionError(f"an estimate asks no server, and {engine} was asked for")


def estimate_rest(question: JsonObject) -> JsonObject:
    """Estimates of the steps that a run still has to make, {"steps": [...]}: asked by a process that has no torch.

    question: "pipeline", "file", "home"; "stages", (name, address, settings, inputs) of each; "keys" as for `rest`.

    Raises:
        UserError: a configuration that they need is not on this machine.
    """
    file = Path(question["file"])
    machine, store = find_machine(THIS_MACHINE, file), Store(question["home"])
    estimator = Estimator(machine, store, configs_beside(file), rough=True)
    stages = [Stage(name, address, settings, inputs) for name, address, settings, inputs in question["stages"]]
    return {"steps": [asdict(step) for step in estimator.rest(question["pipeline"], stages, question["keys"])]}


def _lengths_seen(steps: Sequence[WiredStep | Stage], measured: Mapping[str, Lengths]) -> dict[str, Lengths]:
    """Mean lengths of the prompts in files of which no length was measured, by `source_of` them."""
    lengths: dict[str, Lengths] = {}
    for step in steps:
        if step.address == "data.collect_prompts" and (source := source_of(step.settings)) not in measured:
            file, longest = step.settings["source"], step.settings["max_prompt_characters"]
            try:
                sizes = bytes_of_first_prompts(file, PROMPTS_SEEN, longest)
            except UserError:
                continue  # `check` says so, and the step would
            if sizes:
                tokens = statistics.fmean(sizes) / BYTES_PER_TOKEN + TEMPLATE_TOKENS
                lengths[source] = Lengths(tokens, num_seen=len(sizes))
    return lengths
