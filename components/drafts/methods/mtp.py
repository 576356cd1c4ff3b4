"""MTP: sequential one-token modules in the layout of DeepSeek-V3 (arXiv:2412.19437, section 2.2).

Module j (from 1) turns h^{j-1}_t and the token x_{t+j} into h^j_t, which drafts x_{t+j+1}:
  h^j_t = Block_j( eh_proj [ enorm(e(x_{t+j})) ; hnorm(h^{j-1}_t) ] )_t      (embedding first; attention causal in t)
  q_{t+j+1} = head( shared_head.norm(h^j_t) ), with the target's own frozen embedding and head.
h^0 is the target's last hidden state, after or before its final norm (`first_hidden`; vLLM feeds DeepSeek's module the
state after it). Module j+1 reads module j's output before shared_head.norm. As in DeepSeek's released
code, the embedding at position 0 is zeroed; that is column 0 of module 1, since module j sits at position t + j - 1.

Every module attends over its own columns, so column t of module j is *committed* once x_{t+j} is, and a proposal after
x_n feeds module j the columns t > n - j with the draft tokens of the modules before it.

Deviations: the block is a Llama block (grouped-query attention, SwiGLU) with the target's head shapes, for latent
attention and mixture-of-experts targets too; losses are soft (losses.py), weighted decay^k, on exactly reachable
columns. While drafting here, the shared head is pruned to the draft vocabulary; training and an engine that loads the
modules use all of it.

Tensors are named as in DeepSeek-V3. Shapes: B sequences, T columns, A attention heads, D head size, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.interface import AbstractDraft, Batch, CommittedPositions, Proposal, Sampling, StepLosses
from components.drafts.methods.batched import BatchedDraft
from components.drafts.methods.mtp_decoding import (
    Decoder,
    ModuleDecoder,
    MtpBranches,
    MtpState,
    propose_at_every_position,
    run_module,
)
from components.drafts.methods.mtp_native import MtpNative
from components.drafts.network.cached_block import CachedBlock, TokenTable, linear_kernel
from components.drafts.network.layers import (
    AttentionProjections,
    BlockShape,
    CausalMask,
    RmsNorm,
    Rope,
    SwiGlu,
    attend_visible,
    head_rows,
    initialise,
    norm_weight_of,
    shift_left,
)
from components.drafts.network.training_linear import TrainingLinear, linear
from components.drafts.settings import MtpSettings
from components.drafts.training.losses import step_losses, teacher_at_target_columns
from components.targets.forward.linear import lay_out
from components.targets.interface import AbstractTarget


@final
class Mtp(BatchedDraft[Decoder]):
    """See the module docstring. Trained parameters: model.layers.{n + j}, n = the target's layers, j from 0."""

    method: ClassVar[str] = "mtp"
    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: MtpSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.shape = settings, BlockShape.of(target, settings.intermediate_size)
        self.num_steps = self.max_depth = settings.mtp_modules
        self.head_weight: Tensor  # [V, H], frozen
        self.register_buffer("head_weight", head_rows(target, torch.arange(target.shape.vocab_size)), persistent=False)
        first = target.shape.num_layers
        self.model = nn.Module()
        self.model.layers = nn.ModuleDict({str(first + j): MtpModule(self.shape) for j in range(self.num_steps)})

    @classmethod
    def build(cls, target: AbstractTarget, settings: MtpSettings, draft_ids: Tensor) -> AbstractDraft:
        """As AbstractDraft; with `start: own` it is an MtpNative."""
        if settings.start == "own":
            return MtpNative.build(target, settings, draft_ids)
        draft = cls(target, settings, draft_ids)
        hidden = draft.shape.hidden_size
        initialise(draft, torch.Generator().manual_seed(settings.init_seed or 0))
        with torch.no_grad():
            for module in draft.mtp_modules:
                # The hidden half of eh_proj starts as the identity: the module starts from the target's state
                # (held-out AL 2.20 against 2.13 after 150 steps on a snapshot of the built-in target).
                module.eh_proj.weight[:, hidden:] += torch.eye(hidden)
                module.shared_head.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @property
    def mtp_modules(self) -> list[MtpModule]:
        """Module 1, 2, ... in order."""
        return list(self.model.layers.values())  # type: ignore[operator]

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding, [...] -> [..., H] float32."""
        return F.embedding(ids, self.target.embedding).float()

    def initial_hidden(self, last: Tensor) -> Tensor:
        """h^0 from the target's last-layer output: [..., H] -> [..., H]."""
        if self.settings.first_hidden == "pre_norm":
            return last
        return self.target.final_norm(last.to(self.target.dtype))

    def embedded(self, ids: Tensor, j: int, causal: CausalMask | None = None) -> Tensor:
        """Embeddings read by module j: e(x_{t+j}) for ids [B, T], zeroed at position 0 (module 1, column 0)."""
        embedded = self.embed(shift_left(ids, j))
        if j == 1:
            causal = CausalMask(ids.shape[1], ids.device) if causal is None else causal
            embedded[causal.is_first(len(ids))] = 0.0
        return embedded

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all columns at once; the head runs on reachable columns only."""
        self._decoder = None
        teacher = teacher_at_target_columns(self.target, batch, None)
        steps = partial(self.teacher_forced, batch)
        return step_losses(batch, steps, self.num_steps, teacher, self.settings)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, V] of modules 1, 2, ... at columns rows [B, R], each fed the true x_{t+j}."""
        sequence = torch.arange(len(rows), device=rows.device)[:, None]
        causal = batch.causal
        rope, visible = Rope(self.shape, causal.positions), causal.visible
        with torch.no_grad(), torch.autocast(batch.last.device.type, enabled=False):
            hidden = self.initial_hidden(batch.last).float()
        for j, module in enumerate(self.mtp_modules, start=1):
            hidden = module(self.embedded(batch.ids, j, causal), hidden, rope, visible)
            yield linear(module.shared_head.norm(hidden[sequence, rows]), self.head_weight)

    @torch.no_grad()
    def propose_at_every_position(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """As AbstractDraft: [T] ids -> int64 [T-1, depth]."""
        return propose_at_every_position(self, ids, last, depth)

    def draft_token(self, module: MtpModule, hidden: Tensor) -> Tensor:
        """Greedy draft tokens (target ids) from a module's output [..., H]."""
        logits = F.linear(module.shared_head.norm(hidden), self.head_weight[self.draft_ids])
        return self.draft_ids[logits.argmax(-1)]

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        hidden, modules = self.shape.hidden_size, []
        for module in self.mtp_modules:
            block = CachedBlock(self.shape, module.self_attn, module.post_attention_layernorm, module.mlp, dtype)
            projection, norm = module.eh_proj.weight.detach(), block.norm
            modules.append(
                ModuleDecoder(
                    token_part=TokenTable(self.target.embedding, module.enorm, projection[:, :hidden], dtype),
                    hidden_part=linear_kernel(norm.folded(projection[:, hidden:], module.hnorm).to(dtype)),
                    qkv=linear_kernel(norm.folded(block.qkv_weight, module.input_layernorm).to(dtype)),
                    block=block,
                    last_norm=(module.shared_head.norm.weight.detach() * norm.scale).to(dtype),
                )
            )
        head = linear_kernel(self.head_weight[self.draft_ids].to(dtype))
        self.kernel = lay_out([*(linear for module in modules for linear in module.linears), head], kernel)
        return Decoder(modules, head, dtype)

    def empty_state(self, decoder: Decoder, capacity: int) -> MtpState:
        size, modules = capacity + self.max_depth, decoder.modules
        return MtpState(
            ids=torch.zeros(size + 1, dtype=torch.int64, device=self.draft_ids.device),
            caches=[module.block.new_cache(size) for module in modules],
            committed=[0] * len(modules),
            waiting=[[] for _ in modules],
        )

    @torch.inference_mode()
    def propose_batch(
        self,
        states: Sequence[MtpState],
        committed: Sequence[CommittedPositions],
        depth: int,
        sampling: Sampling,
        rngs: Sequence[torch.Generator],
    ) -> list[Proposal]:
        """As BatchProposer. Modules deeper than `depth` do not run; their inputs wait in the states."""
        decoder, sampler = self.prepared, self.sampler(sampling, rngs)
        for state, new in zip(states, committed, strict=True):
            self._commit(state, new, decoder.dtype)
        draft_rows: list[list[Tensor]] = [[] for _ in states]
        for index in range(min(depth, self.max_depth)):
            draft_rows = run_module(decoder, states, index, draft_rows, sampler)
        return sampler.proposals()

    @torch.inference_mode()
    def begin(self, state: MtpState, committed: CommittedPositions, depth: int) -> MtpBranches:
        decoder = self.prepared
        self._commit(state, committed, decoder.dtype)
        return MtpBranches(self, decoder, state)

    @torch.inference_mode()
    def draft_logits_after_each(self, state: MtpState, committed: CommittedPositions) -> Tensor:
        """As TwoRowProposer; only module 1 runs."""
        decoder = self.prepared
        self._commit(state, committed, decoder.dtype)
        return MtpBranches(self, decoder, state, num_roots=committed.next_tokens.shape[0]).roots

    def rollback(self, state: MtpState, count: int) -> None:
        state.num_columns -= count
        state.committed[0] -= count
        if count and len(state.waiting) > 1:
            state.waiting[1][-1] = state.waiting[1][-1][:-count]

    def _commit(self, state: MtpState, committed: CommittedPositions, dtype: torch.dtype) -> None:
        """Store newly committed positions; they wait for module 1."""
        start = state.num_columns
        state.num_columns = start + committed.next_tokens.shape[0]
        state.ids[start + 1 : state.num_columns + 1] = committed.next_tokens
        state.waiting[0].append(self.initial_hidden(committed.last).to(dtype))


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
