"""The data-parallel training loop of the built-in target: Muon for matrices, AdamW for embeddings and gains.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (torch.optim.Muon). Every process holds the whole
model, computes its share of a step's windows on one thread, and averages gradients once a step (gloo).
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from components.targets.lean_llama import LeanLlama, initial_weights
from components.targets.quality import held_out_loss
from components.targets.repetition import WINDOW_TOKENS, repetition_loss, synthetic_loops
from components.targets.token_windows import TokenWindows
from components.targets.training_checkpoints import LATEST, STABLE, load_checkpoint, save_checkpoint
from components.targets.training_plan import TrainingPlan
from components.targets.unlikelihood import BATCH, PROMPT_TOKENS, GreedyWriter, unlikelihood_loss

REPORT_EVERY = 20
"""Steps between reports."""

SCORE_EVERY = 200
"""Steps between measurements of the held-out loss on a few windows."""

SCORED_WINDOWS = 32
"""Held-out windows of each group in such a measurement; the model card uses all of them."""

Report = Callable[[int, dict[str, float]], None]
"""(steps done, metrics) -> nothing; called by process 0 only."""


def keep_freed_memory() -> None:
    """Tell glibc to keep freed blocks: giving megabytes back at every operation costs an eighth of a CPU step."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        m_trim_threshold, m_top_pad, m_mmap_max = -1, -2, -4
        mallopt(m_mmap_max, 0)
        mallopt(m_trim_threshold, 2**31 - 1)
        mallopt(m_top_pad, 2**28)


def join_group(rendezvous: Path, rank: int, num_processes: int) -> None:
    """Join the process group that meets at a file; it uses the loopback interface and picks its port itself."""
    if num_processes == 1:
        return
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_processes, timeout=timedelta(minutes=15)
    )


def leave_group(num_processes: int) -> None:
    """Leave the group, so that another one can be joined later."""
    if num_processes > 1:
        dist.destroy_process_group()


