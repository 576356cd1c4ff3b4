"""The frozen weights a drafter shares with the target: embedding, rows of the LM head, weight of the final norm.

An AbstractTarget exposes the last two as functions. They are linear (the head) and diagonal (an RMSNorm), so feeding
unit vectors reads the weights back exactly, whatever the model calls them, with every scale the model applies folded
in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from components.targets.interface import AbstractTarget

ROWS_AT_ONCE = 256


def embedded(target: AbstractTarget, ids: Tensor) -> Tensor:
    """The target's frozen embedding of target ids: int64 [...] -> float32 [..., H]."""
    return F.embedding(ids, target.embedding).float()


@torch.no_grad()
def head_rows(target: AbstractTarget, token_ids: Tensor) -> Tensor:
    """The rows of the target's LM head for token_ids [N]: float32 [N, H]."""
    hidden = target.shape.hidden_size
    identity = torch.eye(hidden, dtype=target.dtype, device=target.device)
    ids = token_ids.to(target.device)
    parts = [target.unembed(rows[None])[0].float().index_select(-1, ids) for rows in identity.split(ROWS_AT_ONCE)]
    return torch.cat(parts).T.contiguous()


@torch.no_grad()
def norm_weight_of(target: AbstractTarget) -> Tensor:
    """The weight of the target's final RMSNorm: float32 [H]. norm(1, ..., 1) = weight / sqrt(1 + eps)."""
    ones = torch.ones(1, 1, target.shape.hidden_size, dtype=target.dtype, device=target.device)
    return target.final_norm(ones)[0, 0].float() * (1 + target.shape.rms_norm_eps) ** 0.5
