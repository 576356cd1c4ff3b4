"""Machines that a plan can be made for: machines.yaml here, and the one beside pipelines.yaml that adds and changes.

A user's entry of a known name changes the values it gives and keeps the others. `here` is this machine, whose speed
nobody has printed: its estimates mean something once its own runs have calibrated them.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from components.contract import UserError
from components.machine import describe_machine
from components.outside_json import JsonObject
from components.text import did_you_mean
from flows.spec.diagnostics import Problems, show
from flows.spec.yaml_source import Lines, read_yaml

KNOWN = Path(__file__).with_name("machines.yaml")
HERE = "here"
PAGE = "my-model"
"""Of docs/, which explains the file."""
ASSUMED_TFLOPS_PER_CORE = 0.1
"""float32 of a core of `here`: 3 GHz, two fused products and sums of 8 numbers a cycle."""
ASSUMED_BANDWIDTH_GB_S = 20.0
MOST_GPUS = 1024
_COUNTED = re.compile(r"(?P<name>.+?)(?:x(?P<count>[1-9]\d{0,3}))?")

Positive = Field(gt=0)


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Tflops(_Entry):
    """1e12 operations a second, by the numbers that are multiplied."""

    float32: float = Positive
    bfloat16: float = Positive


class Host(_Entry):
    """What comes with each GPU, or with a machine without one."""

    cores: int = Positive
    memory_gb: float = Positive
    disk_gb: float | None = Field(default=None, gt=0)


class MachineEntry(_Entry):
    """One entry of machines.yaml, whose first lines say what each value is."""

    about: str
    kind: Literal["gpu", "cpu"]
    tflops: Tflops
    memory_gb: float = Positive
    bandwidth_gb_s: float = Positive
    link_gb_s: float | None = Field(default=None, gt=0)
    network_gb_s: float | None = Field(default=None, gt=0)
    host: Host | None = None
    seen_as: str = ""
    price: float | None = Field(default=None, ge=0)
    sources: list[str] = []


@dataclass(frozen=True)
class PlannedMachine:
    """A machine with a number of GPUs. `device` is what a step runs on: one GPU, or the whole of a CPU machine.

    A step with `nodes: N` runs on N such machines.
    """

    name: str
    device: MachineEntry
    count: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device.kind == "gpu"

    @property
    def memory(self) -> int:
        """Bytes that a process can have: of a GPU, or of the machine."""
        return int(self.device.memory_gb * 1e9)

    @property
    def disk(self) -> int | None:
        """Bytes of disk of the whole machine; None where it is the buyer's choice."""
        host = self.device.host
        return None if host is None or host.disk_gb is None else int(host.disk_gb * 1e9 * self.count)

    @property
    def price(self) -> float | None:
        """Of an hour of the whole machine."""
        return None if self.device.price is None else self.device.price * self.count

    def flops(self, dtype: str) -> float:
        """Operations a second of the device, at most."""
        return float(getattr(self.device.tflops, dtype)) * 1e12

    @property
    def bandwidth(self) -> float:
        """Bytes a second of the device's memory, at most."""
        return self.device.bandwidth_gb_s * 1e9

    def seconds_of_sending(self, between_gpus: float, between_machines: float) -> float:
        """Of so many bytes that each GPU sends to another of its machine, while the machine sends to another one."""
        links = (between_gpus, self.device.link_gb_s, 1), (between_machines, self.device.network_gb_s, self.count)
        return max(2 * sent / (rate * 1e9 * number) if rate else 0.0 for sent, rate, number in links)

    def is_like(self, measured: Mapping[str, object]) -> bool:
        """Whether something was measured on such a machine; measured: the fields of contract.Machine."""
        if self.name == HERE:
            return str(measured.get("machine_id")) == self.device.seen_as
        named = f"{measured.get('device_name', '')} {measured.get('cpu_model', '')}"
        return bool(self.device.seen_as) and self.device.seen_as.lower() in named.lower()


