"""What a pre-training run is: its settings, and the phase and learning rate of every step (warm-up, stable, decay).

The schedule is warmup-stable-decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): until the decay begins a step depends
on nothing that comes later, so the decay can be placed when one knows how much time is left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from components.targets.lean_llama import LlamaShape

AFTER_STABLE = frozenset(
    {
        "num_steps",
        "decay_steps",
        "decay_sequence_length",
        "unlikelihood_steps",
        "unlikelihood_weight",
        "unlikelihood_lr_scale",
    }
)
"""Fields that change nothing before the decay begins."""


@dataclass(frozen=True)
class TrainingPlan:
    """Settings of the language-model phase; `pretrain_target` explains each of them."""

    shape: LlamaShape = field(default_factory=LlamaShape)
    num_steps: int = 6000
    warmup_steps: int = 100
    decay_steps: int = 1700
    tokens_per_step: int = 8192
    sequence_length: int = 256
    decay_sequence_length: int = 1024
    matrix_lr: float = 0.02
    vector_lr: float = 3e-3
    weight_decay: float = 0.02
    unlikelihood_steps: int = 0
    unlikelihood_weight: float = 1.0
    unlikelihood_lr_scale: float = 0.1
    max_grad_norm: float = 1.0
    microbatch_tokens: int = 2048
    num_processes: int = 2
    dtype: str = "bfloat16"
    compile_layers: bool = False
    device: str = "cpu"
    seed: int = 0

    @property
    def decay_start(self) -> int:
        """The first step of the decay phase."""
        return self.num_steps - self.decay_steps

    @property
    def total_steps(self) -> int:
        """Steps of the language-model phases and of the unlikelihood phase after them."""
        return self.num_steps + self.unlikelihood_steps

    def lr_scale(self, step: int) -> float:
        """Learning rate at a step as a fraction of its peak: linear up, flat, linear to zero; unlikelihood likewise."""
        if step >= self.num_steps:
            return self.unlikelihood_lr_scale * (self.total_steps - step) / self.unlikelihood_steps
        if step >= self.decay_start:
            return (self.num_steps - step) / max(1, self.decay_steps)
        return min(1.0, (step + 1) / max(1, self.warmup_steps))

    def windows_at(self, step: int) -> tuple[int, int]:
        """(tokens in a window, number of the step's first window among windows of that length)."""
        if step >= self.decay_start:
            return self.decay_sequence_length, (step - self.decay_start) * (
                self.tokens_per_step // self.decay_sequence_length
            )
        return self.sequence_length, step * (self.tokens_per_step // self.sequence_length)

    def stable_identity(self) -> dict[str, Any]:
        """Everything that decides the weights before the decay begins."""
        return {name: value for name, value in asdict(self).items() if name not in AFTER_STABLE}

    def may_resume(self, step: int, made_by: Mapping[str, Any]) -> bool:
        """Are the weights after `step` steps of another plan those that this plan would have made?

        made_by: `asdict` of the plan that made them, as read back from JSON.
        """
        other = plan_from_json(made_by)
        if self.stable_identity() != other.stable_identity() or step > self.total_steps:
            return False
        if step <= min(self.decay_start, other.decay_start):
            return True
        decays_alike = all(
            getattr(self, name) == getattr(other, name)
            for name in ("num_steps", "decay_steps", "decay_sequence_length")
        )
        return self == other or (decays_alike and step <= self.num_steps)


def plan_from_json(facts: Mapping[str, Any]) -> TrainingPlan:
    """The plan that `asdict` took apart."""
    return TrainingPlan(**{**facts, "shape": LlamaShape(**facts["shape"])})
