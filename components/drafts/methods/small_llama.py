"""The training graph of a small Llama: all columns at once, and greedy chains from all columns at once.

Tensors bear their Hugging Face names, so the weights are a Llama checkpoint less its config.json. Column t reads
x_{t+1} at position t, as everywhere in this room: its output drafts x_{t+2}. x_0 is never read.

A pretrained draft model: located, checked against the target's tokenizer, referenced by digests.

Rejection sampling compares probabilities token by token, so every id must mean the same to both models: the whole
vocabularies are compared, not their sizes. Models may pad their vocabularies differently; ids that only one of them has
are never drafted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from components.contract import Target, UserError
from components.drafts.methods.training_time_test import attend, finish_block
from components.drafts.network.layers import BlockShape, CausalMask, LlamaLayer, RmsNorm, Rope
from components.drafts.settings import DraftModelSettings
from components.targets.interface import AbstractTarget
from components.targets.load import open_target, open_tokenizer
from components.targets.source import find_folder, load_target_fingerprint
from components.tensor_files import headers_in


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

    The mask is [causal | I | I | ...] in every layer, as in training_time_test.py. S columns of one sequence.
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


def resolve_model(target: Target, settings: DraftModelSettings) -> DraftModelSettings:
    """Check a given model and fill its files' digests and its first token into the settings.

    Raises:
        UserError: no such model, or its tokenizer is not the target's.
    """
    model = settings.model
    folder = find_folder(model)
    draft_tokenizer, target_tokenizer = open_tokenizer(folder), open_tokenizer(target)
    reason = vocabulary_difference(draft_tokenizer.get_vocab(), target_tokenizer.get_vocab())
    if reason := reason or _tokenization_difference(draft_tokenizer, target_tokenizer):
        raise UserError(
            f"draft-model: {model} does not share the target's tokenizer ({reason}); take one of its family"
        )
    first_ids = draft_tokenizer("").input_ids
    first_token = int(first_ids[0]) if first_ids and first_ids[0] == draft_tokenizer.bos_token_id else None
    return settings.model_copy(
        update={
            "model": model if "/" in model and not Path(model).exists() else str(folder),
            "model_files": load_target_fingerprint({"model": str(folder)}),
            "first_token": settings.first_token if settings.first_token is not None else first_token,
        }
    )


def num_parameters_of(settings: DraftModelSettings) -> int:
    """Numbers in the given model's weights, from the headers of its files."""
    folder = find_folder(settings.model)
    headers = headers_in(folder, settings.model)
    return sum(math.prod(entry["shape"]) for _, header in headers for entry in header.values())


def vocabulary_difference(drafts: Mapping[str, int], targets: Mapping[str, int]) -> str:
    """Describe the first difference of two vocabularies (token -> id); "" where every target token agrees."""
    for token, token_id in sorted(targets.items(), key=lambda item: item[1]):
        if drafts.get(token) != token_id:
            return f"token {token!r} is {token_id} for the target and {drafts.get(token, 'absent')} for the draft model"
    extra_tokens = sorted(drafts.keys() - targets.keys())
    return f"token {extra_tokens[0]!r} is unknown to the target" if extra_tokens else ""


def _tokenization_difference(draft_tokenizer: Any, target_tokenizer: Any) -> str:
    """Describe a difference in tokenizing a sample: equal vocabularies may have other merges; "" where equal."""
    text = "def add(a, b):\n    return a + b  # Grüße, 你好 1234\n"
    ids = [tokenizer(text, add_special_tokens=False).input_ids for tokenizer in (draft_tokenizer, target_tokenizer)]
    return "" if ids[0] == ids[1] else f"{text.strip()!r} is cut otherwise"


def open_model(
    settings: DraftModelSettings, device: str, dtype: Literal["float32", "bfloat16"], kernel: str
) -> AbstractTarget:
    """The given model, ready to decode on `kernel` (see open_target).

    Raises UserError when its files have changed since the draft was made.
    """
    folder = find_folder(settings.model)
    digests = load_target_fingerprint({"model": str(folder)})
    if settings.model_files and digests != settings.model_files:
        changed = sorted(
            name for name in {*digests, *settings.model_files} if digests.get(name) != settings.model_files.get(name)
        )
        raise UserError(
            f"{settings.model}: {changed[0]} changed since the draft was made; run drafts.train_draft again"
        )
    return open_target(folder, device=device, dtype=dtype, kernel=kernel, tapped=False)
