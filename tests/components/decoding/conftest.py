"""A tiny float32 target with random but decided weights: real passes, no training, no files."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from components.targets.forward.llama import FastTarget
from components.targets.shape import shape_of


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny passes gain nothing from a second thread and lose a lot on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> FastTarget:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()
    # Larger than the usual 0.02: outputs then depend on the whole context and their margins are wide.
    weights = {name: 8 * w if w.dim() == 2 else w for name, w in weights.items()}
    return FastTarget(
        config,
        shape_of(config, "tiny"),
        weights.__getitem__,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernel="plain",
        has_lm_head=True,
    )
