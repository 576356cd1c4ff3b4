"""P-EAGLE: EAGLE-3's input, all K draft tokens from one forward (Hui et al. 2026, arXiv:2602.01469).

Column t pairs g_t = fc(taps_t) with x_{t+1}, as in EAGLE-3, and drafts x_{t+2}. For later draft tokens neither the
token nor the hidden states are known, so row d of column t (depth d = 1 .. K-1, rotary position t + d) reads a learnt
mask token and fc of a learnt mask state in their place, the same at every depth and column; position and attention tell
the depths apart. A row sees the true columns <= t and the shallower rows of its own column: plain causal attention when
a proposal is decoded, K rows in one pass. The first layer is EAGLE-3's, the others are plain Llama layers.

Training draws each column's rows to a random depth ("COD" sampling): depth d is trained at a share max(r^d, floor) of
the columns, nested, so that a row's shallower rows are there. Deep rows are near-copies of one another, and leaving
them out costs little: with r = 0.7 and a floor of 0.2, seven depths cost 3.2 rows a column. A depth's loss is a mean
over its rows, weighted step_decay^d; theirs is a mean over all rows, which is step_decay = r but for the floor.

How deep it pays: a mask row does not see the draft tokens before it, so acceptance falls quickly with depth (built-in
target, K = 7, 300 steps, one seed: 50 % of chains keep one draft token, 20 % two, 6 % three, 0.6 % four, none five).
Any K up to 16 is trained, decoded and exported; since mask rows differ in position alone, a chain may exceed the
trained K by EXTRA_DEPTH tokens.

Tensor names are EAGLE-3's with `layers.0.*`, `layers.1.*` as in speculators and vLLM, and `mask_hidden` [N * H].
Deviations: 2 layers by default, where the paper has 4 (built-in target, 300 steps, one seed: held-out AL
1.79 with 4 and 1.76 with 2, which cost half as much); the mask token is a vector of its own, `mask_token` [H], instead
of a row of a trained copy of the embedding (the target's own stays frozen); roots are sampled by shuffling the exactly
reachable columns (layers.py) instead of sampling tokens, the same shares in expectation; the sample of a batch follows
from its optimiser step and the seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.interface import Batch, CommittedPositions, EveryPosition, Roots, StepLosses
from components.drafts.methods.batched import DepthDraft, admitted, merged
from components.drafts.methods.eagle3 import FirstLayer, scale_fuse, tap_sizes
from components.drafts.methods.training_time_test import attend, select_rows
from components.drafts.network.cached_block import CachedBlock, KvCache, TokenTable, linear_kernel
from components.drafts.network.layers import (
    BlockParts,
    BlockShape,
    CausalMask,
    LlamaLayer,
    OwnEmbedding,
    RmsNorm,
    Rope,
    Sight,
    attend_visible,
    embedded,
    embedding_of,
    finish_block,
    head_rows,
    initialise,
    norm_weight_of,
    shift_left,
)
from components.drafts.network.recompute import of_block
from components.drafts.network.sampling import most_likely_at
from components.drafts.network.training_linear import TrainingLinear
from components.drafts.settings import EXTRA_DEPTH, PEagleSettings
from components.drafts.training.batches import drawn_by_row
from components.drafts.training.losses import (
    Step,
    StepLossAccumulator,
    judged_by,
    teacher_for_steps,
)
from components.targets.forward.linear import Linear, lay_out
from components.targets.interface import AbstractTarget


class Decoder(NamedTuple):
    """Frozen copies of the weights, laid out for decoding."""

    fuse: Linear  # [T, N * H] -> [T, H]
    token_part: TokenTable  # the token half of the first layer's q, k, v
    hidden_part: Linear  # the feature half, hidden_norm's weight folded in
    masked_qkv: Tensor  # [1, (A + 2G) D], the first layer's q, k, v of a mask row
    masked: Tensor  # [1, H], its residual
    later_qkv: list[Linear]  # of the layers after the first, input_layernorm's weight folded in
    blocks: list[CachedBlock]
    head: Linear  # norm's weight folded in
    dtype: torch.dtype


class PEagleState:
    """Columns of the caches below num_columns are committed positions; later ones are leftovers of mask rows."""

    def __init__(self, caches: list[KvCache]) -> None:
        self.caches, self.num_columns = caches, 0


@final
class PEagle(DepthDraft[Decoder]):
    """See the module docstring. Trained parameters: fc, layers, norm, lm_head, mask_token, mask_hidden."""

    method: ClassVar[str] = "p-eagle"
    packs: ClassVar[bool] = True

    def __init__(self, target: AbstractTarget, settings: PEagleSettings, draft_ids: Tensor) -> None:
        super().__init__(target, draft_ids)
        self.settings, self.seed = settings, settings.init_seed or 0
        shape = self.shape = BlockShape.of(target, settings.intermediate_size, settings.own_block)
        hidden, self.num_steps = shape.hidden_size, settings.parallel_depth
        self.max_depth = self.num_steps + EXTRA_DEPTH
        num_taps = len(target.tap_layers)
        self.fc = TrainingLinear(num_taps * hidden, hidden)
        self.layers = nn.ModuleList([FirstLayer(shape), *(LlamaLayer(shape) for _ in range(settings.num_layers - 1))])
        self.norm = RmsNorm(hidden, shape.rms_norm_eps)
        self.lm_head = TrainingLinear(hidden, draft_ids.numel())
        self.embed_tokens = OwnEmbedding(target) if settings.own_embedding else None
        self.mask_token = nn.Parameter(torch.zeros(hidden))
        self.mask_hidden = nn.Parameter(torch.zeros(num_taps * hidden))

    @classmethod
    def build(cls, target: AbstractTarget, settings: PEagleSettings, draft_ids: Tensor) -> PEagle:
        """As AbstractDraft."""
        draft = cls(target, settings, draft_ids)
        generator = torch.Generator().manual_seed(draft.seed)
        initialise(draft, generator)
        with torch.no_grad():
            draft.mask_token.normal_(generator=generator)
            draft.mask_hidden.normal_(generator=generator)
            draft.lm_head.weight.copy_(head_rows(target, draft_ids))
            draft.norm.weight.copy_(norm_weight_of(target))
        return draft.to(target.device)

    @property
    def first_layer(self) -> FirstLayer:
        """The layer that reads tokens and hidden states."""
        return self.layers[0]  # type: ignore[return-value]

    @property
    def all_layers(self) -> list[FirstLayer | LlamaLayer]:
        """In the order they run."""
        return [self.first_layer, *self.later_layers]

    @property
    def later_layers(self) -> list[LlamaLayer]:
        """The layers after the first."""
        return list(self.layers[1:])  # type: ignore[arg-type]

    @torch.no_grad()
    def scale_to_target_features(self, taps: Tensor) -> None:
        """As EAGLE-3; the mask state starts at the size of the hidden states it replaces, and learns at that rate."""
        sizes = tap_sizes(taps, self.shape.hidden_size)
        scale_fuse(self.fc, sizes)
        self.mask_hidden.mul_(sizes.repeat_interleave(self.shape.hidden_size).to(self.mask_hidden))
        self.lr_scales = {"fc.weight": 1.0 / float(sizes.mean()), "mask_hidden": float(sizes.mean())}

    def training_roots(self, roots: Roots, batch: Batch) -> Roots:
        """As AbstractDraft: all in an order drawn by seed and optimiser step; the deeper, the fewer of them.

        Of a row's R roots the first R max(kept_share^d, least_share) are trained at depth d.
        """
        if not self.training:
            return roots
        counts = roots.valid.sum(1)
        order = drawn_by_row(batch, self.seed, counts.tolist(), roots.rows.shape).argsort(dim=1, stable=True)
        depths = torch.arange(self.num_steps, dtype=torch.float64)
        shares = (self.settings.kept_share**depths).clamp(min=self.settings.least_share).to(order.device)
        trained = (counts[:, None] * shares).round().clamp(min=1)  # [B, K]
        places = torch.arange(order.shape[1], device=order.device)[None, :, None]
        num_steps = (places < trained[:, None]).sum(-1)
        return Roots(roots.rows.gather(1, order), roots.valid.gather(1, order), num_steps)

    def losses(self, batch: Batch) -> StepLosses:
        """The training graph: depth d at a share max(kept_share^d, least_share) of the reachable columns."""
        self._decoder = None
        teacher = teacher_for_steps(self.target, batch, self.draft_ids)
        accumulator = StepLossAccumulator(batch, teacher, self.num_steps, self.settings.normaliser)
        roots = self.training_roots(accumulator.roots, batch)
        accumulator.use_roots(roots)
        widths = [roots.rows.shape[1]] * self.num_steps
        if roots.num_steps is not None:
            widths[1:] = [max(1, int((roots.num_steps > d).sum(1).max())) for d in range(1, self.num_steps)]
        rows, judge = accumulator.roots.rows, judged_by(self.lm_head, self.settings)
        states = self.draft_states(batch.taps, shift_left(batch.ids, 1), rows, widths, batch.causal)
        accumulator.add_steps(Step((of_depth,), judge) for of_depth in states)
        return accumulator.result(self.settings.step_decay)

    def teacher_forced(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Logits [B, R, N] of depths 0, 1, ... from columns rows [B, R]; no true token after x_{t+1} is read."""
        widths = [rows.shape[1]] * self.num_steps
        return self.draft_logits(batch.taps, shift_left(batch.ids, 1), rows, widths, batch.causal)

    @torch.no_grad()
    def propose_at_every_position(
        self, ids: Tensor, taps: Tensor, last: Tensor, depth: int, first: int = 0
    ) -> EveryPosition:
        """As AbstractDraft."""
        rows = torch.arange(first, ids.numel() - 1, device=ids.device)[None]
        states = self.draft_states(taps[None, :-1], ids[None, 1:], rows, [rows.shape[1]] * min(depth, self.max_depth))
        return EveryPosition.of_steps([most_likely_at(self.lm_head, step[0], self.draft_ids) for step in states])

    def draft_logits(
        self, taps: Tensor, next_ids: Tensor, rows: Tensor, widths: list[int], causal: CausalMask | None = None
    ) -> list[Tensor]:
        """Logits of depths 0, 1, ..., [B, widths[d], N] each: see `draft_states`."""
        return [self.lm_head(states) for states in self.draft_states(taps, next_ids, rows, widths, causal)]

    def draft_states(
        self, taps: Tensor, next_ids: Tensor, rows: Tensor, widths: list[int], causal: CausalMask | None = None
    ) -> list[Tensor]:
        """What the LM head reads at depths 0, 1, ..., depth d from the first widths[d] roots: [B, widths[d], H] each.

        taps: [B, T, N * H]; next_ids: int64 [B, T], x_{t+1}; rows: int64 [B, R], the roots; widths: R first, not
        rising; causal: positions and visibility of the columns; None: a document each row.
        """
        causal = CausalMask(next_ids.shape[1], rows.device) if causal is None else causal
        columns = self.fc(taps.to(self.fc.weight.dtype)).float()  # [B, T, H]
        masked = self.fc(self.mask_hidden).float().expand(len(rows), sum(widths[1:]), -1)
        column_inputs = self.first_layer.attention_input(embedded(self.target, next_ids, self.embed_tokens), columns)
        masked_inputs = self.first_layer.attention_input(self.mask_token.expand_as(masked), masked)
        for layer in self.all_layers:
            if isinstance(layer, LlamaLayer):
                column_inputs, masked_inputs = layer.input_layernorm(columns), layer.input_layernorm(masked)
            state = LayerRows(self.shape, layer, column_inputs, rows, widths, causal)
            if layer is self.all_layers[-1]:
                roots = of_block(partial(finish_block, layer), select_rows(columns, rows), state.mixed_at_roots())
            else:
                columns = of_block(partial(finish_block, layer), columns, state.mixed_at_columns())
            if masked.shape[1]:
                masked = of_block(partial(finish_block, layer), masked, state.mixed_at_masks(masked_inputs))
        return list(self.norm(torch.cat((roots, masked), 1)).split(widths, 1))

    def decoder(self, dtype: torch.dtype, kernel: str) -> Decoder:
        """As BatchedDraft."""
        first, hidden_size = self.first_layer, self.shape.hidden_size
        blocks = [
            CachedBlock(self.shape, layer.self_attn, layer.post_attention_layernorm, layer.mlp, dtype)
            for layer in self.all_layers
        ]
        unit_norm, weight = blocks[0].norm, blocks[0].qkv_weight
        table = embedding_of(self.target, self.embed_tokens)
        with torch.no_grad():
            masked = self.fc(self.mask_hidden)[None]
            masked_qkv = F.linear(first.attention_input(self.mask_token[None], masked), weight)
        later_parts = zip(self.later_layers, blocks[1:], strict=True)
        decoder = Decoder(
            fuse=linear_kernel(self.fc.weight.detach().to(dtype)),
            token_part=TokenTable(table, first.input_layernorm, weight[:, :hidden_size], dtype),
            hidden_part=linear_kernel(unit_norm.folded(weight[:, hidden_size:], first.hidden_norm).to(dtype)),
            masked_qkv=masked_qkv.to(dtype),
            masked=masked.to(dtype),
            later_qkv=[
                linear_kernel(unit_norm.folded(block.qkv_weight, layer.input_layernorm).to(dtype))
                for layer, block in later_parts
            ],
            blocks=blocks,
            head=linear_kernel(unit_norm.folded(self.lm_head.weight, self.norm).to(dtype)),
            dtype=dtype,
        )
        block_linears = [linear for block in blocks for linear in block.linears]
        self.kernel = lay_out(
            [decoder.fuse, decoder.hidden_part, *decoder.later_qkv, *block_linears, decoder.head], kernel
        )
        return decoder

    def empty_state(self, decoder: Decoder, capacity: int) -> PEagleState:
        room, layers = capacity + self.max_depth, len(decoder.blocks)
        return PEagleState([block.new_cache(room, layers) for block in decoder.blocks])

    def depth_logits(
        self, states: Sequence[PEagleState], committed: Sequence[CommittedPositions], depth: int, scaled: bool
    ) -> Tensor:
        """As DepthDraft: each sequence has its new positions, then a mask row for every draft token after the first."""
        decoder, num_masks = self.prepared, max(0, depth - 1)
        first, layers = decoder.blocks[0], len(decoder.blocks)
        committed = [admitted(first, *each, layers) for each in zip(states, committed, strict=True)]
        new = merged(committed)
        unit_norm, starts = decoder.blocks[0].norm, [state.num_columns for state in states]
        sizes = [each.next_tokens.shape[0] for each in committed]
        fused = decoder.fuse(new.taps.to(decoder.dtype))
        tokens = decoder.token_part(new.next_tokens.to(self.draft_ids.device))

        def with_masks(rows: Tensor, mask: Tensor) -> Tensor:
            masks = mask.expand(num_masks, -1)
            return torch.cat([part for sequence_rows in rows.split(sizes) for part in (sequence_rows, masks)])

        qkv = with_masks(tokens + decoder.hidden_part(unit_norm(fused)), decoder.masked_qkv)
        hidden, counts = with_masks(fused, decoder.masked), [size + num_masks for size in sizes]
        for state, size in zip(states, sizes, strict=True):
            state.num_columns += size
        for i, block in enumerate(decoder.blocks):
            if i > 0:
                qkv = decoder.later_qkv[i - 1](unit_norm(hidden))
            last_only = num_masks == 0 and block is decoder.blocks[-1]
            hidden = block.run_each(qkv, hidden, [state.caches[i] for state in states], starts, counts, last_only)
        if num_masks:
            hidden = torch.cat([rows[-depth:] for rows in hidden.split(counts)])
        logits = decoder.head(unit_norm(hidden) if scaled else hidden)
        return logits.unflatten(0, (len(states), num_masks + 1)).transpose(0, 1)[:depth]


