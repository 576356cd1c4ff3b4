"""The training graph of a small Llama: all columns at once, and greedy chains from all columns at once.

Tensors bear their Hugging Face names, so the weights are a Llama checkpoint less its config.json. Column t reads
x_{t+1} at position t, as everywhere in this room: its output drafts x_{t+2}. x_0 is never read.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from components.drafts.causal_mask import CausalMask
from components.drafts.layers import BlockShape, LlamaLayer, RmsNorm, Rope
from components.drafts.unrolled import attend, finish_block


@final
class LlamaStack(nn.Module):
    """The tensors of `model.*`."""

    def __init__(self, shape: BlockShape, num_layers: int, vocab_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(num_layers))
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, tokens: Tensor, causal: CausalMask) -> Tensor:
        """Tokens int64 [B, T] and the mask of their columns -> normed hidden states [B, T, H]."""
        hidden = self.embed_tokens(tokens).float()
        rope, visible = Rope(self.shape, causal.positions), causal.visible
        for layer in self.layers:
            hidden = layer(hidden, rope, visible)
        return self.norm(hidden)


@final
class Chains:
    """Step 0 reads every column; step k then reads, for each column t, draft token k of the chain that begins there.

    The mask is [causal | I | I | ...] in every layer, as in unrolled.py. S columns of one sequence.
    """

    def __init__(self, stack: LlamaStack) -> None:
        self.stack = stack
        self.keys_values: list[
            list[tuple[Tensor, Tensor]]
        ] = []  # for each step and layer: keys and values [1, G, S, D]

    def step(self, tokens: Tensor) -> Tensor:
        """Feed one token a column, int64 [1, S]; returns normed hidden states [1, S, H]."""
        shape, columns = self.stack.shape, torch.arange(tokens.shape[1], device=tokens.device)
        rope = Rope(shape, columns + len(self.keys_values))
        masked = (columns > columns[:, None])[None, None, None]  # [1, 1, 1, S, S]
        hidden, keys_values = self.stack.embed_tokens(tokens).float(), []
        for index, layer in enumerate(self.stack.layers):
            assert isinstance(layer, LlamaLayer)
            normed = layer.input_layernorm(hidden)
            keys_values.append(layer.self_attn.keys_values(normed, rope))
            steps = [*(step_cache[index] for step_cache in self.keys_values), keys_values[-1]]
            queries = layer.self_attn.queries(normed, rope)
            hidden = finish_block(layer, hidden, attend(shape, queries, *steps[0], masked, steps[1:]))
        self.keys_values.append(keys_values)
        return self.stack.norm(hidden)


def narrower(shape: BlockShape, hidden_size: int, intermediate_size: int) -> BlockShape:
    """Scale a block to another width, with the same head size and about the same proportions.

    hidden_size: a multiple of the head size. intermediate_size: 0 keeps the proportion.
    """
    heads = hidden_size // shape.head_dim
    group = max(divisor for divisor in range(1, shape.group + 1) if heads % divisor == 0)
    return BlockShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size or shape.intermediate_size * hidden_size // shape.hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=heads // group,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
    )
