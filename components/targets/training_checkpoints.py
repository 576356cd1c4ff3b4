"""Exact checkpoints of a training run: safetensors with JSON in the header, written atomically."""

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
"""The last checkpoint before the decay, from which a run can continue with another decay."""


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
    partial = path.with_suffix(".partial")
    header = {"step": str(step), "seconds": repr(seconds), "plan": json.dumps(asdict(plan))}
    save_file(tensors, partial, metadata=header)
    os.replace(partial, path)


def load_checkpoint(
    folder: Path,
    plan: TrainingPlan,
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> tuple[int, float]:
    """Restore the newest checkpoint that this plan may resume; returns its (step, seconds), (0, 0.0) without one.

    Raises:
        UserError: a checkpoint is damaged, or is no regular file.
    """
    for path in (folder / LATEST, folder / STABLE):
        if os.path.lexists(path) and not path.is_file():
            raise UserError(f"{path}: no regular file; {AGAIN}")
    for path in (folder / LATEST, folder / STABLE):
        if not path.exists():
            continue
        step, seconds, saved_plan, tensors = _read(path)
        try:
            usable = plan.may_resume(step, saved_plan)
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
                device = parameter.device if value.ndim else value.device
                optimisers[kind].state[parameter][field] = value.to(device)
        return step, seconds
    return 0, 0.0


def checkpoint_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """(steps done, fp32 weights by Hugging Face name) of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith("weights/")]  # noqa: SIM118
        return int(file.metadata()["step"]), {name.removeprefix("weights/"): file.get_tensor(name) for name in names}


def _read(path: Path) -> tuple[int, float, dict[str, Any], dict[str, Tensor]]:
    """(steps, seconds, plan, tensors) of a checkpoint; raises UserError where it is damaged."""
    tensors, facts = read_tensors(path, AGAIN)
    try:
        step, seconds, saved_plan = int(facts["step"]), float(facts["seconds"]), json.loads(facts["plan"])
        is_valid = step >= 0 and 0 <= seconds < math.inf
    except (KeyError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: is damaged ({type(error).__name__}: {str(error)[:80]}); {AGAIN}") from error
    if not is_valid:
        raise UserError(f"{path}: says {step} steps in {seconds} seconds; {AGAIN}")
    return step, seconds, saved_plan, tensors


def _check_fit(
    path: Path,
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor],
    optimisers: Mapping[str, torch.optim.Optimizer],
    names: Mapping[Tensor, str],
) -> None:
    """Check that every weight is present, and other tensors are optimiser state: of their weight's shape, or a scalar.

    Raises UserError otherwise.
    """
    shapes = {name: parameter.shape for parameter, name in names.items()}
    misfits = [f"weights/{name}" for name in weights if f"weights/{name}" not in tensors]
    for key, tensor in tensors.items():
        kind, _, rest = key.partition("/")
        name = rest if kind == "weights" else rest.rpartition("/")[0]
        scalar = kind != "weights" and tensor.shape == () and key.endswith("/step")
        is_expected = kind in optimisers or (kind == "weights" and name in weights)
        if not is_expected or tensor.dtype != torch.float32 or not (scalar or tensor.shape == shapes.get(name)):
            misfits.append(key)
    fields: dict[str, set[str]] = {kind: set() for kind in optimisers}
    owners: dict[str, dict[str, set[str]]] = {kind: {} for kind in optimisers}
    for key in tensors:
        kind, _, rest = key.partition("/")
        if kind in optimisers:
            name, _, field = rest.rpartition("/")
            fields[kind].add(field)
            owners[kind].setdefault(name, set()).add(field)
    # an optimiser keeps the same fields for each of its weights
    misfits += [
        f"{kind}/{name}" for kind in owners for name, present in owners[kind].items() if present != fields[kind]
    ]
    if misfits:
        raise UserError(f"{path}: {misfits[0][:120]} does not fit the model that is trained here; {AGAIN}")
