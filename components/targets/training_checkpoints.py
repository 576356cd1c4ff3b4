"""Exact checkpoints of a training run: safetensors plus JSON in its header, written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.targets.training_plan import TrainingPlan

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
    """Restore the newest checkpoint that this plan may go on from; its (step, seconds), or (0, 0.0) without one."""
    for path in (folder / LATEST, folder / STABLE):
        if not path.exists():
            continue
        with safe_open(path, framework="pt") as file:
            facts = file.metadata()
            step = int(facts["step"])
            if not plan.may_resume(step, json.loads(facts["plan"])):
                continue
            by_name = {name: parameter for parameter, name in names.items()}
            with torch.no_grad():
                for name, weight in weights.items():
                    weight.copy_(file.get_tensor(f"weights/{name}"))
            for key in file.keys():  # noqa: SIM118  (not a dict)
                kind, _, rest = key.partition("/")
                if kind in optimisers:
                    name, _, field = rest.rpartition("/")
                    parameter = by_name[name]
                    value = file.get_tensor(key)
                    where = parameter.device if value.ndim else value.device
                    optimisers[kind].state[parameter][field] = value.to(where)
            return step, float(facts["seconds"])
    return 0, 0.0


def checkpoint_weights(path: Path) -> tuple[int, dict[str, Tensor]]:
    """(steps done, fp32 weights by Hugging Face name) of a checkpoint."""
    with safe_open(path, framework="pt") as file:
        names = [key for key in file.keys() if key.startswith("weights/")]  # noqa: SIM118
        return int(file.metadata()["step"]), {name.removeprefix("weights/"): file.get_tensor(name) for name in names}