class TrainingRun:
    """One process's share of a run.

    streams: training tokens [tokens] uint16 before the decay, and during it. scratch: the folder of checkpoints. rank:
    number of this process, from 0. The newest usable checkpoint is restored: `steps_done`, `seconds_done`.
    """

    def __init__(
        self, plan: TrainingPlan, streams: tuple[np.ndarray, np.ndarray], scratch: Path, rank: int = 0
    ) -> None:
        self.plan, self.scratch, self.rank = plan, scratch, rank
        self.device = torch.device(plan.device)
        self.weights = {
            name: torch.nn.Parameter(weight.detach().to(self.device))
            for name, weight in initial_weights(plan.shape, plan.seed).items()
        }
        self.names: dict[Tensor, str] = {weight: name for name, weight in self.weights.items()}
        self.model = LeanLlama(plan.shape, self.weights, getattr(torch, plan.dtype), plan.compile_layers)
        self.plain = LeanLlama(plan.shape, self.weights, self.model.dtype)
        """The same model uncompiled, for the few passes of other shapes."""
        matrices = [weight for name, weight in self.weights.items() if "layers" in name and weight.ndim == 2]
        vectors = [weight for weight in self.weights.values() if weight.ndim == 1]
        embedding = self.weights["model.embed_tokens.weight"]
        self.optimisers: dict[str, torch.optim.Optimizer] = {
            "muon": torch.optim.Muon(matrices, lr=plan.matrix_lr, weight_decay=plan.weight_decay, momentum=0.95),
            "adamw": torch.optim.AdamW(
                [{"params": [embedding], "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
                lr=plan.vector_lr,
                betas=(0.9, 0.95),
            ),
        }
        stable, self.decay_stream = streams
        self.stable_windows = TokenWindows(stable, plan.sequence_length, plan.seed)
        self.decay_windows = TokenWindows(self.decay_stream, plan.decay_sequence_length, plan.seed)
        self.prompt_windows = TokenWindows(self.decay_stream, PROMPT_TOKENS, plan.seed)
        self.writer: GreedyWriter | None = None
        self.steps_done, self.seconds_done = load_checkpoint(scratch, plan, self.weights, self.optimisers, self.names)

    def train(
        self,
        report: Report | None,
        *,
        held_out: Mapping[str, np.ndarray] | None = None,
        checkpoint_seconds: float = 300.0,
        until: int | None = None,
    ) -> float:
        """Train from `steps_done` to the end of the plan, or to step `until`.

        held_out: windows of each group [windows, length + 1]; process 0 scores a few of each every SCORE_EVERY steps.
        Returns the seconds spent training, those before an interruption included.
        """
        step, last = self.steps_done, self.plan.num_steps if until is None else until
        saved_at, began = time.monotonic(), time.monotonic() - self.seconds_done
        losses: list[float] = []
        if self.rank == 0 and step >= last:
            self._save(step, self.seconds_done)  # LATEST may be another plan's
        while step < last:
            losses.append(self.step(step))
            step += 1
            if self.rank == 0 and report is not None and (step % REPORT_EVERY == 0 or step == last):
                scored = held_out if step % SCORE_EVERY == 0 or step == last else None
                report(step, {"loss": float(np.mean(losses)), **self._metrics(step, scored, time.monotonic() - began)})
                losses = []
            milestone = step in (last, self.plan.decay_start)
            if self.rank == 0 and (milestone or time.monotonic() - saved_at > checkpoint_seconds):
                self._save(step, time.monotonic() - began)
                saved_at = time.monotonic()
        return time.monotonic() - began

    def _metrics(self, step: int, scored: Mapping[str, np.ndarray] | None, seconds: float) -> dict[str, float]:
        losses = {
            f"held_out_loss_{group}": held_out_loss(self.plain, rows, SCORED_WINDOWS)
            for group, rows in (scored or {}).items()
        }
        tokens_seen = float(step * self.plan.tokens_per_step)
        return {**losses, "lr_scale": self.plan.lr_scale(step - 1), "tokens_seen": tokens_seen, "seconds": seconds}

    def step(self, step: int) -> float:
        """Do optimiser step number `step` (from 0); returns the mean loss over all processes, nats per token."""
        loss = self._gradients(step)
        torch.nn.utils.clip_grad_norm_(list(self.weights.values()), self.plan.max_grad_norm)
        scale = self.plan.lr_scale(step)
        for optimiser, peak in zip(self.optimisers.values(), (self.plan.matrix_lr, self.plan.vector_lr), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = peak * scale
            optimiser.step()
            optimiser.zero_grad(set_to_none=False)
        return loss

    def _gradients(self, step: int) -> float:
        count = 0
        total = torch.zeros((), device=self.device)
        for tokens in self._microbatches(step):
            loss = self.model.loss(tokens)
            loss.backward()
            total += loss.detach()
            count += 1
        if step >= self.plan.decay_start:
            self._add_gradients_against_loops(step, share_of_total=count)
        gradients = [weight.grad for weight in self.weights.values() if weight.grad is not None]
        flat = torch.cat([*(gradient.reshape(-1) for gradient in gradients), total.reshape(1)]) / count
        if self.plan.num_processes > 1:
            dist.all_reduce(flat)
            flat /= self.plan.num_processes
        offset = 0
        for gradient in gradients:
            gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
            offset += gradient.numel()
        return float(flat[-1])

    def _add_gradients_against_loops(self, step: int, share_of_total: int) -> None:
        """share_of_total: the number by which this process's summed gradients are divided afterwards."""
        plan = self.plan
        if plan.repetition_weight > 0:
            random = np.random.default_rng((plan.seed, step, self.rank))
            loops = synthetic_loops(self.decay_stream, random, min(WINDOW_TOKENS, plan.shape.max_positions))
            loss = repetition_loss(self.plain, loops.to(self.device), plan.repetition_ratio)
            (loss * plan.repetition_weight * share_of_total).backward()
        if plan.unlikelihood_at(step):
            if self.writer is None:
                self.writer = GreedyWriter(plan)
            first = ((step - plan.decay_start) // plan.unlikelihood_every * plan.num_processes + self.rank) * BATCH
            prompts = torch.from_numpy(self.prompt_windows.batch(first, BATCH)[:, :PROMPT_TOKENS]).to(self.device)
            continuations = self.writer.write(self.weights, prompts)
            loss = unlikelihood_loss(self.plain, prompts, continuations)
            (loss * plan.unlikelihood_weight * share_of_total).backward()

    def _microbatches(self, step: int) -> Iterator[Tensor]:
        length, first = self.plan.windows_at(step)
        share = self.plan.tokens_per_step // length // self.plan.num_processes
        windows = self.decay_windows if step >= self.plan.decay_start else self.stable_windows
        rows = windows.batch(first + self.rank * share, share)
        for piece in torch.from_numpy(rows).split(max(1, self.plan.microbatch_tokens // length)):
            yield piece.to(self.device)

    def _save(self, step: int, seconds: float) -> None:
        names = [LATEST]
        names += [STABLE] if step <= self.plan.decay_start else []
        for name in names:
            path = self.scratch / name
            save_checkpoint(path, step, seconds, self.plan, self.weights, self.optimisers, self.names)
