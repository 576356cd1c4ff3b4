"""One sequential MTP module: its tensors, named as in DeepSeek-V3, and its training graph (mtp.py has the equations).

Shapes: B sequences, T columns, A attention heads, D head size, H hidden size.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from components.drafts.layers import AttentionProjections, BlockShape, RmsNorm, Rope, SwiGlu, attend_visible
from components.drafts.training_linear import TrainingLinear


@final
class SharedHead(nn.Module):
    """The norm before the LM head; the head itself is the target's."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)


@final
class MtpModule(nn.Module):
    """The tensors of one module, named as in DeepSeek-V3."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.rms_norm_eps
        self.enorm, self.hnorm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.eh_proj = TrainingLinear(2 * hidden, hidden)
        self.input_layernorm = RmsNorm(hidden, eps)
        self.self_attn = AttentionProjections(shape, hidden)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.mlp = SwiGlu(shape)
        self.shared_head = SharedHead(shape)

    def join(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """Embedding first, then the hidden state: [B, T, H] each -> [B, T, H]."""
        return self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)).float()

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The rest of the block after attention: residual [B, T, H], mixed [B, A, T, D]."""
        hidden = residual + self.self_attn.output(mixed)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def forward(self, embedded: Tensor, hidden: Tensor, rope: Rope, visible: Tensor | None = None) -> Tensor:
        """All columns at once, causal or masked by `visible`: [B, T, H] each -> [B, T, H]."""
        joined = self.join(embedded, hidden)
        normed = self.input_layernorm(joined)
        keys, values = self.self_attn.keys_values(normed, rope)
        mixed = attend_visible(self.self_attn.queries(normed, rope), keys, values, visible)
        return self.finish(joined, mixed)
