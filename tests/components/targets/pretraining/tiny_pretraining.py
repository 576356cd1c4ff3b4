"""The smallest targets that are worth training: three steps, in a second or two; and folders for their steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from components.contract import Context
from components.targets.pretraining.llama import LlamaShape
from components.targets.pretraining.plan import TrainingPlan

TINY: Final[dict[str, Any]] = {
    "hidden_size": 32,
    "num_layers": 8,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 48,
    "num_steps": 3,
    "decay_steps": 1,
    "tokens_per_step": 512,
    "sequence_length": 64,
    "decay_sequence_length": 256,
}
"""For pretrain_target; the size of the vocabulary is each test's own."""
SHAPE = LlamaShape(
    vocab_size=300, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=48, max_positions=64
)
PLAN = TrainingPlan(
    shape=SHAPE,
    num_steps=8,
    decay_steps=3,
    warmup_steps=2,
    tokens_per_step=256,
    sequence_length=32,
    decay_sequence_length=64,
    microbatch_tokens=128,
    num_processes=1,
)
SETTINGS: dict[str, Any] = {**TINY, "vocab_size": 300, "repetition_weight": 1.0, "unlikelihood_weight": 1.0}


def make_context(folder: Path) -> Context:
    for name in ("out", "scratch"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Context(key="target", out=folder / "out", scratch=folder / "scratch", num_threads=1)
