"""Parallel multi-token prediction: independent transformer heads on one trunk, one shared unembedding.

Gloeckle et al. 2024, "Better & Faster Large Language Models via Multi-token Prediction", arXiv:2404.19737, section 2:
their p(x_{t+i} | x_{t:1}) = softmax(f_u(f_{h_i}(f_s(x_{t:1})))). The trunk f_s and the unembedding f_u are the frozen
target's (its last layer's output y_t, its final norm and LM head), f_{h_1} is the target itself, and our head k, from
0, is their f_{h_{k+2}}: one decoder layer of its own that attends over the trunk's states at columns <= t and drafts
x_{t+2+k}. No token beyond x_t is read, so heads do not depend on each other's draft tokens. They run one at a time in
training (medusa.py). Decoded as a chain this is blockwise parallel decoding (Stern et al. 2018,
arXiv:1811.03115): the pass that verifies one block yields the states that the heads draft the next block from.

  z_t = n(y_t)                     the final norm undoes any scale, and at size one a new layer contributes at once
  o_t = Block_k(z)_t               causal; grouped-query attention, SwiGLU; both write zero at first
  q   = LM head( w * n(o_t) + b )  w, b: the weight and bias of the target's final norm
where n(x) = x / rms(x), of x less its mean where that norm is a LayerNorm.

So an untrained head repeats the target's next token. Deviations: the trunk is not trained along; losses are soft
(losses.py), weighted decay^k where the paper weighs all heads alike (`step_decay: 1`), over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.interface import Batch, CommittedPositions, EveryPosition, StepLosses
from components.drafts.methods.batched import DepthDraft
from components.drafts.methods.medusa import Head, independent_losses
from components.drafts.network.cached_block import CachedBlock, KvCache, linear_kernel
from components.drafts.network.layers import (
    BlockShape,
    CausalMask,
    LlamaLayer,
    Rope,
    TargetHead,
    final_norm_of,
    initialise,
)
from components.drafts.network.sampling import most_likely_at
from components.drafts.settings import MtpParallelSettings
from components.drafts.training.losses import teacher_at_target_columns
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget


class HeadDecoder(NamedTuple):
    """One head's weights, laid out for decoding."""

    qkv: Linear  # input_layernorm's weight folded in
    block: CachedBlock


class Decoder(NamedTuple):
    """All heads and the unembedding that they share."""

    heads: list[HeadDecoder]
    unembedding: Linear
    dtype: torch.dtype


@dataclass
class MtpParallelState:
    """z of all committed positions, and for each head a cache whose first `done` rows are final."""

    trunk: Tensor  # [capacity, H]
    caches: list[KvCache]
    done: list[int]
    num_columns: int = 0


