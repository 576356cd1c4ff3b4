"""EAGLE-3: one decoder layer that drafts from three of the target's hidden states (Li et al. 2025, arXiv:2503.01840).

Column t pairs g_t = fc(taps_t) with the token x_{t+1}. The layer reads both side by side, its output a_t gives the
guess for x_{t+2} through `norm` and a pruned LM head, and a_t takes the place of g at the next step: fc is for target
features only. Names and layout are those of the first public release, which llama.cpp, vLLM, SGLang and MNN load:
  u = [input_layernorm(e(x_{t+1+k})) ; hidden_norm(g)], q, k, v from u (2H wide), residual = g un-normed,
  then post-attention norm and SwiGLU; the embedding is the target's own and frozen.

Training-time test (their section 3.2), in relative columns: step k at column t is fed x_{t+1+k}, sits at rotary
position t + k, and sees step-0 columns <= t plus column t of steps 1..k. So the mask is [causal | I | I | ...] and the
later blocks are diagonals: one score a step instead of a T x T block, joined in one softmax. Gradients flow through
all steps.

Deviations: only columns in M_0 (masks.py) are computed, since no other can be reached; a position whose teacher argmax
lies outside the draft vocabulary is not trained on (as in the official code), yet acceptance is always counted against
the full-vocabulary argmax; the LM head and the last norm start from the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.cached_block import CachedBlock, KvCache, TokenTable, linear_kernel
from components.drafts.draft import AbstractDraft, Batch, Columns, Proposal, Sampling, StepLosses
from components.drafts.frozen import head_rows, norm_weight_of
from components.drafts.layers import INIT_STD, AttentionProjections, BlockShape, RmsNorm, Rope, SwiGlu, initialise
from components.drafts.losses import Normaliser, step_losses, teacher_of
from components.drafts.masks import shift_left
from components.drafts.sampling import Guesses
from components.targets.linear import Linear, calibrate

EXTRA_DEPTH = 4  # how much deeper than trained a chain may go


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


class Decoder(NamedTuple):
    """Frozen copies of the weights, laid out for decoding."""

    fuse: Linear  # [T, 3H] -> [T, H]
    token_part: TokenTable  # the token half of q, k, v
    hidden_part: Linear  # the feature half of q, k, v, hidden_norm's weight folded in
    block: CachedBlock
    head: Linear  # norm's weight folded in
    dtype: torch.dtype


@dataclass
class Eagle3State:
    """Cache rows below num_columns are committed columns; later rows hold the last guesses and mean nothing."""

    cache: KvCache
    num_columns: int = 0


@final
class Eagle3(AbstractDraft):
    """See the module docstring. Trained parameters: fc, midlayer, norm, lm_head."""

    method: ClassVar[str] = "eagle3"

    def __init__(self, target: Any, shape: BlockShape, draft_ids: Tensor, num_steps: int) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.shape, self.num_steps, self.max_depth = shape, num_steps, num_steps + EXTRA_DEPTH
        self.step_decay = 0.8
        self.normaliser: Normaliser = "token"
        self._target = (target,)  # in a tuple, so that nothing of the target becomes a parameter of the drafter
        self.draft_ids: Tensor
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.fc = nn.Linear(3 * hidden, hidden, bias=False)
        self.midlayer = FirstLayer(shape)
        self.norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, draft_ids.numel(), bias=False)
        self._decoder: Decoder | None = None

    @classmethod
    def build(cls, target: Any, settings: dict[str, Any], draft_ids: Tensor) -> Eagle3:
        """A new drafter for an AbstractTarget; draft_ids [N] are the target ids of its draft vocabulary, ascending.

        settings: ttt_steps, intermediate_size (0: the target's), step_decay, normaliser, init_seed.
        """
        shape = BlockShape.of(target, int(settings.get("intermediate_size", 0)))
        draft = cls(target, shape, draft_ids, int(settings.get("ttt_steps", 7)))
        draft.step_decay = float(settings.get("step_decay", 0.8))
        draft.normaliser = settings.get("normaliser", "token")
        initialise(draft, torch.Generator().manual_seed(int(settings.get("init_seed", 0))))
        with torch.no_grad():
            draft.lm_head.weight.copy_(head_rows(target, draft_ids))
            draft.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @torch.no_grad()
    def fit_inputs(self, taps: Tensor) -> None:
        """Scale fc so that g starts at size one, and its learning rate alike.

        A residual stream grows from layer to layer (the built-in target's taps measure 30, 49 and 60), and g is the
        layer's own residual, un-normed: unscaled, it drowns what the token and the layer add to it for most of a short
        training (held-out AL over 5 steps after 300 Muon steps: 1.88, scaled 2.59; one seed).
        """
        hidden = self.shape.hidden_size
        sizes = taps.float().unflatten(-1, (3, hidden)).square().mean((0, 2)).sqrt().clamp(min=1e-6)  # [3]
        columns = sizes.repeat_interleave(hidden).to(self.fc.weight)
        self.fc.weight.div_(INIT_STD).mul_((3 * hidden) ** -0.5).div_(columns)
        self.lr_scales = {"fc.weight": 1.0 / float(sizes.mean())}

    @property
    def target(self) -> Any:
        """The AbstractTarget this drafter serves."""
        return self._target[0]

    def embed(self, ids: Tensor) -> Tensor:
        """The target's frozen embedding, [...] -> [..., H] float32."""
        return F.embedding(ids, self.target.embedding).float()

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: teacher-forced, all reachable columns at once."""
        self._decoder = None
        teacher = teacher_of(self.target, batch.last, self.draft_ids)
        return step_losses(
            batch,
            lambda rows: self.teacher_forced(batch, rows),
            self.num_steps,
            teacher,
            self.step_decay,
            self.normaliser,
        )

    def teacher_forced(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Logits [B, R, N] of steps 0, 1, ... from columns rows [B, R], each fed the true x_{t+1+k}."""
        unrolled = Unrolled(self, batch.taps, shift_left(batch.ids, 1), rows)
        for k in range(self.num_steps):
            yield self.logits(unrolled.step(shift_left(batch.ids, k + 1).gather(1, rows)))

    def logits(self, hidden: Tensor) -> Tensor:
        """Layer output [..., H] -> draft-vocabulary logits [..., N]."""
        return self.lm_head(self.norm(hidden))

    @torch.no_grad()
    def draft_everywhere(self, ids: Tensor, taps: Tensor, last: Tensor, depth: int) -> Tensor:
        """Greedy proposals from every column at once, each fed its own guesses: [T] ids -> int64 [T-1, depth]."""
        rows = torch.arange(ids.numel() - 1, device=ids.device)[None]
        unrolled = Unrolled(self, taps[None, :-1], ids[None, 1:], rows)
        tokens, guesses = ids[None, 1:], []
        for _ in range(depth):
            tokens = self.draft_ids[self.logits(unrolled.step(tokens)).argmax(-1)]
            guesses.append(tokens[0])
        return torch.stack(guesses, 1)

    def prepare_decoding(self, dtype: torch.dtype = torch.float32) -> None:
        """Lay the weights out for decoding in `dtype`; training afterwards makes the layout stale and drops it."""
        layer, hidden = self.midlayer, self.shape.hidden_size
        block = CachedBlock(self.shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
        hidden_part = block.norm.folded(block.qkv_weight[:, hidden:], layer.hidden_norm)
        self._decoder = Decoder(
            fuse=linear_kernel(self.fc.weight.detach().to(dtype)),
            token_part=TokenTable(self.target.embedding, layer.input_layernorm, block.qkv_weight[:, :hidden], dtype),
            hidden_part=linear_kernel(hidden_part.to(dtype)),
            block=block,
            head=linear_kernel(block.norm.folded(self.lm_head.weight, self.norm).to(dtype)),
            dtype=dtype,
        )
        calibrate([self._decoder.fuse, self._decoder.hidden_part, *block.linears, self._decoder.head])

    def new_state(self, capacity: int) -> Eagle3State:
        """State for one sequence of at most `capacity` tokens."""
        if self._decoder is None:
            self.prepare_decoding()
        assert self._decoder is not None
        return Eagle3State(self._decoder.block.new_cache(capacity + self.max_depth))

    @torch.inference_mode()
    def propose(
        self, state: Eagle3State, columns: Columns, depth: int, sampling: Sampling, rng: torch.Generator
    ) -> Proposal:
        """See Proposer. The last new column makes the first guess, then one row a guess."""
        decoder = self._decoder
        assert decoder is not None, "call new_state first"
        depth = min(depth, self.max_depth)
        guesses = Guesses(self.draft_ids, self.target.shape.vocab_size, sampling, rng)
        tokens, start = columns.next_tokens.to(self.draft_ids.device), state.num_columns
        hidden = decoder.fuse(columns.taps.to(decoder.dtype))
        state.num_columns += tokens.shape[0]
        for k in range(max(depth, 1)):
            qkv = decoder.token_part(tokens) + decoder.hidden_part(decoder.block.norm(hidden))
            hidden = decoder.block.run(qkv, hidden, state.cache, start, last_only=True)
            if k < depth:
                # A greedy guess needs no last norm: a positive factor moves no argmax.
                tokens = guesses.pick(decoder.head(hidden if guesses.greedy else decoder.block.norm(hidden)))
            start = state.num_columns + k
        return guesses.proposal()


class Unrolled:
    """The training-time test over chosen columns: step 0 for all keys, then one diagonal a step.

    Shapes: B sequences, T columns, R chosen rows, A heads, G key/value heads, g = A / G.
    """

    def __init__(self, draft: Eagle3, taps: Tensor, next_ids: Tensor, rows: Tensor) -> None:
        """taps: [B, T, 3H]; next_ids: int64 [B, T], x_{t+1}; rows: int64 [B, R], the columns to draft from."""
        layer = draft.midlayer
        self.draft, self.rows = draft, rows
        features = draft.fc(taps.to(draft.fc.weight.dtype)).float()
        self.hidden = self._chosen(features)  # g at the rows; each step's output takes its place
        inputs = torch.cat((layer.input_layernorm(draft.embed(next_ids)), layer.hidden_norm(features)), -1)
        columns = torch.arange(next_ids.shape[1], device=rows.device)
        self.keys, self.values = layer.self_attn.keys_values(inputs, Rope(draft.shape, columns))  # [B, G, T, D]
        self.unseen = columns > rows[:, None, None, :, None]  # [B, 1, 1, R, T]: step-0 columns after the row
        self.later: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1..k at the rows, [B, G, R, D]
        self.num_steps = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Feed x_{t+1+k}, int64 [B, R]; returns the layer's output [B, R, H]."""
        draft, layer = self.draft, self.draft.midlayer
        inputs = torch.cat((layer.input_layernorm(draft.embed(tokens)), layer.hidden_norm(self.hidden)), -1)
        rope = Rope(draft.shape, self.rows + self.num_steps)
        if self.num_steps > 0:
            self.later.append(layer.self_attn.keys_values(inputs, rope))
        mixed = self._attend(layer.self_attn.queries(inputs, rope))
        hidden = self.hidden + layer.self_attn.output(mixed)
        self.hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        self.num_steps += 1
        return self.hidden

    def _attend(self, queries: Tensor) -> Tensor:
        """[B, A, R, D] -> [B, A, R, D]: one softmax over the causal columns and the row's own later steps."""
        shape = self.draft.shape
        grouped = queries.unflatten(1, (shape.num_key_value_heads, shape.group)) * shape.head_dim**-0.5
        num_columns, num_rows = self.keys.shape[2], queries.shape[2]
        causal = (grouped.flatten(2, 3) @ self.keys.transpose(-1, -2)).unflatten(2, (shape.group, num_rows))
        scores = [causal.masked_fill(self.unseen, float("-inf"))]
        scores += [(grouped * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys, _ in self.later]
        weights = torch.cat(scores, -1).float().softmax(-1).to(self.values.dtype)  # [B, G, g, R, T + k]
        mixed = (weights[..., :num_columns].flatten(2, 3) @ self.values).unflatten(2, (shape.group, num_rows))
        for i, (_, values) in enumerate(self.later):
            mixed = mixed + weights[..., num_columns + i, None] * values.unsqueeze(2)
        return mixed.flatten(1, 2)

    def _chosen(self, columns: Tensor) -> Tensor:
        """[B, T, H] -> [B, R, H]."""
        return columns.gather(1, self.rows[..., None].expand(-1, -1, columns.shape[-1]))
