"""Settings with which a step that does not fit a machine would: the first of a list that the estimate takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from components.drafts.training.batches import padded_length
from flows.planning.workload import Stage, Work, Workload, divides

HALVED = ("batch_size", "tokens_per_pass", "concurrency")
"""Settings that say how much is in memory at once, and change nothing else."""
DIVIDING = frozenset({"data.write_answers", "data.record_features", "bench.measure_acceptance"})
"""Steps that start the processes of a target with tp_size."""


class _Spread(NamedTuple):
    """A target among so many GPUs. words: the setting of load_target; "" for as it is."""

    words: str
    among: tuple[int, bool]


def remedy(workload: Workload, stage: Stage, fits: Callable[[Work], bool]) -> str:
    """The settings with which a step fits, as they are written; "" where none is known.

    The workload knows the step afterwards as it was.
    """
    target = next(iter(stage.inputs.get("target", ())), "")
    as_it_is = workload.shared.get(target, (1, False))
    try:
        for spread, changes in itertools.product(_spreads(workload, stage, target), _changes(workload, stage)):
            if not spread.words and not changes:
                continue
            workload.shared[target] = spread.among
            if fits(workload.of(replace(stage, settings={**stage.settings, **changes}))):
                words = [f"{name}: {str(value).lower()}" for name, value in changes.items()]
                return " and ".join([*words, *([spread.words] if spread.words else [])])
        return ""
    finally:
        workload.shared[target] = as_it_is
        workload.of(stage)


def _spreads(workload: Workload, stage: Stage, target: str) -> Iterator[_Spread]:
    """As it is first; by layers, which every step can open; then within layers."""
    yield _Spread("", workload.shared.get(target, (1, False)))
    size = workload.targets.get(target)
    if size is None or workload.count == 1:
        return
    yield _Spread(f"device_map: auto at '{target}'", (workload.count, False))
    if stage.address in DIVIDING and divides(workload.count, size):
        yield _Spread(f"tp_size: {workload.count} at '{target}'", (workload.count, True))


def _changes(workload: Workload, stage: Stage) -> list[dict[str, Any]]:
    """Other values of the step's own settings, those that cost least first."""
    settings = stage.settings
    changes: list[dict[str, Any]] = [{}]
    if stage.address == "drafts.train_draft":
        stream = workload.streams.get(next(iter(stage.inputs.get("features", ())), ""))
        count = workload.count - (stream.passes.devices if stream else 0)
        if workload.on_gpu and count < 1:
            return changes
        return changes + _of_training(settings, count if workload.on_gpu else 0)
    if settings.get("dtype") == "float32":
        changes.append({"dtype": "bfloat16"})
    for name in HALVED:
        value = settings.get(name)
        while isinstance(value, int) and value > 1:
            value //= 2
            changes.append({name: value})
    return changes


def _of_training(settings: dict[str, Any], num_gpus: int) -> list[dict[str, Any]]:
    """Other ways to train the same drafter with the same batches."""
    ranks = settings["processes"] * settings["nodes"]
    if num_gpus and settings["processes"] > num_gpus:
        return [{"processes": num_gpus, "nodes": math.ceil(ranks / num_gpus)}]
    parts: dict[str, Any] = {"micro_batch_tokens": padded_length(settings["max_tokens"])}
    less: list[dict[str, Any]] = [{"recompute": True}, *([{"sharding": "full"}] if ranks > 1 else []), parts]
    several = itertools.chain.from_iterable(itertools.combinations(less, number) for number in (1, 2, 3))
    return [{name: value for each in some for name, value in each.items()} for some in several]