def find_machine(name: str, beside: Path) -> PlannedMachine:
    """The machine of a name like h100x8. beside: the pipelines file, whose folder may have a machines.yaml.

    Raises:
        UserError: there is none of that name; a line for each fault of the user's file.
    """
    entries, lines = _entries_of(KNOWN)
    users = beside.resolve().parent / KNOWN.name
    users_lines: Lines | None = None
    if users.is_file():
        changed, users_lines = _entries_of(users)
        for changes, entry in changed.items():
            entries[changes] = {**entries.get(changes, {}), **entry} if isinstance(entry, dict) else entry
    problems = Problems(str(users) if users.is_file() else KNOWN.name)
    machines = {each: _parsed(each, entry, users_lines or lines, problems) for each, entry in entries.items()}
    problems.stop()
    if name == HERE:
        return PlannedMachine(HERE, _this_machine(beside))
    match = _COUNTED.fullmatch(name)
    kind, count = (match["name"], int(match["count"] or 1)) if match and name not in machines else (name, 1)
    machine = machines.get(kind)
    if machine is None:
        names = did_you_mean(kind, [*machines, HERE], most_named=0) or f" (known: {', '.join([*machines, HERE])})"
        raise UserError(f"--on {name}: no such machine{names}; a machines.yaml beside {beside.name} adds one")
    if count > MOST_GPUS or (count > 1 and machine.kind == "cpu"):
        raise UserError(f"--on {name}: {kind} can be {'one' if machine.kind == 'cpu' else f'up to {MOST_GPUS}'}")
    return PlannedMachine(name, machine, count)


def _entries_of(file: Path) -> tuple[JsonObject, Lines]:
    """{name: entry as it is written} and the lines of the file."""
    content, lines = read_yaml(file)
    problems = Problems(str(file))
    for word in content:
        if word != "machines":
            problems.add(lines.at(word), f"unknown word '{word}': the file is 'machines:' alone", page=PAGE)
    entries = content.get("machines")
    if not isinstance(entries, dict):
        problems.add(lines.at("machines"), "'machines:' must be a mapping of names", page=PAGE)
    problems.stop()
    assert isinstance(entries, dict)
    return dict(entries), lines


def _parsed(name: str, entry: object, lines: Lines, problems: Problems) -> MachineEntry | None:
    """The entry, or None after noting its faults."""
    try:
        return MachineEntry.model_validate(entry)
    except ValidationError as error:
        for fault in error.errors(include_url=False):
            place = fault["loc"]
            word = ".".join(map(str, place)) or name
            if fault["type"] == "extra_forbidden":
                inner: dict[str, type[_Entry]] = {"tflops": Tflops, "host": Host}
                words = inner.get(str(place[0]), MachineEntry).model_fields
                what = f"unknown word '{place[-1]}'{did_you_mean(place[-1], words, most_named=20)}"
            elif fault["type"] == "missing":
                what = f"'{word}' is missing"
            else:
                what = f"'{word}': {fault['msg'][0].lower()}{fault['msg'][1:]}, not {show(fault['input'])}"
            problems.add(lines.at("machines", name, *place), f"machine '{name}': {what}", page=PAGE)
        return None


def _this_machine(beside: Path) -> MachineEntry:
    """This machine's processor, at speeds that are assumed."""
    facts = describe_machine()
    disk, memory = shutil.disk_usage(beside.resolve().parent).free / 1e9, psutil.virtual_memory().total / 1e9
    tflops = ASSUMED_TFLOPS_PER_CORE * facts.num_cores
    return MachineEntry(
        about=f"this machine, {facts.cpu_model}, {facts.num_cores} cores",
        kind="cpu",
        tflops=Tflops(float32=tflops, bfloat16=tflops),
        memory_gb=memory,
        bandwidth_gb_s=ASSUMED_BANDWIDTH_GB_S,
        host=Host(cores=facts.num_cores, memory_gb=memory, disk_gb=disk),
        seen_as=facts.machine_id,
        sources=[f"memory, disk: what is there; tflops and bandwidth are assumed: {ASSUMED_TFLOPS_PER_CORE} a core"],
    )