@final
class MtpParallel(DepthDraft[Decoder]):
    """See the module docstring. Trained parameters: heads.{k}."""

    method: ClassVar[str] = "mtp-parallel"
    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: MtpParallelSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.shape = settings, BlockShape.of(target, settings.intermediate_size)
        self.num_steps = self.max_depth = settings.num_heads
        head, norm = TargetHead.of(target, draft_ids), final_norm_of(target)
        self.centres, bias = norm.centres, head.bias
        if norm.bias is not None:
            bias = F.linear(norm.bias, head.weight, bias)
        self.unembedding = TargetHead(head.weight * norm.weight, bias)  # with the final norm's weight and bias in it
        self.heads = nn.ModuleList(LlamaLayer(self.shape) for _ in range(settings.num_heads))

    @classmethod
    def build(cls, target: AbstractTarget, settings: MtpParallelSettings, draft_ids: Tensor) -> MtpParallel:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids.to(target.device))
        initialise(draft, torch.Generator().manual_seed(settings.init_seed or 0))
        for head in draft.heads:
            nn.init.zeros_(head.self_attn.o_proj.weight)  # type: ignore[union-attr, arg-type]
            nn.init.zeros_(head.mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]
        return draft.to(target.device)

    def centred(self, x: Tensor) -> Tensor:
        """x less its mean where the target's final norm takes that away: [..., H] -> [..., H]."""
        return x - x.mean(-1, keepdim=True) if self.centres else x

    def normalised(self, x: Tensor) -> Tensor:
        """The target's final norm without its weight and bias, float32: [..., H] -> [..., H]."""
        return F.rms_norm(self.centred(x.float()), (x.shape[-1],), None, self.shape.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """A head's output [..., H] -> draft-vocabulary logits [..., N]."""
        logits: Tensor = self.unembedding(self.normalised(hidden))
        return logits

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph, one head at a time; the unembedding runs on reachable columns only."""
        self._decoder = None
        trunk, rope, visible = self._trunk(batch.last, batch.causal)
        sequence = torch.arange(len(batch.ids), device=batch.ids.device)[:, None]

        def logits(index: int, rows: Tensor) -> Tensor:
            return self.logits(self.heads[index](trunk, rope, visible)[sequence, rows])

        heads = [Head(partial(logits, i), list(head.parameters())) for i, head in enumerate(self.heads)]
        teacher = teacher_at_target_columns(self.target, batch, self.draft_ids)
        return independent_losses(batch, heads, teacher, self.settings)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, N] of heads 0, 1, ... at columns rows [B, R]; no head reads a token beyond its column."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        trunk, rope, visible = self._trunk(batch.last, batch.causal)
        return [self.logits(head(trunk, rope, visible)[sequence, rows]) for head in self.heads]

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        trunk, rope, _ = self._trunk(last[None, : ids.numel() - 1], CausalMask(ids.numel() - 1, last.device))
        outputs = (head(trunk, rope)[0, first:] for head in self.heads[:depth])
        return EveryPosition.of_steps([most_likely_at(self.logits, output, self.draft_ids) for output in outputs])

    def _trunk(self, last: Tensor, causal: CausalMask) -> tuple[Tensor, Rope, Tensor | None]:
        """z from the target's last-layer output [B, T, H], rotary positions, and the mask of visible columns."""
        return self.normalised(last), Rope(self.shape, causal.positions), causal.visible

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        heads = []
        for head in self.heads:
            assert isinstance(head, LlamaLayer)
            block = CachedBlock(self.shape, head.self_attn, head.post_attention_layernorm, head.mlp, dtype)
            qkv = linear_kernel(block.norm.folded(block.qkv_weight, head.input_layernorm).to(dtype))
            heads.append(HeadDecoder(qkv, block))
        # CachedBlock's norm leaves sqrt(H) to the layer that follows.
        unembedding = linear_kernel(
            (self.unembedding.weight * heads[0].block.norm.scale).to(dtype), self.unembedding.bias
        )
        self.kernel = lay_out(
            [*(part for head in heads for part in (head.qkv, *head.block.linears)), unembedding], kernel
        )
        return Decoder(heads, unembedding, dtype)

    def empty_state(self, decoder: Decoder, capacity: int) -> MtpParallelState:
        return MtpParallelState(
            trunk=torch.empty(capacity, self.shape.hidden_size, dtype=decoder.dtype, device=self.draft_ids.device),
            caches=[head.block.new_cache(capacity) for head in decoder.heads],
            done=[0] * len(decoder.heads),
        )

    def depth_logits(
        self, states: Sequence[MtpParallelState], committed: Sequence[CommittedPositions], depth: int, scaled: bool
    ) -> Tensor:
        """As DepthDraft; heads deeper than `depth` do not run, and their columns wait in the state."""
        decoder = self.prepared
        for state, new in zip(states, committed, strict=True):
            before, state.num_columns = state.num_columns, state.num_columns + new.last.shape[0]
            state.trunk[before : state.num_columns] = self.normalised(new.last)
        rows = []
        for index, head in enumerate(decoder.heads[:depth]):
            starts = [state.done[index] for state in states]
            parts = [state.trunk[state.done[index] : state.num_columns] for state in states]
            z, caches = parts[0] if len(parts) == 1 else torch.cat(parts), [state.caches[index] for state in states]
            qkv = head.qkv(head.block.norm(z))
            rows.append(head.block.run_each(qkv, z, caches, starts, [part.shape[0] for part in parts]))
            for state in states:
                state.done[index] = state.num_columns
        if not rows:
            return states[0].trunk.new_empty(0, len(states), self.draft_ids.numel())
        logits = decoder.unembedding(decoder.heads[0].block.norm(self.centred(torch.cat(rows))))
        return logits.unflatten(0, (len(rows), len(states)))
