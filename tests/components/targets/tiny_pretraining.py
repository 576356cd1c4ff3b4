"""The settings of the smallest target that is worth training: three steps, in a second or two."""

from __future__ import annotations

from typing import Any, Final

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
