"""Two records of policy.json: a ranked drafter, and one depth for several workloads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RankedDrafter:
    """One drafter in one setting at its chosen depth, as ranked among all drafters."""

    draft_key: str
    method: str
    depth_k: int
    tree_budget: int | None  # draft tokens verified in a pass; None: a chain of depth_k
    draft_vocab: int | None  # tokens that the drafter can propose; None: not known
    speedup_pred: float
    pred_lo: float
    pred_hi: float
    p_best: float
    regret: float
    chosen: bool


@dataclass(frozen=True)
class Mixture:
    """One depth for all workloads of one drafter at one batch size."""

    draft_key: str
    method: str
    batch_size: int
    stated: bool  # whether the shares were stated; otherwise they are those of the measured tokens
    shares: dict[str, float]  # workload -> share of decoded tokens; they add up to 1
    depth_k: int
    speedup_pred: float  # of that depth over the mixture
    pred_lo: float
    pred_hi: float
    depths_apart: dict[str, int]  # workload -> the depth it would choose for itself
    speedup_apart: float  # of the mixture, each workload at its own depth
    loss: float  # 1 - speedup_pred / speedup_apart
    loss_by_workload: dict[str, float]
