"""What the steps that are still to run take on this machine: one line before the first of them.

Most of it is an estimate, which is said and refuses nothing. Refused is what surely has no room: more bytes on the disk
than are free, counted from answers that are there and from the sizes of drafters, and more memory for a drafter's
gradients and moments than the machine has. Steps whose shards a cluster carries, and servers, are elsewhere. The
arithmetic needs torch, so it is done by a child of the steps' fork server, which is started for them anyway.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from components.tables import duration, format_bytes
from flows.execution.engine import Engine
from flows.execution.step_process import ask_child
from flows.planning.plan import Plan, PlannedStep
from flows.spec.diagnostics import InputError
from flows.spec.references import flat
from flows.spec.schema import RetentionSpec
from storage.artifacts.store import Store
from storage.collect import find_items

SECONDS: Final = 60.0
"""After which nothing is said: a run does not wait longer for its cost."""
_LONG: Final = ("bench.", "drafts.train_draft", "data.features", "data.record_features", "data.write_answers")
"""Beginnings of the addresses of steps that take long; a run without any of them says nothing."""
_MEASURED: Final = ("as measured", "measured efficiency", "its time budget and the measured rest")
_KEPT: Final = ("gradients", "optimiser")
"""Parts of the memory of training that are there whatever the batches are; train_draft refuses by them too."""


def cost_ahead(plan: Plan, store: Store, file: Path) -> str:
    """The line; "" for a run with nothing long to do.

    Raises:
        InputError: the disk or the memory of this machine is surely too small.
    """
    to_run = [step for step in plan.steps if not step.reused]
    if plan.rehearsed or not any(step.uses.startswith(_LONG) for step in to_run):
        return ""
    question = {
        "pipeline": plan.pipeline,
        "stages": [[step.name, step.uses, step.settings, _as_lists(step)] for step in to_run],
        "keys": {name: artifact.key for name, artifact in plan.sources.items()}
        | {step.name: step.key for step in plan.steps if step.reused},
        "home": str(store.home),
        "file": str(file),
    }
    preload = (Engine.__init__.__kwdefaults__ or {})["preload"]
    answer = ask_child("flows.planning.estimate:estimate_rest", question, SECONDS, preload)
    if "steps" not in answer:
        reason = answer.get("fault", f"no answer within {SECONDS:g} s")
        return f"what it takes cannot be said yet: {reason}"
    steps = {step.name: step for step in to_run}
    here = [each for each in answer["steps"] if steps[each["name"]].runs_on.cluster is None]
    here = [each for each in here if each["kind"] != "serving"]
    if faults := [*_disk_faults(answer["steps"], plan, store), *_memory_faults(here, plan)]:
        raise InputError(faults, ["operate"] * len(faults))
    return _line(answer["steps"], here, plan, store)


def free_disk(home: Path) -> int:
    """Bytes that are free where a home is, or will be."""
    place = next(folder for folder in (home.resolve(), *home.resolve().parents) if folder.is_dir())
    return shutil.disk_usage(place).free


def all_memory() -> int:
    """Bytes of memory of this machine, whoever has them now."""
    return int(psutil.virtual_memory().total)


def _as_lists(step: PlannedStep) -> dict[str, list[str]]:
    return {slot: flat({slot: names}) for slot, names in step.inputs.items()}


def _disk_faults(estimates: Sequence[dict[str, Any]], plan: Plan, store: Store) -> list[str]:
    keys = {step.name: step.key for step in plan.steps}
    sure = {each["name"]: each["sure_disk"] - _begun(store, keys[each["name"]]) for each in estimates}
    needed, free = sum(max(0, size) for size in sure.values()), free_disk(store.home)
    if needed <= free:
        return []
    largest = max(sure, key=lambda name: sure[name])
    rule = plan.retention or RetentionSpec()
    items = find_items(store.home, store, runs=rule.keep_runs, versions=rule.keep_versions, features=rule.features)
    frees = sum(item.num_bytes for item in items)
    mend = f"`draftsmith gc` frees {format_bytes(frees)}" if frees else "free some, or move DRAFTSMITH_HOME"
    if plan.step(largest).uses == "data.record_features":
        mend += ", storage: fp8 halves features, and data.features_on_the_fly stores none"
    what = f"at least {format_bytes(needed)} are still to be written, {format_bytes(sure[largest])} of it by {largest}"
    return [f"{what}, and the disk of {store.home} has {format_bytes(free)} free: {mend}"]


def _begun(store: Store, key: str) -> int:
    """Bytes that a killed run has left of an artifact, and that it goes on from."""
    folders = (store.home / "partial" / key, store.home / "partial" / f"{key}.scratch")
    return sum(file.stat().st_size for folder in folders for file in folder.rglob("*") if file.is_file())


def _memory_faults(estimates: Sequence[dict[str, Any]], plan: Plan) -> list[str]:
    if plan.device != "cpu":
        return []
    faults, memory = [], all_memory()
    for each in estimates:
        needed = sum(each["memory"].get(part, 0) for part in _KEPT) if each["kind"] == "training" else 0
        if needed > memory:
            what = f"gradients and moments of its drafter need {format_bytes(needed)} of memory"
            faults.append(
                f"step '{each['name']}': {what}, and this machine has {format_bytes(memory)}: train a smaller one"
                f" (draft_vocab_size, settings), or `draftsmith plan {plan.pipeline} --on h100x8` for one that has it"
            )
    return faults


def _line(every: Sequence[dict[str, Any]], here: Sequence[dict[str, Any]], plan: Plan, store: Store) -> str:
    """What the estimates say. every: of all steps; here: of those that this machine does itself."""
    disk, free = sum(each["disk"] for each in every), free_disk(store.home)
    parts = [f"{format_bytes(disk)} of disk ({format_bytes(free)} free)"]
    if plan.device != "cpu":
        return f"about {parts[0]}; `draftsmith plan {plan.pipeline} --on h100x1` estimates its hours on a GPU"
    seconds = sum(each["seconds"] for each in here)
    measured = sum(each["seconds"] for each in here if each["seconds_by"] in _MEASURED)
    peak, memory = max((sum(each["memory"].values()) for each in here), default=0), all_memory()
    parts.append(f"at least {format_bytes(peak)} of memory ({format_bytes(memory)} here)")
    least = "at least" if any(each["seconds_by"] == "not counted" for each in here) else "about"
    by = f"{measured / max(seconds, 1e-9):.0%} of the time by what was measured here" if measured else "all assumed"
    line = f"{least} {duration(seconds)} here, {', '.join(parts)}; {by}"
    if disk > free or any(each["faults"] for each in here):
        line += f"; by that it does not fit: `draftsmith plan {plan.pipeline} --on here` says what would help"
    return line