@final
class LayerRows:
    """One layer's attention: true columns, and mask rows of every depth, the depths side by side in one tensor.

    Shapes: B sequences, T columns, R roots, M = all mask rows of a sequence, A heads, D head size.
    """

    def __init__(
        self, shape: BlockShape, layer: BlockParts, inputs: Tensor, rows: Tensor, widths: list[int], causal: CausalMask
    ) -> None:
        """inputs: what q, k, v read at the columns, [B, T, in]; rows: int64 [B, R]; widths: see PEagle.draft_logits."""
        self.shape, self.attention, self.inputs, self.rows, self.widths = shape, layer.self_attn, inputs, rows, widths
        self.causal, self.positions = causal, causal.at(rows)
        self.rope = Rope(shape, causal.positions)
        self.keys, self.values = self.attention.keys_values(inputs, self.rope)

    def mixed_at_columns(self) -> Tensor:
        """Every column over those up to itself: [B, A, T, D]."""
        visible = self.causal.within(self.shape.window)
        return attend_visible(self.attention.queries(self.inputs, self.rope), self.keys, self.values, visible)

    def mixed_at_roots(self) -> Tensor:
        """The roots only: [B, A, R, D]."""
        queries = self.attention.queries(select_rows(self.inputs, self.rows), Rope(self.shape, self.positions))
        return attend(self.shape, queries, self.keys, self.values, Sight(self.causal, self.rows, self.shape.window), [])

    def mixed_at_masks(self, inputs: Tensor) -> Tensor:
        """The mask rows over the columns up to their root and the shallower rows of their own root: [B, A, M, D]."""
        widths = self.widths[1:]
        positions = [self.positions[:, :width] + d for d, width in enumerate(widths, start=1)]
        rope = Rope(self.shape, torch.cat(positions, 1))
        keys, values = (part.split(widths, 2) for part in self.attention.keys_values(inputs, rope))
        queries = self.attention.queries(inputs, rope).split(widths, 2)
        mixed = []
        for i, width in enumerate(widths):
            shallower = [(keys[j][:, :, :width], values[j][:, :, :width]) for j in range(i + 1)]
            sight = Sight(self.causal, self.rows[:, :width], self.shape.window, i + 1)  # a window moves on with depth
            mixed.append(attend(self.shape, queries[i], self.keys, self.values, sight, shallower))
        return torch.cat(mixed, 2)
