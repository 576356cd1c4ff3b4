"""EAGLE-3: one decoder layer that drafts from several of the target's hidden states (Li et al. 2025, arXiv:2503.01840).

Column t pairs g_t = fc(taps_t) with the token x_{t+1}. The layer reads both concatenated, its output a_t drafts x_{t+2}
through `norm` and a pruned LM head, and a_t takes the place of g at the next step: fc is for target features only.
Names and layout are those of the first public release, which llama.cpp, vLLM, SGLang and MNN load:
  u = [input_layernorm(e(x_{t+1+k})) ; hidden_norm(g)], q, k, v from u (2H wide), residual = g un-normed,
  then post-attention norm and SwiGLU; the embedding is the target's own and frozen.
The taps are those of its target, three in the paper (targets/shape.py taps_of), any N layers here.
The training-time test (the paper's section 3.2) is in training_time_test.py; gradients flow through all steps.

EAGLE-3.1's two changes are settings, off by default (vLLM pull request 42764; speculators' names):
  fc_norm      g_t = fc([fc_norm.0(low) ; fc_norm.1(mid) ; fc_norm.2(high)]): each tap by its own RMSNorm first
  norm_output  the next step reads norm(a_t), the state that the LM head reads, instead of a_t
Two more are found in drafters of the speculators library, and are settings for their sake:
  norm_before_fc        g_t = fc(input_norm([low ; mid ; high])): one RMSNorm over all three
  norm_before_residual  the residual is hidden_norm(g) instead of g

Deviations: only columns in M_0 (layers.py) are computed, since no other can be reached; a position whose teacher argmax
lies outside the draft vocabulary is not trained on (as in the official code), yet acceptance is always counted against
the full-vocabulary argmax; the LM head and the last norm start from the target's own.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from components.drafts.interface import Batch, CommittedPositions, StepLosses
from components.drafts.methods.one_block import ChainDecoder, OneBlockDraft
from components.drafts.network.cached_block import CachedBlock, TokenTable, UnitNorm, linear_kernel
from components.drafts.network.layers import (
    INIT_STD,
    AttentionProjections,
    BlockShape,
    OwnEmbedding,
    RmsNorm,
    SwiGlu,
    embedded,
    embedding_of,
    head_rows,
    initialise,
    norm_weight_of,
)
from components.drafts.network.training_linear import TrainingLinear
from components.drafts.settings import Eagle3Settings
from components.drafts.training.losses import step_losses, teacher_for_steps
from components.targets.forward.linear import lay_out
from components.targets.interface import AbstractTarget


def tap_sizes(taps: Tensor, hidden_size: int) -> Tensor:
    """The root mean square of each of the N hidden states of a sample [M, N * H]: float32 [N]."""
    return taps.float().unflatten(-1, (-1, hidden_size)).square().mean((0, 2)).sqrt().clamp(min=1e-6)


def scale_fuse(fc: nn.Linear, sizes: Tensor) -> None:
    """Scale a new fc so that taps of these sizes [N] fuse to a state of size one."""
    fc.weight.div_(INIT_STD).mul_(fc.in_features**-0.5).div_(sizes.repeat_interleave(fc.out_features).to(fc.weight))


@final
class FirstLayer(nn.Module):
    """The tensors of `midlayer.*`; q, k and v are 2H wide."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGlu(shape)

    def attention_input(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """The input of q, k and v: embedding and hidden state, each normed, [..., H] each -> [..., 2H]."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)


@final
class Eagle3(OneBlockDraft):
    """See the module docstring. Trained parameters: fc, midlayer, norm, lm_head; fc_norm or input_norm where on."""

    method: ClassVar[str] = "eagle3"

    def __init__(self, target: AbstractTarget, settings: Eagle3Settings, draft_ids: Tensor) -> None:
        super().__init__(target, settings, draft_ids, settings.ttt_steps)
        shape, hidden, eps = self.shape, self.shape.hidden_size, self.shape.rms_norm_eps
        self.norm_output, self.norm_before_residual = settings.norm_output, settings.norm_before_residual
        num_taps = len(target.tap_layers)
        self.fc = TrainingLinear(num_taps * hidden, hidden)
        self.midlayer = FirstLayer(shape)
        self.norm = RmsNorm(hidden, eps)
        self.lm_head = TrainingLinear(hidden, draft_ids.numel())
        self.fc_norm = nn.ModuleList(RmsNorm(hidden, eps) for _ in range(num_taps)) if settings.fc_norm else None
        self.input_norm = RmsNorm(num_taps * hidden, eps) if settings.norm_before_fc else None
        self.embed_tokens = OwnEmbedding(target) if settings.own_embedding else None

    @classmethod
    def build(cls, target: AbstractTarget, settings: Eagle3Settings, draft_ids: Tensor) -> Eagle3:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids)
        initialise(draft, torch.Generator().manual_seed(settings.init_seed or 0))
        with torch.no_grad():
            draft.lm_head.weight.copy_(head_rows(target, draft_ids))
            draft.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @property
    def block(self) -> FirstLayer:
        return self.midlayer

    @torch.no_grad()
    def scale_to_target_features(self, taps: Tensor) -> None:
        """Scale fc so that g starts at size one, and its learning rate alike.

        A residual stream grows from layer to layer (the built-in target's taps measure 30, 49 and 60), and g is the
        layer's own residual, un-normed: unscaled, it drowns what the token and the layer add to it for most of a short
        training (held-out AL over 5 steps after 300 Muon steps: 1.88, scaled 2.59; one seed). With fc_norm all taps
        measure one, with norm_before_fc all together.
        """
        sizes = tap_sizes(taps, self.shape.hidden_size)
        if self.fc_norm is not None:
            sizes = torch.ones_like(sizes)
        if self.input_norm is not None:
            sizes = sizes / sizes.square().mean().sqrt()
        scale_fuse(self.fc, sizes)
        self.lr_scales = {"fc.weight": 1.0 / float(sizes.mean())}

    def features(self, taps: Tensor, last: Tensor) -> Tensor:
        """g = fc(taps): [..., N * H] -> float32 [..., H]."""
        if self.fc_norm is not None:
            apart = taps.split(self.shape.hidden_size, -1)
            taps = torch.cat([norm(tap) for norm, tap in zip(self.fc_norm, apart, strict=True)], -1)
        if self.input_norm is not None:
            taps = self.input_norm(taps)
        return self.fc(taps.to(self.fc.weight.dtype)).float()

    def attention_inputs(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """As OneBlockDraft: the residual is the hidden state, un-normed unless norm_before_residual is on."""
        inputs = self.midlayer.attention_input(embedded(self.target, tokens, self.embed_tokens), hidden)
        return inputs, inputs[..., self.shape.hidden_size :] if self.norm_before_residual else hidden

    def next_step_input(self, output: Tensor) -> Tensor:
        return self.norm(output) if self.norm_output else output

    def draft_logits(self, output: Tensor) -> Tensor:
        return self.lm_head(self.norm(output))

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all reachable columns at once."""
        self._decoder = None
        teacher = teacher_for_steps(self.target, batch, self.draft_ids)
        outputs = partial(self.outputs, batch)
        return step_losses(batch, outputs, self.num_steps, teacher, self.settings, self.draft_logits)

    def decoder(self, dtype: torch.dtype, kernel: str) -> ChainDecoder:
        """As OneBlockDraft: norm weights are folded into the linear layers after them."""
        layer, hidden_size = self.midlayer, self.shape.hidden_size
        block = CachedBlock(self.shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
        unit_norm = block.norm
        table = embedding_of(self.target, self.embed_tokens)
        token_part = TokenTable(table, layer.input_layernorm, block.qkv_weight[:, :hidden_size], dtype)
        hidden_part = linear_kernel(unit_norm.folded(block.qkv_weight[:, hidden_size:], layer.hidden_norm).to(dtype))
        head = linear_kernel(unit_norm.folded(self.lm_head.weight, self.norm).to(dtype))
        last_norm = (self.norm.weight.detach() * unit_norm.scale).to(dtype)
        fuse_weight = self.fc.weight.detach()
        if self.fc_norm is not None:
            parts = zip(fuse_weight.split(hidden_size, 1), self.fc_norm, strict=True)
            fuse_weight = torch.cat([unit_norm.folded(part, norm) for part, norm in parts], 1)  # type: ignore[arg-type]
        wide_norm = UnitNorm(fuse_weight.shape[1], self.shape.rms_norm_eps, dtype, block.device)
        if self.input_norm is not None:
            fuse_weight = wide_norm.folded(fuse_weight, self.input_norm)
        residual_norm = (layer.hidden_norm.weight.detach() * unit_norm.scale).to(dtype)
        fuse = linear_kernel(fuse_weight.to(dtype))
        self.kernel = lay_out([fuse, hidden_part, *block.linears, head], kernel)

        def features(committed: CommittedPositions) -> Tensor:
            taps = committed.taps.to(dtype)
            if self.input_norm is not None:
                return fuse(wide_norm(taps))
            return fuse(taps if self.fc_norm is None else unit_norm(taps.unflatten(-1, (-1, hidden_size))).flatten(-2))

        def inputs(tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
            normed = unit_norm(hidden)
            return token_part(tokens) + hidden_part(
                normed
            ), normed * residual_norm if self.norm_before_residual else hidden

        def next_step_input(output: Tensor) -> Tensor:
            return unit_norm(output) * last_norm if self.norm_output else output

        return ChainDecoder(block, features, inputs, next_step_input, lambda output: head(unit_norm(output)), head)
