"""Block drafters (DFlash, DSpark), the frozen parts of their target and one batch, in a file for any trainer.

Tensors: `CASE.*` under speculators' names; `embed`, `head` [V, H], `norm`; `ids`, `mask` [T], `taps`, `last` [T, ...]
of one text; `tap_layers`; `CASE.draft_ids`. The metadata has the settings of every case and the sizes of the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.eagle3_sample import FrozenParts
from components.drafts.interface import Batch
from components.drafts.storage.files import build_draft


def draw_weights(draft: torch.nn.Module) -> None:
    """Draw every weight anew, wide enough that each shows in the results."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
            else:
                weight.uniform_(0.6, 1.4, generator=generator)


def write_cases(file: Path, target: Any, drafts: Mapping[str, Any], text: Mapping[str, Tensor], head: Tensor) -> None:
    """Write drafters by the name of their case. text: ids, mask, taps, last; head: [V, H], the target's."""
    shape = asdict(target.shape) if is_dataclass(target.shape) else vars(target.shape)
    tensors = {name: tensor.clone() for name, tensor in text.items()}
    tensors |= {"embed": target.embedding.float().clone(), "head": head, "tap_layers": torch.tensor(target.tap_layers)}
    ones = torch.ones(1, 1, shape["hidden_size"])
    tensors["norm"] = target.final_norm(ones)[0, 0] * (1 + shape["rms_norm_eps"]) ** 0.5
    cases = []
    for name, draft in drafts.items():
        tensors |= {f"{name}.{part}": weight.detach().clone() for part, weight in draft.state_dict().items()}
        tensors[f"{name}.draft_ids"] = draft.draft_ids.clone()
        settings = draft.settings.model_dump(mode="json")
        cases.append({**settings, "name": name, "method": draft.method, "mask_token_id": draft.mask_token_id})
    save_file(tensors, file, {"cases": json.dumps({"cases": cases, "shape": shape})})


def read_case(file: Path, device: str) -> tuple[Any, Batch]:
    """The only drafter of a written sample, and its batch."""
    with safe_open(file, framework="pt") as opened:
        said = json.loads(opened.metadata()["cases"])
    tensors = {name: tensor.to(device) for name, tensor in load_file(file).items()}
    (case,) = said["cases"]
    frozen = (tensors[name] for name in ("embed", "norm", "head"))
    target: Any = FrozenParts(
        SimpleNamespace(**said["shape"]), *frozen, tap_layers=tuple(tensors["tap_layers"].tolist())
    )
    name, settings = case["name"], {key: value for key, value in case.items() if key not in ("name", "method")}
    draft = build_draft(case["method"], target, settings, tensors[f"{name}.draft_ids"])
    state = {part.removeprefix(f"{name}."): weight for part, weight in tensors.items() if part.startswith(f"{name}.")}
    del state["draft_ids"]
    draft.load_state_dict(state)
    ids, mask, taps, last = (tensors[part][None] for part in ("ids", "mask", "taps", "last"))
    return draft, Batch(ids, mask, taps, last, torch.tensor([ids.shape[1]], device=device))
