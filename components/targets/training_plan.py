"""The plan of a pre-training run: its settings, and the phase and learning rate of every step.

The schedule is warmup-stable-decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395): no step before the decay depends on
when the decay begins, so its start can be moved while a run is under way.
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
        "decay_group_repeats",
        "repetition_weight",
        "repetition_ratio",
        "unlikelihood_weight",
        "unlikelihood_every",
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
    decay_group_repeats: Mapping[str, int] = field(default_factory=dict)
    repetition_weight: float = 0.0
    repetition_ratio: float = 0.5
    unlikelihood_weight: float = 0.0
    unlikelihood_every: int = 2
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

    def lr_scale(self, step: int) -> float:
        """Learning rate at a step as a fraction of its peak: linear up, flat, linear to zero."""
        if step >= self.decay_start:
            return (self.num_steps - step) / max(1, self.decay_steps)
        return min(1.0, (step + 1) / max(1, self.warmup_steps))

    def windows_at(self, step: int) -> tuple[int, int]:
        """(tokens in a window, number of the step's first window among those of its phase)."""
        if step >= self.decay_start:
            return self.decay_sequence_length, (step - self.decay_start) * (
                self.tokens_per_step // self.decay_sequence_length
            )
        return self.sequence_length, step * (self.tokens_per_step // self.sequence_length)

    def unlikelihood_at(self, step: int) -> bool:
        """Whether the step has the unlikelihood loss."""
        return (
            self.unlikelihood_weight > 0
            and step >= self.decay_start
            and (step - self.decay_start) % self.unlikelihood_every == 0
        )

    def stable_identity(self) -> dict[str, Any]:
        """The settings that determine the weights before the decay."""
        return {name: value for name, value in asdict(self).items() if name not in AFTER_STABLE}

    def may_resume(self, step: int, saved_plan: Mapping[str, Any]) -> bool:
        """Whether the weights after `step` steps of another plan equal those of this plan.

        saved_plan: `asdict` of the other plan, as read back from JSON.
        """
        other = plan_from_json(saved_plan)
        if self.stable_identity() != other.stable_identity() or step > self.num_steps:
            return False
        return self == other or step <= min(self.decay_start, other.decay_start)


def plan_from_json(facts: Mapping[str, Any]) -> TrainingPlan:
    """The plan from its `asdict`."""
    return TrainingPlan(**{**facts, "shape": LlamaShape(**facts["shape"])})
