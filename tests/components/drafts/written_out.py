"""A decoder block written out head by head, to hold the batched one against."""

from __future__ import annotations

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """x [heads, rows, D] at positions [rows], pair (i, i + D/2) as a complex number times exp(i * angle)."""
    half = x.shape[-1] // 2
    angles = positions[:, None].double() * 10000.0 ** (-torch.arange(half).double() / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((pairs.real, pairs.imag), -1).float()


def block(weights: dict[str, Tensor], at: str, joined: Tensor) -> Tensor:
    """A causal Llama block, one head at a time; 4 heads share 2 key heads."""
    length = len(joined)
    x = rms(joined, weights[f"{at}input_layernorm.weight"])

    def heads(name: str, count: int) -> Tensor:
        return (x @ weights[f"{at}self_attn.{name}_proj.weight"].T).view(length, count, -1).transpose(0, 1)

    queries, keys = rotated(heads("q", 4), torch.arange(length)), rotated(heads("k", 2), torch.arange(length))
    mixed = []
    for head in range(4):
        scores = queries[head] @ keys[head // 2].T / queries.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(length, length).tril().bool(), -1e30)
        mixed.append(scores.softmax(-1) @ heads("v", 2)[head // 2])
    hidden = joined + torch.cat(mixed, -1) @ weights[f"{at}self_attn.o_proj.weight"].T
    x = rms(hidden, weights[f"{at}post_attention_layernorm.weight"])
    gate = torch.nn.functional.silu(x @ weights[f"{at}mlp.gate_proj.weight"].T)
    return hidden + (gate * (x @ weights[f"{at}mlp.up_proj.weight"].T)) @ weights[f"{at}mlp.down_proj.weight"].T
