"""Exact checkpoints of a training run: safetensors plus JSON in its header, written whole or not at all."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.contract import UserError
from components.targets.training_plan import TrainingPlan
from components.tensor_files import read_tensors

AGAIN: Final = "delete the file, and training goes on from what is left"
LATEST = "latest.safetensors"
STABLE = "stable.safetensors"
"""The last one before the decay: from here a run can go on with another decay."""


def save_checkpoint(
    path: Path,
    step: int,
    seconds: float,
    plan: TrainingPlan,
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> None:
    """Write weights and optimiser state after `step` steps and `seconds` of training. names: of each parameter."""
    tensors = {f"weights/{name}": weight.detach().contiguous() for name, weight in weights.items()}
    for kind, optimiser in optimisers.items():
        for parameter, state in optimiser.state.items():
            for field, value in state.items():
                tensors[f"{kind}/{names[parameter]}/{field}"] = torch.as_tensor(value).detach().contiguous()
    beside = path.with_suffix(".partial")
    save_file(tensors, beside, metadata={"step": str(step), "seconds": repr(seconds), "plan": json.dumps(asdict(plan))})
    os.replace(beside, path)


def load_checkpoint(
    folder: Path,
    plan: TrainingPlan,
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> tuple[int, float]:
    """Restore the newest checkpoint that this plan may go on from; its (step, seconds), or (0, 0.0) without one.

    Raises:
        UserError: a checkpoint is damaged, or no file at all.
    """
    for path in (folder / LATEST, folder / STABLE):
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"{path}: no regular file; {AGAIN}")
    for path in (folder / LATEST, folder / STABLE):
        if not path.exists():
            continue
        step, seconds, made_by, tensors = _read(path)
        try:
            usable = plan.may_resume(step, made_by)
        except (AttributeError, KeyError, TypeError) as error:
            raise UserError(f"{path}: was made by no plan that is known here; {AGAIN}") from error
        if not usable:
            continue
        _check_fit(path, tensors, weights, optimisers, names)
        by_name = {name: parameter for parameter, name in names.items()}
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(tensors[f"weights/{name}"])
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            if kind in optimisers:
                name, _, field = rest.rpartition("/")
                parameter = by_name[name]
                where = parameter.device if value.ndim else value.device
                optimisers[kind].state[parameter][field] = value.to(where)
        return step, seconds
    return 0, 0.0


def checkpoint_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """(steps done, fp32 weights by Hugging Face name) of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith("weights/")]  # noqa: SIM118
        return int(file.metadata()["step"]), {name.removeprefix("weights/"): file.get_tensor(name) for name in names}


def _read(path: Path) -> tuple[int, float, dict[str, Any], dict[str, Tensor]]:
    """(steps, seconds, plan, tensors) of a checkpoint; a UserError where it is not whole."""
    tensors, facts = read_tensors(path, AGAIN)
    try:
        step, seconds, made_by = int(facts["step"]), float(facts["seconds"]), json.loads(facts["plan"])
        sane = step >= 0 and 0 <= seconds < math.inf
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({type(error).__name__}: {str(error)[:80]}); {AGAIN}") from error
    if not sane:
        raise UserError(f"{path}: says {step} steps in {seconds} seconds; {AGAIN}")
    return step, seconds, made_by, tensors


def _check_fit(
    path: Path,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> None:
    """Every weight is there, and every other tensor is the state of one: of its shape, or one number.

    Raises:
        UserError: one is missing, is of another shape or type, or belongs to nothing.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    odd = [f"weights/{name}" for name in weights if f"weights/{name}" not in tensors]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        name = rest if kind == "weights" else rest.rpartition("/")[0]
        scalar = kind != "weights" and tensor.shape == () and key.endswith("/step")
        known = kind in optimisers or (kind == "weights" and name in weights)
        if not known or tensor.dtype != torch.float32 or not (scalar or tensor.shape == shapes.get(name)):
            odd.append(key)
    fields: dict[str, set[str]] = {kind: set() for kind in optimisers}
    owners: dict[str, dict[str, set[str]]] = {kind: {} for kind in optimisers}
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind in optimisers:
            name, _, field = rest.rpartition("/")
            fields[kind].add(field)
            owners[kind].setdefault(name, set()).add(field)
    # an optimiser keeps the same of each of its weights
    odd += [f"{kind}/{name}" for kind in owners for name, own in owners[kind].items() if own != fields[kind]]
    if odd:
        raise UserError(f"{path}: {odd[0][:120]} does not fit the model that is trained here; {AGAIN}")
