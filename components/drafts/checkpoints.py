"""Exact resume: everything the next optimiser step depends on, in one safetensors file that is there or is not.

Weights and the optimiser's moments are tensors; the step and the best held-out result are JSON in the file's own
metadata, so a single rename publishes all of it. The best weights so far lie beside it in a file named by their step.
Batches follow from the seed and the step (batches.py), so no generator needs saving.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from components.drafts.optimizer import Optimizer

CHECKPOINT = "checkpoint.safetensors"
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
    """Put back what `save_checkpoint` wrote; a fresh Progress when there is none."""
    file = directory / CHECKPOINT
    if not file.is_file():
        return Progress()
    with safe_open(file, framework="pt") as opened:
        progress = Progress(**json.loads(opened.metadata()["progress"]))
    tensors = load_file(file)
    draft.load_state_dict(
        {name.removeprefix("weight."): t for name, t in tensors.items() if name.startswith("weight.")}
    )
    for name, parameter in draft.named_parameters():
        moments = {moment: tensors[f"{moment}.{name}"] for moment in MOMENTS if f"{moment}.{name}" in tensors}
        optimizer.restore(parameter, moments, progress.step)
    return progress


def save_best(directory: Path, draft: nn.Module, progress: Progress) -> None:
    """Keep the weights of `progress.best_step`."""
    write_tensors(best_file(directory, progress), draft.state_dict(), {})


def load_best(directory: Path, progress: Progress) -> dict[str, Tensor]:
    """The weights that `save_best` kept."""
    return load_file(best_file(directory, progress))


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
