"""One training loop for every drafting method: warm-up and cosine, clipping, exact resume, held-out evaluation.

A run is determined by its settings and seed alone: batches follow from the seed, threads are pinned, and a
checkpoint holds all that the next step depends on, so a killed and resumed run ends with the same bits as an
uninterrupted one. The result is the weights with the best held-out acceptance length, not of the lowest loss.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from components.contract import Context
from components.data.features import Example, FeatureSource
from components.drafts.batches import BatchOrder
from components.drafts.checkpoints import (
    Progress,
    load_best,
    load_checkpoint,
    save_best,
    save_checkpoint,
    truncate_metrics,
)
from components.drafts.draft import AbstractDraft, StepLosses
from components.drafts.held_out import measure
from components.drafts.optimizer import Optimizer, OptimizerName

Precision = Literal["auto", "float32", "bfloat16"]
FINAL_LR_SHARE = 0.05  # the cosine ends here, as a share of the peak


@dataclass(frozen=True)
class Schedule:
    """How to train. Lengths in optimiser steps."""

    num_steps: int
    peak_lr: float
    warmup_share: float
    weight_decay: float
    clip_norm: float
    eval_every: int
    checkpoint_every: int
    precision: Precision
    optimizer: OptimizerName = "muon"
    muon_lr_scale: float = 10.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of step 0, 1, ...: linear warm-up, then a cosine down to FINAL_LR_SHARE of the peak."""
        warmup = max(1, round(self.warmup_share * self.num_steps))
        if step < warmup:
            return self.peak_lr * (step + 1) / warmup
        done = (step - warmup) / max(1, self.num_steps - warmup)
        return self.peak_lr * (FINAL_LR_SHARE + (1 - FINAL_LR_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 where the machine multiplies it natively (CUDA, avx512_bf16, AMX), else float32."""
    if precision != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[precision]
    if device.type == "cuda":
        return torch.bfloat16
    capabilities = torch.cpu.get_capabilities()
    native = bool(capabilities.get("avx512_bf16")) or bool(capabilities.get("amx_bf16"))
    return torch.bfloat16 if native else torch.float32


def train(
    draft: AbstractDraft,
    features: FeatureSource,
    order: BatchOrder,
    held_out: Sequence[Example],
    schedule: Schedule,
    ctx: Context,
    *,
    warm_start: bool = False,
) -> tuple[dict[str, Tensor], Progress]:
    """Train, or resume from ctx.scratch; returns the best weights and their progress.

    warm_start: evaluate the initial weights as step 0, since they are trained already.
    """
    torch.set_num_threads(ctx.num_threads)
    device = torch.device(ctx.device)
    optimizer = Optimizer(draft, schedule.optimizer, schedule.weight_decay, schedule.muon_lr_scale)
    progress = load_checkpoint(ctx.scratch, draft, optimizer)
    truncate_metrics(ctx.out / "metrics.jsonl", progress.step or -1)
    if progress.step:
        ctx.note(f"goes on from optimiser step {progress.step}")
    dtype = resolve_precision(schedule.precision, device)
    batches = order.from_step(progress.step)
    if warm_start and not progress.step:
        _evaluate(draft, held_out, progress, ctx)
    draft.train()
    while progress.step < schedule.num_steps:
        batch = order.batch(features, next(batches), device)._replace(step=progress.step)
        with _deterministic_kernels(device):
            with _autocast(device, dtype):
                result = draft.losses(batch)
            norm = optimizer.update(result.loss, schedule.learning_rate(progress.step), schedule.clip_norm)
        progress.step += 1
        _record_step(ctx, progress.step, result, norm, schedule.learning_rate(progress.step - 1))
        last = progress.step == schedule.num_steps
        if last or progress.step % schedule.eval_every == 0:
            _evaluate(draft, held_out, progress, ctx)
        if last or progress.step % schedule.checkpoint_every == 0:
            save_checkpoint(ctx.scratch, draft, optimizer, progress)
        ctx.progress(progress.step, schedule.num_steps, f"{draft.method}: loss {float(result.loss.detach()):.3f}")
    return load_best(ctx.scratch, draft, progress), progress


def _autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


@contextmanager
def _deterministic_kernels(device: torch.device) -> Iterator[None]:
    """On a GPU select deterministic kernels: others sum some gradients in the order in which blocks finish.

    An operator without one only warns, in the step's log.
    """
    if device.type != "cuda":
        yield
        return
    enabled = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # cuBLAS is deterministic only with fixed-size workspaces
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


def _record_step(ctx: Context, step: int, result: StepLosses, norm: float, learning_rate: float) -> None:
    proxy = (result.accepted / result.num_reachable.clamp(min=1)).sum()
    ctx.record(
        step,
        loss=float(result.loss.detach()),
        teacher_forced_al=1.0 + float(proxy),
        grad_norm=norm,
        learning_rate=learning_rate,
    )


def _evaluate(draft: AbstractDraft, held_out: Sequence[Example], progress: Progress, ctx: Context) -> None:
    """Measure held-out acceptance length, log it by workload, and save the weights when they are the best so far."""
    draft.eval()
    result = measure(draft, held_out, draft.num_steps, torch.device(ctx.device))
    draft.train()
    al = result.total.acceptance_length
    by_workload = {name: tally.acceptance_length for name, tally in sorted(result.by_workload.items())}
    ctx.record(progress.step, held_out_al=al, **{f"held_out_al/{name}": value for name, value in by_workload.items()})
    if al > progress.best_al:
        progress.best_step, progress.best_al, progress.best_by_workload = progress.step, al, by_workload
        save_best(ctx.scratch, draft, progress)
