"""Drafters for tests as steps leave them: weights that all matter, and the artifact of a drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from components.contract import Draft
from components.drafts.interface import AbstractDraft
from components.drafts.storage.files import save_draft
from components.targets.interface import AbstractTarget


def draw_wide(network: AbstractDraft, *, kept: tuple[str, ...] = ()) -> None:
    """Draw all weights but those named so wide that each of them changes the guesses; the same ones every time."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 1:
                weight.uniform_(0.6, 1.4, generator=generator)
            elif name not in kept:
                weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)


def saved_draft(
    folder: Path,
    network: AbstractDraft,
    settings: Mapping[str, Any],
    target: AbstractTarget,
    *,
    key: str = "d" * 64,
    target_key: str = "t" * 64,
    **facts: Any,
) -> Draft:
    """Write a drafter into `folder`, which is made when it is absent. facts: of its artifact beside the usual ones."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {"target_key": target_key, "num_steps": network.num_steps, "max_depth": network.max_depth}
    ids: Any = network.draft_ids
    save_draft(folder, network.method, settings, target, ids, network.state_dict(), {**sizes, **facts})
    return Draft(key=key, path=folder, info={"method": network.method, **sizes, **facts})
