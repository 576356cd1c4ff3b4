"""Exact resume: everything the next optimiser step depends on, in one safetensors file that is written atomically.

Weights and the optimiser's moments are tensors; the step and the best held-out result are JSON in the file's own
metadata, so a single rename publishes all of it. The best weights so far lie beside it in a file named by their step.
Batches follow from the seed and the step (batches.py), so no generator needs saving.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from safetensors.torch import save_file
from torch import Tensor, nn

from components.contract import UserError
from components.drafts.optimizer import Optimizer
from components.tensor_files import read_tensors

CHECKPOINT = "checkpoint.safetensors"
REMEDY: Final = "delete the folder it is in, and training begins again"
MOST_STEPS: Final = 1 << 40
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW and of Muon


@dataclass
class Progress:
    """Where training stands. step: optimiser steps done. best_al: -1 before the first evaluation, never NaN."""

    step: int = 0
    best_step: int = 0
    best_al: float = -1.0
    best_by_workload: dict[str, float] = field(default_factory=dict)


def save_checkpoint(directory: Path, draft: nn.Module, optimizer: Optimizer, progress: Progress) -> None:
    """Publish the state after `progress.step` steps, then drop best weights that are no longer the best."""
    tensors = {f"weight.{name}": weight.detach() for name, weight in draft.state_dict().items()}
    for name, parameter in draft.named_parameters():
        moments = optimizer.moments(parameter)
        assert moments.keys() <= set(MOMENTS), f"the optimiser keeps {sorted(moments)}"
        tensors |= {f"{moment}.{name}": tensor for moment, tensor in moments.items()}
    write_tensors(directory / CHECKPOINT, tensors, {"progress": json.dumps(asdict(progress))})
    for file in directory.glob("best-*.safetensors"):
        if file != best_file(directory, progress):
            file.unlink()


def load_checkpoint(directory: Path, draft: nn.Module, optimizer: Optimizer) -> Progress:
    """Restore what `save_checkpoint` wrote; a fresh Progress where there is no checkpoint.

    Raises:
        UserError: the file is damaged, or is of another drafter.
    """
    file = directory / CHECKPOINT
    if not os.path.lexists(file):
        return Progress()
    tensors, metadata = read_tensors(file, REMEDY)
    progress = _parse_progress(metadata, file)
    weights = {name.removeprefix("weight."): tensor for name, tensor in tensors.items() if name.startswith("weight.")}
    _check_fit(file, weights, draft.state_dict(), "weight")
    parameters = dict(draft.named_parameters())
    for name, tensor in tensors.items():
        moment, _, owner = name.partition(".")
        if moment == "weight":
            continue
        if moment not in MOMENTS or owner not in parameters:
            raise UserError(f"{file}: {name[:120]} belongs to nothing; {REMEDY}")
        _check_fit(file, {owner: tensor}, {owner: parameters[owner]}, moment)
        if moment != "momentum_buffer" and not {f"exp_avg.{owner}", f"exp_avg_sq.{owner}"} <= tensors.keys():
            raise UserError(f"{file}: of {owner} one of AdamW's two moments is missing; {REMEDY}")
    draft.load_state_dict(weights)
    for name, parameter in parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS if f"{moment}.{name}" in tensors}
        optimizer.restore(parameter, moments, progress.step)
    return progress


def _parse_progress(metadata: Mapping[str, str], file: Path) -> Progress:
    """Parse a checkpoint's progress; a UserError where training cannot have made it."""
    try:
        record = json.loads(metadata["progress"])
        progress = Progress(**record)
        steps = (progress.step, progress.best_step)
        valid = all(type(step) is int for step in steps) and 0 <= progress.best_step <= progress.step <= MOST_STEPS
        lengths = [progress.best_al, *progress.best_by_workload.values()]
        valid &= all(isinstance(al, (int, float)) and math.isfinite(al) for al in lengths)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file}: does not say how far training was; {REMEDY}") from error
    if not valid:
        raise UserError(f"{file}: says what cannot be, {str(record)[:120]}; {REMEDY}")
    return progress


def _check_fit(file: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor], kind: str) -> None:
    """Raise UserError unless names, shapes and types are those expected."""
    mismatched = sorted(tensors.keys() ^ expected.keys())
    mismatched += [
        name
        for name, tensor in tensors.items()
        if name in expected and (tensor.shape, tensor.dtype) != (expected[name].shape, expected[name].dtype)
    ]
    if mismatched:
        raise UserError(f"{file}: its {kind} {mismatched[0][:120]} is not the drafter's that is trained here; {REMEDY}")


def save_best(directory: Path, draft: nn.Module, progress: Progress) -> None:
    """Write the weights of `progress.best_step`."""
    write_tensors(best_file(directory, progress), draft.state_dict(), {})


def load_best(directory: Path, draft: nn.Module, progress: Progress) -> dict[str, Tensor]:
    """Read the weights that `save_best` wrote for this drafter; raises UserError where the file is damaged."""
    file = best_file(directory, progress)
    tensors, _ = read_tensors(file, REMEDY)
    _check_fit(file, tensors, draft.state_dict(), "weight")
    return tensors


def best_file(directory: Path, progress: Progress) -> Path:
    return directory / f"best-{progress.best_step}.safetensors"


def truncate_metrics(file: Path, step: int) -> None:
    """Drop rows of metrics.jsonl after `step` and a torn last line: training will write them again."""
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    lines = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
    beside = file.with_suffix(".new")
    beside.write_text("".join(lines), encoding="utf-8")
    beside.replace(file)


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a new file, then rename it: a kill leaves the old file or the new one."""
    beside = file.with_suffix(".new")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, beside, metadata=metadata)
    beside.replace(file)
