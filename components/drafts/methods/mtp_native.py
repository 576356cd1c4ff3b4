"""Fine-tuning a target's native MTP module, one module reused for every draft token (method `mtp`, `start: own`).

Native modules are trained to draft one token and lose accuracy fast when reused; training the reuse pays most (FastMTP,
arXiv:2509.18362). With e = the target's embedding, M = join, one block of the target's own kind, last norm:
  step 0 at column t: M(e(x_{t+1}), h_t), drafts x_{t+2};   h_t = the target's last state
  step k:             M(e(x_{t+1+k}), step k - 1's output at t), at rotary position t + k, drafts x_{t+2+k}
and a step sees step-0 columns <= t and its own earlier steps at t, in training as in decoding: the cache that an engine
keeps for such a module. (FastMTP trains each step without the steps before it.) The block is transformers' own layer
class, so latent attention, experts, gates and (1 + w) norms are those of the model; which state is fed back
and the order of the inputs depend on the layout (mtp_native_weights.py).

Shapes: B sequences, T columns, R rows to draft from, H hidden size, N draft vocabulary.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache

from components.contract import UserError
from components.drafts.interface import (
    AbstractDraft,
    Batch,
    CommittedPositions,
    EveryPosition,
    Proposal,
    Sampling,
    StepLosses,
)
from components.drafts.methods.mtp_native_weights import NativeMtpLayout, find_native_mtp
from components.drafts.network.layers import CausalMask, TargetHead, embedded, normed_state, shift_left
from components.drafts.network.sampling import DraftSampler, most_likely_at
from components.drafts.settings import MtpSettings
from components.drafts.training.losses import step_losses, teacher_for_steps
from components.targets.config import read_config
from components.targets.interface import AbstractTarget


@final
class NativeMtpModule(nn.Module):
    """Join, block and last norm, built from the target's own classes."""

    def __init__(self, config: Any, layout: NativeMtpLayout, has_experts: bool, target: AbstractTarget) -> None:
        super().__init__()

        with torch.device("meta"):  # only to read the model's classes
            body = AutoModelForCausalLM.from_config(config).get_decoder()
        config = body.config
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        full = [layer for layer, layer_type in enumerate(layer_types) if layer_type == "full_attention"]
        index = max(full, key=lambda layer: (hasattr(body.layers[layer].mlp, "experts") == has_experts, layer))
        make_norm, hidden = type(body.norm), config.hidden_size
        self.layout = layout
        self.token_norm = make_norm(hidden, eps=config.rms_norm_eps)
        self.hidden_norm = make_norm(hidden, eps=config.rms_norm_eps)
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.block = type(body.layers[index])(config, index)
        self.block.self_attn.layer_idx = 0  # the only layer of its cache
        self.last_norm: Callable[[Tensor], Tensor]
        if layout.last_norm:
            self.last_norm = make_norm(hidden, eps=config.rms_norm_eps)
        else:  # no module of this one: the target's norm is neither trained nor saved
            self.last_norm = lambda out: target.final_norm(out.to(target.dtype)).float()
        self._rotary = (type(body.rotary_emb)(config),)  # in a tuple: nothing of it is trained or saved

    def keep_experts(self) -> None:
        """Let training leave the routed experts as they are: they are saved, and have no gradients or moments."""
        mlp = self.block.mlp
        experts = list(mlp.experts.modules()) if hasattr(mlp, "experts") else []
        for part in experts:
            for name, weight in list(part.named_parameters(recurse=False)):
                delattr(part, name)
                part.register_buffer(name, weight.detach())

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Any) -> Tensor:
        """[B, R, H] each, positions int64 [B, R], mask [B, 1, R, cached + R]; the rows join `cache`. -> [B, R, H]."""
        both = (self.token_norm(embedded), self.hidden_norm(hidden))
        joined = self.projection(torch.cat(both if self.layout.embedding_first else both[::-1], -1))
        rotary = self._rotary[0].to(joined.device)
        out = self.block(
            joined,
            attention_mask=None if mask is None else mask.to(joined.dtype),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=rotary(joined, positions),
        )
        return out[0] if isinstance(out, tuple) else out


