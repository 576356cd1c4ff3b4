"""DFlash: a whole block of draft tokens denoised in one pass over the target's features (arXiv:2602.06036).

The newest token x_n (the anchor) and W - 1 mask tokens stand at positions n, n+1, ...; L layers of Qwen3's kind (head
norms on queries and keys) turn them into the draft tokens at once. What the target has computed enters every layer as
keys and values: layer l projects c_t = hidden_norm(fc(taps_t)) by its own k_proj and v_proj, at position t. A row of
the block sees c_0 .. c_{n-1} and all W rows of its own block, in both directions:
  slot s (from 0) drafts x_{n+s}, s = 1 .. W-1, and slot 0 nothing; with sample_from_anchor slot s drafts x_{n+s+1}.
Features are never refined, so committing a position costs two small projections a layer. Embedding and LM head are the
target's own and frozen; so is the mask token, a row of that embedding.

Training draws at most `max_anchors` of the reachable columns of each row at random (root t: anchor x_{t+1}), the same
for the same seed and optimiser step. Blocks of different anchors do not see each other: for a slot, attention is one
softmax over the columns up to its root and the W slots of its own block. With a window every slot sees the last so many
of these columns, and its whole block (speculators' sliding_window_non_causal). Draft token k (from 0) weighs exp(-k /
gamma) with the field's gamma of 4 (step_decay = exp(-1/4)), or by D-PACE (arXiv:2605.18810), the survival of the chain:
  w_k = sum_{j >= k} prod_{i <= j} ((1 - a) exp(-loss_i) + a), without a gradient; a smooths (0.5).

A block is always denoised at its trained width and a shallower proposal is its beginning, so that draft tokens do not
depend on the depth; deeper ones are refused. Tensor names are those of speculators' DFlash (fc, hidden_norm, layers,
norm). Deviations: 2 layers by default, where the paper has 5; every slot's weight applies to its mean over anchors, not
to a sum over all slots; a window is the same for every layer; the norm of the last layer starts from the target's.

Shapes: B sequences, T columns, R anchors, W rows of a block, K draft tokens of it, N draft vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.contract import UserError
from components.drafts.interface import Batch, CommittedPositions, EveryPosition, Roots, StepLosses
from components.drafts.methods.batched import BatchedDraft, DepthDraft, admitted, merged
from components.drafts.methods.block_attention import BlockSight, attend_blocks
from components.drafts.methods.eagle3 import scale_fuse, tap_sizes
from components.drafts.network.cached_block import InjectedBlock, KvCache, linear_kernel
from components.drafts.network.layers import (
    BlockShape,
    CausalMask,
    LlamaLayer,
    OwnEmbedding,
    RmsNorm,
    Rope,
    TargetHead,
    embedded,
    embedding_of,
    finish_block,
    initialise,
    norm_weight_of,
    shift_left,
)
from components.drafts.network.recompute import of_block
from components.drafts.network.sampling import most_likely_at
from components.drafts.network.training_linear import TrainingLinear
from components.drafts.settings import DFlashSettings
from components.drafts.training.batches import drawn_by_row
from components.drafts.training.losses import Step, StepLossAccumulator, judged_by, teacher_for_steps
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget

ROOTS_AT_ONCE = 64  # of propose_at_every_position: W rows each


class Decoder(NamedTuple):
    """Frozen copies of the weights, laid out for decoding."""

    fuse: Linear  # taps -> [T, H]
    context: Linear  # [T, H] -> keys and values of all layers, [T, L 2G D]; hidden_norm's weight folded in
    blocks: list[InjectedBlock]
    embedding: Tensor  # [V, H]
    masks: Tensor  # [W - 1, H], the mask token's embedding
    head: Linear  # norm's weight folded in
    dtype: torch.dtype


class BlockState:
    """Columns of the caches below num_columns are committed positions; later ones are leftovers of a draft block."""

    def __init__(self, caches: list[KvCache]) -> None:
        self.caches, self.num_columns = caches, 0


class BlockDraft(BatchedDraft[Decoder]):
    """The backbone of DFlash and of what builds on it. Trained parameters: fc, hidden_norm, layers, norm."""

    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: DFlashSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.seed = settings, settings.init_seed or 0
        shape = self.shape = BlockShape.of(target, settings.intermediate_size, settings.own_block)
        hidden, num_taps = shape.hidden_size, len(target.tap_layers)
        self.num_steps = self.max_depth = settings.num_draft_tokens
        self.mask_token_id = _mask_token_id(settings.mask_token_id, target.shape.vocab_size)
        self.lm_head = TargetHead.of(target, draft_ids)
        self.fc = TrainingLinear(num_taps * hidden, hidden)
        self.hidden_norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(settings.num_layers))
        self.norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.embed_tokens = OwnEmbedding(target) if settings.own_embedding else None

    def start_weights(self) -> None:
        """Draw the new weights by the seed of the settings; the last norm starts as the target's."""
        initialise(self, torch.Generator().manual_seed(self.seed))
        with torch.no_grad():
            self.norm.weight.copy_(norm_weight_of(self.target))

    @property
    def token_tables(self) -> frozenset[str]:
        return frozenset()

    @property
    def all_layers(self) -> list[LlamaLayer]:
        """In the order they run."""
        return list(self.layers)  # type: ignore[arg-type]

    @torch.no_grad()
    def scale_to_target_features(self, taps: Tensor) -> None:
        """As EAGLE-3: every tap counts alike at first, and fc learns at the rate of its inputs."""
        sizes = tap_sizes(taps, self.shape.hidden_size)
        scale_fuse(self.fc, sizes)
        self.lr_scales = {"fc.weight": 1.0 / float(sizes.mean())}

    def training_roots(self, roots: Roots, batch: Batch) -> Roots:
        """As AbstractDraft: at most max_anchors of each row, drawn by seed and optimiser step."""
        if not self.training or roots.rows.shape[1] <= self.settings.max_anchors:
            return roots
        rank = drawn_by_row(batch, self.seed, roots.valid.sum(1).tolist(), roots.rows.shape)
        order = rank.masked_fill(~roots.valid, 2.0).argsort(1)[:, : self.settings.max_anchors].sort(1).values
        return Roots(roots.rows.gather(1, order), roots.valid.gather(1, order))

    def block_outputs(
        self, taps: Tensor, next_ids: Tensor, rows: Tensor, causal: CausalMask | None = None
    ) -> tuple[Tensor, ...]:
        """Normed outputs of the K drafting slots, [B, R, H] each, of a block rooted at each of the columns rows.

        taps: [B, T, taps H]; next_ids: int64 [B, T], x_{t+1}; rows: int64 [B, R]; causal: positions and visibility of
        the columns; None: a document each row.
        """
        causal = CausalMask(next_ids.shape[1], rows.device) if causal is None else causal
        width, num_roots = self.settings.block_size, rows.shape[1]
        context = self.hidden_norm(self.fc(taps.to(self.fc.weight.dtype)).float())
        tokens = torch.full((*rows.shape, width), self.mask_token_id, device=rows.device)
        tokens[..., 0] = next_ids.gather(1, rows)
        positions = causal.at(rows)[..., None] + 1 + torch.arange(width, device=rows.device)
        hidden = embedded(self.target, tokens.flatten(1), self.embed_tokens)  # [B, R W, H]
        rope, context_rope = Rope(self.shape, positions.flatten(1)), Rope(self.shape, causal.positions)
        masked = causal.masked_columns(rows, self.shape.window)[:, 0, 0].expand(len(rows), -1, -1)
        sight = BlockSight(masked, width, hidden.dtype)
        for layer in self.all_layers:
            attention, inputs, ask = layer.self_attn, layer.input_layernorm(hidden), rope
            of_columns, of_rows = attention.keys_values(context, context_rope), attention.keys_values(inputs, rope)
            if layer is self.layers[-1] and self.num_steps < width:  # of the last layer only drafting slots are read
                hidden, inputs = (
                    part.unflatten(1, (num_roots, width))[:, :, -self.num_steps :].flatten(1, 2)
                    for part in (hidden, inputs)
                )
                ask = Rope(self.shape, positions[..., -self.num_steps :].flatten(1))
                sight = BlockSight(masked, self.num_steps, hidden.dtype)
            queries = attention.queries(inputs, ask)
            mixed = attend_blocks(queries, of_columns, of_rows, sight)
            hidden = of_block(partial(finish_block, layer), hidden, mixed)
        return self.norm(hidden.unflatten(1, (num_roots, -1))[:, :, -self.num_steps :]).unbind(2)

    def block_logits(self, output: Tensor) -> Tensor:
        """The target's LM head over the draft vocabulary: [..., H] -> [..., N]."""
        logits: Tensor = self.lm_head(output)
        return logits

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        blocks = [InjectedBlock(self.shape, layer, self.hidden_norm, dtype) for layer in self.all_layers]
        embedding = embedding_of(self.target, self.embed_tokens)
        decoder = Decoder(
            fuse=linear_kernel(self.fc.weight.detach().to(dtype)),
            context=linear_kernel(torch.cat([block.context_weight for block in blocks])),
            blocks=blocks,
            embedding=embedding,
            masks=embedding[self.mask_token_id].to(dtype).expand(self.settings.block_size - 1, -1),
            head=linear_kernel(
                blocks[0].block.norm.folded(self.lm_head.weight, self.norm).to(dtype), self.lm_head.bias
            ),
            dtype=dtype,
        )
        each = [part for block in blocks for part in block.linears]
        self.kernel = lay_out([decoder.fuse, decoder.context, *each, decoder.head], kernel)
        return decoder

    def empty_state(self, decoder: Decoder, capacity: int) -> BlockState:
        room = capacity + self.settings.block_size
        return BlockState([block.block.new_cache(room) for block in decoder.blocks])

    def denoised(self, states: Sequence[BlockState], committed: Sequence[CommittedPositions]) -> Tensor:
        """Commit new positions, then denoise a block after each newest token: [B, K, H], before the last norm."""
        decoder = self.prepared
        block = decoder.blocks[0].block
        committed = [admitted(block, *each) for each in zip(states, committed, strict=True)]
        new = merged(committed)
        unit_norm, sizes = block.norm, [each.next_tokens.shape[0] for each in committed]
        features = decoder.context(unit_norm(decoder.fuse(new.taps.to(decoder.dtype))))
        of_layers = features.chunk(len(decoder.blocks), -1)
        for i, (layer, rows) in enumerate(zip(decoder.blocks, of_layers, strict=True)):
            for state, part in zip(states, rows.split(sizes), strict=True):
                layer.commit(part, state.caches[i], state.num_columns)
        for state, size in zip(states, sizes, strict=True):
            state.num_columns += size
        newest = torch.stack([each.next_tokens[-1] for each in committed]).to(self.draft_ids.device)
        anchors = F.embedding(newest, decoder.embedding).to(decoder.dtype)[:, None]
        hidden = torch.cat((anchors, decoder.masks.expand(len(states), -1, -1)), 1).flatten(0, 1)
        starts = [state.num_columns for state in states]
        for i, layer in enumerate(decoder.blocks):
            hidden = layer.run(hidden, [state.caches[i] for state in states], starts)
        return hidden.unflatten(0, (len(states), -1))[:, -self.num_steps :]

    def head_logits(self, hidden: Tensor, scaled: bool) -> Tensor:
        """The LM head on outputs before the last norm: [X, Y, H] -> [X, Y, N]; unless `scaled`, only their order."""
        rows = hidden.flatten(0, 1)
        normed = self.prepared.blocks[0].block.norm(rows) if scaled or self.lm_head.bias is not None else rows
        return self.prepared.head(normed).unflatten(0, hidden.shape[:2])


