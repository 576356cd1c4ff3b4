"""Exact resume: everything the next optimiser step depends on, in one safetensors file that is there or is not.

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
AGAIN: Final = "delete the folder it is in, and training begins again"
MOST_STEPS: Final = 1 << 40
MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer")  # of AdamW and of Muon


@dataclass
class Progress:
    """Where training stands. step: optimiser steps done. best_al is NaN-free: -1 before the first held-out look."""

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
    """Put back what `save_checkpoint` wrote; a fresh Progress when there is none.

    Raises:
        UserError: the file is damaged, or is of another drafter.
    """
    file = directory / CHECKPOINT
    if not os.path.lexists(file):
        return Progress()
    tensors, metadata = read_tensors(file, AGAIN)
    progress = _progress_in(metadata, file)
    weights = {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    _check_fit(file, weights, draft.state_dict(), "weight")
    parameters = dict(draft.named_parameters())
    for name, tensor in tensors.items():
        moment, _, whose = name.partition(".")
        if moment == "weight":
            continue
        if moment not in MOMENTS or whose not in parameters:
            raise UserError(f"{file}: {name[:120]} belongs to nothing; {AGAIN}")
        _check_fit(file, {whose: tensor}, {whose: parameters[whose]}, moment)
        if moment != "momentum_buffer" and not {f"exp_avg.{whose}", f"exp_avg_sq.{whose}"} <= tensors.keys():
            raise UserError(f"{file}: of {whose} one of AdamW's two moments is missing; {AGAIN}")
    draft.load_state_dict(weights)
    for name, parameter in parameters.items():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS if f"{moment}.{name}" in tensors}
        optimizer.restore(parameter, moments, progress.step)
    return progress


def _progress_in(metadata: Mapping[str, str], file: Path) -> Progress:
    """What a checkpoint says of itself; a UserError where that is no progress that training can make."""
    try:
        told = json.loads(metadata["progress"])
        progress = Progress(**told)
        steps = (progress.step, progress.best_step)
        known = all(type(step) is int for step in steps) and 0 <= progress.best_step <= progress.step <= MOST_STEPS
        lengths = [progress.best_al, *progress.best_by_workload.values()]
        sane = all(isinstance(al, (int, float)) and math.isfinite(al) for al in lengths)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{file}: does not say how far training was; {AGAIN}") from error
    if not known or not sane:
        raise UserError(f"{file}: says what cannot be, {str(told)[:120]}; {AGAIN}")
    return progress


def _check_fit(file: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], what: str) -> None:
    """The same names, shapes and types, or a UserError."""
    odd = sorted(found.keys() ^ wanted.keys())
    odd += [n for n in found if n in wanted and (found[n].shape, found[n].dtype) != (wanted[n].shape, wanted[n].dtype)]
    if odd:
        raise UserError(f"{file}: its {what} {odd[0][:120]} is not the drafter's that is trained here; {AGAIN}")


def save_best(directory: Path, draft: nn.Module, progress: Progress) -> None:
    """Keep the weights of `progress.best_step`."""
    write_tensors(best_file(directory, progress), draft.state_dict(), {})


def load_best(directory: Path, draft: nn.Module, progress: Progress) -> dict[str, Tensor]:
    """The weights that `save_best` kept of this drafter; raises UserError where the file is damaged."""
    file = best_file(directory, progress)
    tensors, _ = read_tensors(file, AGAIN)
    _check_fit(file, tensors, draft.state_dict(), "weight")
    return tensors


def best_file(directory: Path, progress: Progress) -> Path:
    return directory / f"best-{progress.best_step}.safetensors"


def keep_metrics_until(file: Path, step: int) -> None:
    """Drop rows of metrics.jsonl beyond `step` and a torn last line: training will write them again."""
    if not file.is_file():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:
            kept.append(line)
    beside = file.with_suffix(".new")
    beside.write_text("".join(kept), encoding="utf-8")
    beside.replace(file)


def write_tensors(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write beside, then rename: a kill leaves the old file or the new one."""
    beside = file.with_suffix(".new")
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, beside, metadata=metadata)
    beside.replace(file)