@dataclass
class NativeMtpState:
    """The module's cache: its first num_columns rows are committed, later ones are dropped after each proposal."""

    cache: Any
    num_columns: int = 0


class TargetHeadDraft(AbstractDraft):
    """A drafter whose last states go through the target's whole LM head while it trains; only drafting prunes it."""

    settings: MtpSettings
    head: TargetHead

    @abstractmethod
    def states(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """As `teacher_forced`, before the head: [B, R, H]."""

    def initial_hidden(self, last: Tensor) -> Tensor:
        """h^0 from the target's last-layer output: [..., H] -> float32 [..., H]."""
        return last.float() if self.settings.first_hidden == "pre_norm" else normed_state(self.target, last)

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all columns at once; the head runs on reachable columns only."""
        teacher = teacher_for_steps(self.target, batch, None)
        states = partial(self.states, batch)
        return step_losses(batch, states, self.num_steps, teacher, self.settings, self.unembedded)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, V] of steps 0, 1, ... from columns rows [B, R], each fed the true x_{t+1+k}."""
        return map(self.unembedded, self.states(batch, rows))

    def unembedded(self, normed: Tensor) -> Tensor:
        """The target's LM head: [..., H] -> [..., V]."""
        logits: Tensor = self.head(normed)
        return logits

    @property
    def student_ids(self) -> None:
        """As AbstractDraft: all tokens."""


@final
class MtpNative(TargetHeadDraft):
    """See the module docstring. Trained parameters: module.*, the tensors of the checkpoint's MTP module."""

    method: ClassVar[str] = "mtp"
    packs: ClassVar[bool] = True

    def __init__(
        self, target: AbstractTarget, module: NativeMtpModule, draft_ids: Tensor, settings: MtpSettings
    ) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.module = settings, module
        self.num_steps = settings.recursive_steps
        self.max_depth = 2 * self.num_steps
        self.head = TargetHead.of(target)

    @classmethod
    def build(cls, target: AbstractTarget, settings: MtpSettings, draft_ids: Tensor) -> MtpNative:
        """As AbstractDraft, with the checkpoint's weights; raises UserError where it has no MTP module."""
        folder: Path | None = getattr(target, "folder", None)
        if folder is None:
            raise UserError("mtp with start: own needs a target that was opened from a checkpoint's folder")
        checkpoint_name = folder.name
        weights = find_native_mtp(folder, target.shape.num_layers, checkpoint_name)
        config = copy.deepcopy(read_config(folder, location=checkpoint_name, trust_remote_code=False))
        config._attn_implementation = "sdpa"
        module = NativeMtpModule(config, weights.layout, weights.has_experts, target).float()
        module.load_state_dict(
            {name: t.float() for name, t in weights.read(module.state_dict(), checkpoint_name).items()}
        )
        if not settings.train_experts:
            module.keep_experts()
        return cls(target, module, draft_ids, settings).to(target.device)

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding, [...] -> [..., H] float32."""
        return embedded(self.target, ids)

    def zero_first_embedding(self, embedded: Tensor, is_first: Tensor | None = None) -> Tensor:
        """Zero the embedding at position 0 of [B, T, H], in place, where the checkpoint's layout does.

        is_first: bool [B, T], the columns at position 0; None: column 0.
        """
        if self.module.layout.zero_first:
            if is_first is None:
                embedded[:, 0] = 0.0
            else:
                embedded[is_first] = 0.0
        return embedded

    def next_step_input(self, out: Tensor) -> Tensor:
        """The input of the next step in place of the target's state."""
        return self.module.last_norm(out) if self.module.layout.recycles_normed else out

    def states(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """As `teacher_forced`, before the head: [B, R, H]."""
        unrolled = _Unrolled(self, batch.last, shift_left(batch.ids, 1), rows, batch.causal)
        for k in range(self.num_steps):
            out = unrolled.step(shift_left(batch.ids, k + 1).gather(1, rows))
            yield self.module.last_norm(out)

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        rows = torch.arange(first, ids.numel() - 1, device=ids.device)[None]
        unrolled = _Unrolled(self, last[None, :-1], ids[None, 1:], rows, CausalMask(ids.numel() - 1, ids.device))
        head, tokens, steps = self.head.rows(self.draft_ids), ids[None, 1 + first :], []
        for _ in range(min(depth, self.max_depth)):
            tokens, confidence = most_likely_at(head, self.module.last_norm(unrolled.step(tokens)), self.draft_ids)
            steps.append((tokens[0], confidence[0]))
        return EveryPosition.of_steps(steps)

    def pruned_logits(self, out: Tensor) -> Tensor:
        """The block's output [..., H] -> [..., N]."""
        logits: Tensor = self.head.rows(self.draft_ids)(self.module.last_norm(out))
        return logits

    def prepare_decoding(self, dtype: torch.dtype = torch.float32, kernel: str = "auto") -> None:
        """Nothing to lay out: decoding runs the model's own layer, in float32."""

    def new_state(self, capacity: int) -> NativeMtpState:
        """State for one sequence; its cache grows."""

        return NativeMtpState(DynamicCache())

    @torch.inference_mode()
    def propose(
        self, state: NativeMtpState, committed: CommittedPositions, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        sampler = DraftSampler(self.draft_ids, self.target.shape.vocab_size, sampling, [rng])
        device, start = self.draft_ids.device, state.num_columns
        tokens, hidden = committed.next_tokens.to(device)[None], self.initial_hidden(committed.last)[None]
        num_rows = tokens.shape[1]
        positions = torch.arange(start, start + num_rows, device=device)[None]
        ahead = torch.arange(start + num_rows, device=device) > positions[0, :, None]
        embedded = self.embed(tokens) if start else self.zero_first_embedding(self.embed(tokens))
        out = self.module(embedded, hidden, positions, additive_mask(ahead)[None, None], state.cache)[:, -1:]
        state.num_columns += num_rows
        depth = min(depth, self.max_depth)
        for k in range(depth):
            token = sampler.sample(self.pruned_logits(out)[0])
            if sampler.ended:
                break
            if k + 1 < depth:
                position = positions[:, -1:] + k + 1
                out = self.module(self.embed(token)[None], self.next_step_input(out), position, None, state.cache)
        num_passes = len(sampler.tokens)
        if num_passes > 1:
            state.cache.crop(1 - num_passes)  # draft tokens leave no trace
        return sampler.proposals()[0]


class _Unrolled:
    """Step 0 over all columns, later steps over the selected rows: block mask [causal | I | I | ...]."""

    def __init__(self, draft: MtpNative, last: Tensor, next_ids: Tensor, rows: Tensor, causal: CausalMask) -> None:
        """last: [B, T, H]; next_ids: int64 [B, T], x_{t+1}; rows: int64 [B, R]; causal: what the T columns see."""

        self.draft, self.positions, self.num_steps, self.cache = draft, causal.at(rows), 0, DynamicCache()
        visible = causal.visible
        if visible is None:
            visible = causal.columns <= causal.columns[:, None]
        mask = additive_mask(~visible).expand(len(rows), 1, -1, -1)
        embedded = draft.zero_first_embedding(draft.embed(next_ids), causal.is_first(len(rows)))
        positions = causal.positions.expand_as(next_ids)
        out = draft.module(embedded, draft.initial_hidden(last), positions, mask, self.cache)
        self.out = out.gather(1, rows[..., None].expand(-1, -1, out.shape[-1]))
        self.mask = additive_mask(causal.masked_columns(rows)[:, :, 0])  # [B, 1, R, T], then R more columns a step
        self.own_column = additive_mask(~torch.eye(rows.shape[1], dtype=torch.bool, device=rows.device)).expand(
            len(rows), 1, -1, -1
        )

    def step(self, tokens: Tensor) -> Tensor:
        """Feed x_{t+1+k}, int64 [B, R] (step 0 has them already); returns the block's output [B, R, H]."""
        if self.num_steps:
            self.mask = torch.cat((self.mask, self.own_column), -1)
            hidden, positions = self.draft.next_step_input(self.out), self.positions + self.num_steps
            self.out = self.draft.module(self.draft.embed(tokens), hidden, positions, self.mask, self.cache)
        self.num_steps += 1
        return self.out


def additive_mask(hidden: Tensor) -> Tensor:
    """0 where a row may attend, -inf where hidden."""
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, float("-inf"))