@final
class DFlash(BlockDraft, DepthDraft[Decoder]):
    """See the module docstring."""

    method: ClassVar[str] = "dflash"

    @classmethod
    def build(cls, target: AbstractTarget, settings: DFlashSettings, draft_ids: Tensor) -> DFlash:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids)
        draft.start_weights()
        return draft.to(target.device)

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: a block from each anchor."""
        self._decoder = None
        teacher = teacher_for_steps(self.target, batch, self.draft_ids)
        accumulator = StepLossAccumulator(batch, teacher, self.num_steps, self.settings.normaliser)
        accumulator.use_roots(self.training_roots(accumulator.roots, batch))
        outputs = self.block_outputs(batch.taps, shift_left(batch.ids, 1), accumulator.roots.rows, batch.causal)
        judge = judged_by(self.block_logits, self.settings)
        accumulator.add_steps(Step((output,), judge) for output in outputs)
        if self.settings.slot_weights == "dpace":
            return accumulator.survival_weighted(self.settings.dpace_alpha)
        return accumulator.result(self.settings.step_decay)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, N] of draft tokens 0, 1, ... from columns rows [B, R]; no true token after x_{t+1} is read."""
        outputs = self.block_outputs(batch.taps, shift_left(batch.ids, 1), rows, batch.causal)
        return [self.block_logits(output) for output in outputs]

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        parts = []
        for rows in torch.arange(first, ids.numel() - 1, device=ids.device).split(ROOTS_AT_ONCE):
            outputs = self.block_outputs(taps[None, :-1], ids[None, 1:], rows[None])[:depth]
            parts.append(
                EveryPosition.of_steps([most_likely_at(self.block_logits, of[0], self.draft_ids) for of in outputs])
            )
        return EveryPosition.concatenated(parts)

    def depth_logits(
        self, states: Sequence[BlockState], committed: Sequence[CommittedPositions], depth: int, scaled: bool
    ) -> Tensor:
        """As DepthDraft."""
        return self.head_logits(self.denoised(states, committed)[:, :depth].transpose(0, 1), scaled)


def _mask_token_id(chosen: int | None, vocab_size: int) -> int:
    """The token whose embedding masks; raises UserError where the target has none of that id."""
    if chosen is None:
        return vocab_size - 1
    if chosen >= vocab_size:
        raise UserError(f"mask_token_id {chosen} is none of the target's {vocab_size} tokens")
    return chosen
