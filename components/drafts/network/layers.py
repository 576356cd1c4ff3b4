"""The building blocks of a drafter's training graph: norm, Llama attention projections, SwiGLU, rotary tables.

Parameter names are those of Hugging Face Llama (`self_attn.q_proj.weight`, `mlp.gate_proj.weight`, ...), so a state
dict needs no renaming on its way to a serving engine. Decoding runs the same weights through the leaner
`cached_block.py`.

Shapes: B sequences, T columns, A attention heads, G key/value heads, D head size, H hidden size, R selected columns.

Trained columns are exactly those that decoding can reach. A proposal rooted at column t drafts x_{t+2}, x_{t+3}, ...
after the target's x_{t+1}. Step k (from 0) is fed x_{t+1+k} and drafts x_{t+2+k}. Decoding reaches it only when the
root and all tokens of the chain are answer tokens:
  M_k(t) = prod_{j=1..k+2} m_{t+j}.
Public trainers use m_{t+k} or m_{t+1+k}, which lose the first draft after the prompt or train positions after the end;
the product also stops chains that would straddle two turns.

A row of a training batch holds one document or several packed into it. Packed documents attend block by block (a column
sees the columns of its own document up to itself) and count positions from their own start, so each is computed as if
it were alone. No drafting step may cross a document border: a packed batch clears the answer mask at every document's
first token. Without packing no root reads the mask of that token, since M_k looks ahead of its column.

The target's frozen weights are read through AbstractTarget's functions. They are affine (the head) and diagonal (the
final norm, an RMSNorm or a LayerNorm), so feeding zeros and unit vectors reads them back exactly, with every scale the
model applies folded in.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from components.drafts.network.recompute import of_block
from components.drafts.network.training_linear import TrainingLinear, linear
from components.targets.interface import AbstractTarget

INIT_STD = 0.02  # Llama's initializer_range


@dataclass(frozen=True)
class BlockShape:
    """The sizes of one decoder block; heads and rotary base are the target's, unless a drafter has its own."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, bool | int | float | str], ...] = ()  # entries of EagleBlock.rope_scaling
    qk_norm: bool = False  # an RMSNorm on every head's query and key
    window: int = 0  # positions that a row attends to, its own and those before it; 0: all

    @classmethod
    def of(
        cls, target: AbstractTarget, intermediate_size: int, own: Mapping[str, Any] = MappingProxyType({})
    ) -> BlockShape:
        """The block that fits a target; intermediate_size 0 takes the target's own.

        own: fields in which it is not the target's (EagleBlock.own_block).

        A target with latent attention (DeepSeek's MLA) gets a plain grouped-query block of the same head count:
        drafters are free in their attention, and engines serve EAGLE-3 drafts for such targets in the Llama layout.
        """
        shape = target.shape
        head_dim = shape.head_dim
        if head_dim <= 0 or head_dim % 2:  # rotary pairs need an even head
            head_dim = 2 * max(1, shape.hidden_size // (2 * shape.num_attention_heads))
        block = cls(
            hidden_size=shape.hidden_size,
            intermediate_size=intermediate_size or shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=head_dim,
            rms_norm_eps=shape.rms_norm_eps,
            rope_theta=shape.rope_theta,
        )
        return replace(block, **own)

    @property
    def group(self) -> int:
        """Attention heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads


@final
class RmsNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in float32 whatever comes in (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # One kernel each way: written out, the norms took a tenth of a training step and kept four copies of x.
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


@final
class AttentionProjections(nn.Module):
    """q, k, v and o projections of grouped-query attention; the method computes the attention itself."""

    def __init__(self, shape: BlockShape, in_features: int) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = TrainingLinear(in_features, queries)
        self.k_proj = TrainingLinear(in_features, keys)
        self.v_proj = TrainingLinear(in_features, keys)
        self.o_proj = TrainingLinear(queries, shape.hidden_size)
        self.q_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None
        self.k_norm = RmsNorm(shape.head_dim, shape.rms_norm_eps) if shape.qk_norm else None

    def queries(self, x: Tensor, rope: Rope) -> Tensor:
        """[B, T, in] -> [B, A, T, D], rotated."""
        queries = self.q_proj(x).unflatten(-1, (self.shape.num_attention_heads, -1)).transpose(1, 2)
        return rope.rotate(queries if self.q_norm is None else self.q_norm(queries))

    def keys_values(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """[B, T, in] -> rotated keys and values, [B, G, T, D] each."""
        heads = (self.shape.num_key_value_heads, -1)
        keys = self.k_proj(x).unflatten(-1, heads).transpose(1, 2)
        keys = rope.rotate(keys if self.k_norm is None else self.k_norm(keys))
        return keys, self.v_proj(x).unflatten(-1, heads).transpose(1, 2)

    def output(self, mixed: Tensor) -> Tensor:
        """[B, A, T, D] -> [B, T, H]."""
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


def attend_visible(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor | None) -> Tensor:
    """Attention over visible columns: queries [B, A, T, D], keys and values [B, G, T, D] -> [B, A, T, D].

    visible: bool [B, 1, T, T]; None: every column up to itself. In the dtype of the values.
    """
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=visible, is_causal=visible is None, enable_gqa=True
    )


@final
class SwiGlu(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.gate_proj = TrainingLinear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = TrainingLinear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = TrainingLinear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BlockParts(Protocol):
    """The tensors shared by all decoder blocks; their input layers differ."""

    self_attn: AttentionProjections
    post_attention_layernorm: RmsNorm
    mlp: SwiGlu


class LlamaParts(BlockParts, Protocol):
    """A block whose input has a norm of its own, as Llama's."""

    input_layernorm: RmsNorm


def finish_block(block: BlockParts, residual: Tensor, mixed: Tensor) -> Tensor:
    """The rest of the block after attention: residual [B, R, H], mixed [B, A, R, D] -> [B, R, H]."""
    hidden = residual + block.self_attn.output(mixed)
    return hidden + block.mlp(block.post_attention_layernorm(hidden))


def run_llama_block(block: LlamaParts, x: Tensor, rope: Rope, visible: Tensor | None = None) -> Tensor:
    """All columns at once, causal or masked by `visible`: [B, T, H] -> [B, T, H]."""

    def run(x: Tensor) -> Tensor:
        normed = block.input_layernorm(x)
        keys, values = block.self_attn.keys_values(normed, rope)
        return finish_block(block, x, attend_visible(block.self_attn.queries(normed, rope), keys, values, visible))

    return of_block(run, x)


@final
class LlamaLayer(nn.Module):
    """A Llama decoder layer with Llama's tensor names."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = AttentionProjections(shape, shape.hidden_size)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = SwiGlu(shape)

    def forward(self, x: Tensor, rope: Rope, visible: Tensor | None = None) -> Tensor:
        return run_llama_block(self, x, rope, visible)


@final
class Rope:
    """Rotary positions for a fixed set of rows (Su et al. 2021, arXiv:2104.09864; halves layout of HF Llama).

    cos, sin: [..., 1, T, D] broadcast over heads; sin carries the sign of the rotated half, so that
    rotate(x) = x * cos + roll(x, D/2) * sin.
    """

    def __init__(self, shape: BlockShape, positions: Tensor) -> None:
        """positions: int64 [T] or [B, T]."""
        cos, sin = rope_tables(shape, positions)
        self.cos, self.sin = cos.unsqueeze(-3), sin.unsqueeze(-3)

    def rotate(self, x: Tensor) -> Tensor:
        return x * self.cos + x.roll(x.shape[-1] // 2, -1) * self.sin


def rope_tables(shape: BlockShape, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sign-carrying sin of positions [...]: float32 [..., D] each."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(shape, positions.device)
    size = rope_size(shape)
    cos, sin = angles.cos() * size, angles.sin() * size
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rope_frequencies(shape: BlockShape, device: torch.device) -> Tensor:
    """Angle per position of every rotary pair, radians: float32 [D / 2]."""
    exponents = torch.arange(shape.head_dim // 2, dtype=torch.float32, device=device) * 2 / shape.head_dim
    frequencies = shape.rope_theta**-exponents
    if not shape.rope_scaling:
        return frequencies
    scaling: dict[str, Any] = dict(shape.rope_scaling)
    if scaling["rope_type"] == "linear":
        return frequencies / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn_frequencies(shape, scaling, frequencies)
    # llama3: pairs that turn less than low times within the original length are slowed down by the factor, those that
    # turn more than high times are kept, and between the two it is interpolated.
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling["factor"])


def _yarn_frequencies(shape: BlockShape, scaling: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """YaRN (Peng et al. 2023, arXiv:2309.00071, section 3.2, "NTK-by-parts"): float32 [D / 2] -> [D / 2].

    Pairs below the one that turns beta_fast times within the original length are kept, those above the one that turns
    beta_slow times are slowed down by the factor, and between the two it is interpolated by the pair's number.
    """
    length, half = scaling["original_max_position_embeddings"], shape.head_dim // 2

    def pair_of(turns: float) -> float:
        return half * math.log(length / (turns * 2 * math.pi)) / math.log(shape.rope_theta)

    low, high = pair_of(scaling.get("beta_fast") or 32.0), pair_of(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, shape.head_dim - 1)
    high = high + 0.001 if low == high else high
    pairs = torch.arange(half, dtype=torch.float32, device=frequencies.device)
    slowed = ((pairs - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / scaling["factor"] * slowed + frequencies * (1.0 - slowed)


def rope_size(shape: BlockShape) -> float:
    """The factor on rotated queries and keys: YaRN's attention factor; 1 for every other kind of positions."""
    scaling: dict[str, Any] = dict(shape.rope_scaling)
    if scaling.get("rope_type") != "yarn":
        return 1.0
    if (stated := scaling.get("attention_factor")) is not None:
        return float(stated)

    def size(scale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * scale * math.log(scaling["factor"]) + 1.0

    scale, scale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return size(scale) / size(scale_all) if scale and scale_all else size(1.0)


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Every linear weight from N(0, 0.02^2), every norm weight 1; the same seed gives the same drafter."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=INIT_STD, generator=generator)
        elif isinstance(part, RmsNorm):
            nn.init.ones_(part.weight)


WIDTH_STEP = 16
"""Widths are multiples of this (see LENGTH_STEP in batches.py): filler rows are cheap, new shapes are not."""


def reachable(mask: Tensor, num_steps: int) -> Tensor:
    """M_0 .. M_{num_steps-1} of an answer mask: bool [B, T] -> bool [num_steps, B, T]; False past the end."""
    length = mask.shape[1]
    padded = torch.nn.functional.pad(mask, (0, num_steps + 1))

    def ahead(j: int) -> Tensor:  # m_{t+j} at every t
        return padded[:, j : j + length]

    masks = [ahead(1) & ahead(2)]
    for k in range(1, num_steps):
        masks.append(masks[-1] & ahead(k + 2))
    return torch.stack(masks)


def shift_left(values: Tensor, by: int) -> Tensor:
    """values[:, t + by] at every t of [B, T]; zeros past the end."""
    return torch.nn.functional.pad(values[:, by:], (0, min(by, values.shape[1])))


def packed_rows(selected: Tensor) -> tuple[Tensor, Tensor]:
    """The selected columns of each sequence, moved to the left: only these are computed.

    selected: bool [B, T]. Returns rows int64 [B, R] (column indices, ascending; R is at least the most that any
    sequence has) and valid bool [B, R] (False on filler rows, which point at column 0).
    """
    counts = selected.sum(1)
    width = min(selected.shape[1], -(-max(1, int(counts.max())) // WIDTH_STEP) * WIDTH_STEP)
    order = selected.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :width]
    valid = torch.arange(width, device=selected.device) < counts[:, None]
    return order.masked_fill(~valid, 0), valid


class Documents(NamedTuple):
    """Which document every column of a packed batch belongs to."""

    numbers: Tensor  # int64 [B, T]: 0, 1, ... over the whole batch; -1 on padding
    positions: Tensor  # int64 [B, T]: columns since the document's first


@final
class CausalMask:
    """Positions and visibility of T columns."""

    def __init__(self, num_columns: int, device: torch.device, documents: Documents | None = None) -> None:
        self.columns = torch.arange(num_columns, device=device)
        self.documents = documents

    @property
    def positions(self) -> Tensor:
        """Rotary positions: int64 [T], or [B, T] where documents are packed."""
        return self.columns if self.documents is None else self.documents.positions

    @functools.cached_property
    def visible(self) -> Tensor | None:
        """Which columns each column sees, bool [B, 1, T, T]; None: every column up to itself (torch's is_causal)."""
        if self.documents is None:
            return None
        numbers = self.documents.numbers
        return ((self.columns <= self.columns[:, None]) & (numbers[:, None] == numbers[..., None]))[:, None]

    def within(self, window: int) -> Tensor | None:
        """As `visible`, where a column sees no more than `window` columns, itself counted; 0: no such limit."""
        if not window:
            return self.visible
        near = self.columns > self.columns[:, None] - window
        return near & (self.columns[:, None] >= self.columns if self.visible is None else self.visible)

    def at(self, rows: Tensor) -> Tensor:
        """Positions of the columns rows, int64 [B, R]."""
        return rows if self.documents is None else self.documents.positions.gather(1, rows)

    def masked_columns(self, rows: Tensor, window: int = 0, ahead: int = 0) -> Tensor:
        """Which columns the columns rows, int64 [B, R], do not see: bool [B, 1, 1, R, T].

        window: above 0, columns outside the window of the position `ahead` after a row's are not seen either.
        """
        at = rows[:, None, None, :, None]
        masked = self.columns > at
        if window:
            masked = masked | (self.columns <= at + ahead - window)
        if self.documents is None:
            return masked
        numbers = self.documents.numbers
        return masked | (numbers[:, None] != numbers.gather(1, rows)[..., None])[:, None, None]

    def is_first(self, batch_size: int) -> Tensor:
        """Mark the columns at position 0: bool [B, T]."""
        return (self.positions == 0).expand(batch_size, -1)


MASK_ENTRIES = 1 << 22
"""Entries of a mask up to which rows attend at once."""


@final
class Sight:
    """Which columns the rows, int64 [B, R], see; masks exist for a stretch of rows at a time."""

    def __init__(self, causal: CausalMask, rows: Tensor, window: int = 0, ahead: int = 0) -> None:
        """window, ahead: as CausalMask.masked_columns."""
        self.causal, self.rows, self.window, self.ahead = causal, rows, window, ahead
        self._stretches: list[tuple[slice, slice]] = []
        self._whole: Tensor | None = None

    def stretches(self, group: int) -> list[tuple[slice, slice]]:
        """Slices of the rows and, for each, of the columns that they see; group: attention heads of a key head."""
        if self._stretches:
            return self._stretches
        (num_sequences, num_rows), num_columns = self.rows.shape, len(self.causal.columns)
        at_once = max(WIDTH_STEP, MASK_ENTRIES // (num_sequences * group * num_columns) // WIDTH_STEP * WIDTH_STEP)
        if num_rows <= at_once:
            self._stretches = [(slice(0, num_rows), slice(0, num_columns))]
            return self._stretches
        parts = self.rows.split(at_once, 1)
        least, most = (torch.stack([getattr(part, name)() for part in parts]).tolist() for name in ("amin", "amax"))
        for number, (low, high) in enumerate(zip(least, most, strict=True)):
            first = max(0, low + self.ahead - self.window + 1) if self.window else 0
            at = slice(number * at_once, min(num_rows, (number + 1) * at_once))
            self._stretches.append((at, slice(min(first, high), high + 1)))
        return self._stretches

    def mask(self, rows: slice, columns: slice, group: int, dtype: torch.dtype) -> Tensor:
        """The additive mask of a stretch, once for each head of a group: 0 where seen, else -inf, [B, 1, g R, T]."""
        if self._whole is not None and self._whole.dtype == dtype:
            return self._whole
        masked = self.causal.masked_columns(self.rows[:, rows], self.window, self.ahead)[:, 0, ..., columns]
        mask = torch.zeros(masked.shape, dtype=dtype, device=masked.device)
        mask = mask.masked_fill_(masked, float("-inf")).repeat(1, 1, group, 1)
        if len(self._stretches) == 1:  # small, and the same for every step
            self._whole = mask
        return mask


@final
class OwnEmbedding(nn.Module):
    """A drafter's own token embedding, `weight` [V, H]: no parameter, so that training leaves it as it is.

    It starts as the target's; drafters that bring one are read from elsewhere (components/drafts/importing).
    """

    weight: Tensor

    def __init__(self, target: AbstractTarget) -> None:
        super().__init__()
        self.register_buffer("weight", target.embedding.detach().float().clone())


ROWS_AT_ONCE = 8192
"""Rows of two tables that are compared at once: a large model's in float32 would take gigabytes."""


def rows_unlike(table: Tensor, shared: Tensor) -> Tensor:
    """By how much each row of a table [V, H] differs from one that it may be a copy of: float32 [V], 0 for copies.

    A copy may be rounded: to half precision, before or beside weights in few bits.
    """
    differences = []
    for rows, original in zip(table.split(ROWS_AT_ONCE), shared.split(ROWS_AT_ONCE), strict=True):
        exact = original.float()
        copies = (exact, *(exact.to(dtype).float() for dtype in (torch.bfloat16, torch.float16)))
        differences.append(
            torch.stack([(rows.to(exact.device).float() - copy).abs().amax(1) for copy in copies]).amin(0)
        )
    return torch.cat(differences)


def embedding_of(target: AbstractTarget, table: OwnEmbedding | None) -> Tensor:
    """The token embedding that a drafter reads, [V, H]: its own where it has one, else the target's."""
    return target.embedding if table is None else table.weight


def embedded(target: AbstractTarget, ids: Tensor, table: OwnEmbedding | None = None) -> Tensor:
    """The frozen embedding of target ids, the target's unless there is an own one: int64 [...] -> float32 [..., H]."""
    return F.embedding(ids, embedding_of(target, table)).float()


def normed_state(target: AbstractTarget, last: Tensor) -> Tensor:
    """The target's last-layer output after its final norm, the input of its LM head: [..., H] -> float32 [..., H]."""
    with torch.no_grad(), torch.autocast(last.device.type, enabled=False):
        return target.final_norm(last.to(target.dtype)).float()


@torch.no_grad()
def head_bias(target: AbstractTarget) -> Tensor | None:
    """What the target's LM head says of a state of zeros: float32 [V], None where it has no bias (Phi-3.5-MoE has)."""
    zeros = torch.zeros(1, 1, target.shape.hidden_size, dtype=target.dtype, device=target.device)
    bias = target.unembed(zeros)[0, 0].float()
    return bias if bool(bias.any()) else None


@torch.no_grad()
def head_rows(
    target: AbstractTarget, token_ids: Tensor, dtype: torch.dtype = torch.float32, *, columns: int | None = None
) -> Tensor:
    """The rows of the target's LM head for token_ids [N], without its bias: [N, H], or their first columns."""
    ids, bias = token_ids.to(target.device), head_bias(target)
    shift = None if bias is None else bias.index_select(0, ids)
    probes = torch.eye(target.shape.hidden_size, dtype=target.dtype, device=target.device)[:columns] * _PROBE
    rows = torch.empty(len(ids), len(probes), dtype=dtype, device=target.device)
    for asked, answered in zip(probes.split(PROBES_AT_ONCE), rows.split(PROBES_AT_ONCE, 1), strict=True):
        said = target.unembed(asked[None])[0].float().index_select(-1, ids)
        answered.copy_((said if shift is None else said - shift).div_(_PROBE).T)
    return rows


_PROBE = 2.0**-4
"""What the head is asked of instead of 1: so little that no soft cap bends it, and a power of two, which is exact."""
PROBES_AT_ONCE = 64
"""Columns of the head that are asked for at once: with a large vocabulary their logits are much memory."""


@final
class TargetHead(nn.Module):
    """The target's LM head for N tokens, frozen: its logits before any soft cap, which changes no order.

    A head of a large vocabulary is most of a drafter's memory: it is kept as the target has it, and once more at most,
    in the numbers that products are computed in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """weight: [N, H]; bias: float32 [N]."""
        super().__init__()
        self._multiplied: Tensor | None = None
        self.weight: Tensor
        self.bias: Tensor | None
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    @classmethod
    def of(cls, target: AbstractTarget, token_ids: Tensor | None = None) -> TargetHead:
        """Its rows for token_ids, int64 [N]; None: all V."""
        ids = torch.arange(target.shape.vocab_size) if token_ids is None else token_ids
        bias = head_bias(target)
        column = head_rows(target, ids, columns=1)
        is_rounded = bias is not None or bool((column != column.to(target.dtype)).any())  # by a bias, or a scale
        rows = head_rows(target, ids, torch.float32 if is_rounded else target.dtype)
        return cls(rows, None if bias is None else bias[ids.to(bias.device)])

    def rows(self, numbers: Tensor) -> TargetHead:
        """The rows of these numbers, int64 [N], as a head of their own."""
        numbers = numbers.to(self.weight.device)
        return TargetHead(self.weight[numbers], None if self.bias is None else self.bias[numbers])

    def forward(self, normed: Tensor) -> Tensor:
        """[..., H] -> [..., N]; gradients flow to `normed`."""
        logits = linear(normed, self._weight_for(normed))
        return logits if self.bias is None else logits + self.bias

    @property
    def num_bytes(self) -> int:
        """Of the weight, as it is kept and as it is multiplied."""
        return self.weight.nbytes + (0 if self._multiplied is None else self._multiplied.nbytes)

    def _weight_for(self, normed: Tensor) -> Tensor:
        """The weight in the numbers of the product: autocast would make, and a graph keep, one for every product."""
        kind = normed.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else normed.dtype
        if self.weight.dtype == dtype:
            return self.weight
        if self._multiplied is None or (self._multiplied.dtype, self._multiplied.device) != (dtype, self.weight.device):
            with torch.inference_mode(False):  # training goes on with it after a look at what is drafted
                self._multiplied = self.weight.to(dtype)
        return self._multiplied


class FinalNorm(NamedTuple):
    """The target's final norm: weight * x / rms(x) + bias, of x less its mean where it is a LayerNorm."""

    weight: Tensor  # float32 [H]
    bias: Tensor | None  # float32 [H]
    centres: bool


@torch.no_grad()
def final_norm_of(target: AbstractTarget) -> FinalNorm:
    """The parameters of the target's final norm, read from what it makes of numbers whose mean is 0 and their square's
    1: norm(x) = weight * x / sqrt(1 + eps) + bias, whether it takes a mean away or not."""
    size = target.shape.hidden_size
    x = torch.ones(size, dtype=target.dtype, device=target.device)
    x[size // 2 :] = -1.0
    up, down, moved = target.final_norm(torch.stack((x, -x, x + 1.0))[None])[0].float()
    bias = (up + down) / 2
    weight = (up - bias) * x.float() * (1 + target.shape.rms_norm_eps) ** 0.5
    centres = bool((moved - up).abs().max() < 0.1 * up.abs().max())  # an RMSNorm makes sqrt(2) or 0 of 1 and -1
    return FinalNorm(weight, bias if bool(bias.any()) else None, centres)


def norm_weight_of(target: AbstractTarget) -> Tensor:
    """The weight of the target's final norm, where a drafter's own RMSNorm starts: float32 [H]."""
    return final_norm_of(target).weight
