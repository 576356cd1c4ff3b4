"""Our own forward pass for Llama-shaped targets, used for plain decoding and verification.

Decoding one token of a small model takes dozens of tiny operators, so their number matters as much as the bytes of the
weights. It therefore differs from the reference implementation in transformers:
  - q, k, v are one linear layer, gate and up another; the residual is added by the projection's own kernel;
  - q and k rows are permuted at load so that a rotary pair lies side by side: rotation is one in-place complex product;
  - in float32, norm weights and sqrt(H) are folded into the following linear layer, leaving x / sqrt(|x|^2 + H eps);
  - keys and values of all layers live in one tensor, allocated once, and are written in place;
  - on a CPU with a C compiler, norm, rotation, gate and the attention of few rows are one function each of our own.
Permutation leaves q.k as it is; folding changes rounding only (the tests hold logits to transformers within 1e-4).

Which families it runs, and what differs between them, architecture.py reads from their configuration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from components.outside_json import JsonObject
from components.targets.forward.architecture import (
    ENDS,
    ReadWeight,
    architecture_of,
    ends_of,
    read_apart,
    tensors_of,
)
from components.targets.forward.compiled import can_run
from components.targets.forward.layers import LayerParts, LayersInOne
from components.targets.forward.linear import Layouts, Linear
from components.targets.forward.mlp import Experts, Mlp
from components.targets.forward.rows import GATES, normed, rotate
from components.targets.forward.static_cache import (
    Scoring,
    StaticCache,
    View,
    attend,
    view_of_chain,
    view_of_columns,
    view_of_tree,
)
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows
from components.targets.shape import TapLayers, TargetShape, kv_bytes_per_token

EMBEDDING: Final = "model.embed_tokens.weight"
ReadTable = Callable[[str], Tensor | None]
"""Gives a matrix of the checkpoint by its name, as it is stored; None for a small one, which is better copied."""

LAID_OUT: Final = 4 << 30
"""Bytes of experts up to which they get layouts beside the plain one: a mixture is held in memory once for each."""


class _Layer(NamedTuple):
    qkv: Linear
    out: Linear
    mlp: Mlp | Experts
    attention_norm: Tensor | None  # None where folded into the next linear layer
    mlp_norm: Tensor | None
    qk_norm: Tensor | None  # float32 [heads + kv_heads, head_dim]
    added_norms: tuple[Tensor, Tensor] | None  # of what attention and MLP add, Gemma 2 and 3
    scoring: Scoring


class Geometry(NamedTuple):
    """Cache places, rotations and views of the rows of one pass."""

    rotations: tuple[Tensor, ...]  # per layer: complex64, broadcastable to [B, T, heads, head_dim / 2]
    slots: tuple[Tensor, ...] | None  # per layer: the rows' places [B, 2 * kv_heads, T, head_dim], if side by side
    scatter: tuple[Tensor, Tensor, Tensor, Tensor] | None  # else (b, t) of each valid row and its (b, column)
    keys: tuple[Tensor, ...]  # per layer [B, kv_heads, S, head_dim], from the first column of its view
    values: tuple[Tensor, ...]
    views: tuple[View, ...]  # per layer


class FastTarget(AbstractTarget):
    """A Llama-shaped causal LM (of `architecture.FAMILIES`) on one device in float32 or bfloat16."""

    def __init__(
        self,
        config: Any,
        shape: TargetShape,
        read: ReadWeight,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kernel: str = "auto",
        has_lm_head: bool,
        layers: bool = True,
        read_rows: ReadTable | None = None,
    ) -> None:
        """layers: False reads embedding, final norm and head alone; such a target runs no passes.

        read_rows: gives a large table as it is stored, in its file. Of the embedding few rows are read at a time, so it
        stays there, and so does the head for gradients: what it computes with is laid out otherwise.
        """
        self.shape, self.device, self.dtype = shape, device, dtype
        architecture = architecture_of(config) or (None if layers else ends_of(config, set(ENDS)))
        assert architecture is not None, f"{config.model_type} is not known here"
        self._config, self.architecture = config, architecture
        self._eps = shape.rms_norm_eps
        self._folded = dtype == torch.float32
        self._heads, self._kv_heads, self._head_dim = (
            shape.num_attention_heads,
            shape.num_key_value_heads,
            shape.head_dim,
        )
        self._bytes_per_token = kv_bytes_per_token(config, dtype.itemsize)
        # |x| / sqrt(H) with the norm's epsilon inside: hypot(|x|, sqrt(H eps)); the 1 / sqrt(H) is folded into weights
        self._floor = torch.tensor(math.sqrt(shape.hidden_size * self._eps), device=device)
        self._head_floor = torch.tensor(math.sqrt(self._head_dim * self._eps), device=device)
        self._in_one = can_run(device, dtype, shape.hidden_size, shape.head_dim)
        self._windows = tuple(set(architecture.windows))
        self._embedding_scale = None
        if architecture.embedding_scale != 1.0:
            self._embedding_scale = torch.tensor(architecture.embedding_scale, dtype=dtype, device=device)
        read = read_apart(read, shape) if architecture.joined else read
        self._layers: list[_Layer] = []
        with torch.no_grad():
            self._norm = self._fetch_norm(read, "model.norm.weight")
            self._read_ends(read, read_rows, has_lm_head)
            self._read_layers(read, shape.num_layers if layers else 0, kernel)
        self._rotations: tuple[Tensor, ...] = ()

    # -- loading -----------------------------------------------------------------------------------------------------

    def _fetch(self, read: ReadWeight, name: str) -> Tensor:
        return read(name).to(device=self.device, dtype=self.dtype)

    def _fetch_norm(self, read: ReadWeight, name: str) -> Tensor:
        """What the norm multiplies by; Gemma adds one in float32, as bfloat16 would lose most of the weight's bits."""
        weight = self._fetch(read, name)
        if self.architecture.exact_norms or (self._in_one and not self.architecture.plus_one):
            return weight.float()
        return 1.0 + weight.float() if self.architecture.plus_one else weight

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight.contiguous(), bias, in_one=self._fits_one_call)

    def _read_ends(self, read: ReadWeight, read_rows: ReadTable | None, has_lm_head: bool) -> None:
        """Read embedding and head. A tied head is the embedding: one tensor, or one layout and rows in the file."""
        name = "lm_head.weight" if has_lm_head else EMBEDDING
        head = self._fetch(read, name)
        self._head = Linear(head.contiguous())
        rows, head_rows = (None if read_rows is None else read_rows(which) for which in (EMBEDDING, name))
        self._head_rows = head if head_rows is None else head_rows
        if rows is None:
            rows = self._fetch(read, EMBEDDING) if has_lm_head else head
        self._rows = rows

    def _read_layers(self, read: ReadWeight, count: int, kernel: str) -> None:
        """Read the layers and lay out every linear one: as `kernel` says, or by timing on a CPU.

        Each is laid out when it has been read, so that nothing but one layer and a sample is in memory twice. Experts
        above LAID_OUT stay plain.
        """
        sizes = tensors_of(self.architecture, self.shape, {"lm_head.weight"}) if count else {}
        of_weights = {name: math.prod(size) * self.dtype.itemsize for name, size in sizes.items() if len(size) > 1}
        of_experts = sum(num_bytes for name, num_bytes in of_weights.items() if ".experts." in name)
        is_large = of_experts > LAID_OUT
        of_weights.pop(EMBEDDING, None)
        layouts = Layouts(kernel, sum(of_weights.values()) - is_large * of_experts)
        layouts.add([self._head])
        for index in range(count):
            layer = self._read_layer(read, index)
            is_plain = is_large and isinstance(layer.mlp, Experts)
            layouts.add([layer.qkv, layer.out, *([] if is_plain else layer.mlp.linears())])
            self._layers.append(layer)
        self.kernel = layouts.finish()

    @functools.cached_property
    def _in_one_call(self) -> LayersInOne | None:
        """The layers as one function of our own, where there is one for such layers."""
        if not (self._fits_one_call and self._layers):
            return None
        of, parts = self.architecture, list[LayerParts]()
        for layer, window, rope in zip(self._layers, of.windows, of.rope_kinds, strict=True):
            assert isinstance(layer.mlp, Mlp)
            norms = (layer.attention_norm, layer.mlp_norm, layer.qk_norm, layer.scoring.sinks)
            firsts = of.windows.index(window), of.rope_kinds.index(rope)
            parts.append(LayerParts(layer.qkv, layer.out, layer.mlp, *norms, *firsts))
        scale = of.query_scale or self._head_dim**-0.5
        return LayersInOne(parts, self._heads, self._kv_heads, self._head_dim, scale=scale, eps=self._eps)

    @property
    def _fits_one_call(self) -> bool:
        """Whether its layers consist of what layers.c runs."""
        of = self.architecture
        is_more = of.sandwich or of.attention_cap or of.experts is not None
        return self._in_one and not is_more and of.activation in GATES

    def _read_layer(self, read: ReadWeight, index: int) -> _Layer:
        prefix = f"model.layers.{index}."
        pairs = self._pair_order()

        def projection(part: str, heads: int, paired: bool) -> tuple[Tensor, Tensor | None]:
            weight = self._fetch(read, f"{prefix}self_attn.{part}_proj.weight")
            bias = read_optional(read, f"{prefix}self_attn.{part}_proj.bias")
            bias = None if bias is None else bias.to(weight)
            if paired:
                weight = weight.view(heads, self._head_dim, -1)[:, pairs].reshape(weight.shape)
                bias = None if bias is None else bias.view(heads, self._head_dim)[:, pairs].reshape(-1)
            return weight, bias

        parts = [projection("q", self._heads, True), projection("k", self._kv_heads, True)]
        parts.append(projection("v", self._kv_heads, False))
        biases = [bias for _, bias in parts if bias is not None]
        attention_norm = self._fetch_norm(read, f"{prefix}input_layernorm.weight")
        mlp_norm = self._fetch_norm(read, f"{prefix}{self.architecture.mlp_norm}.weight")
        qkv = torch.cat([weight for weight, _ in parts])
        if self._folded:
            qkv = qkv * (attention_norm * math.sqrt(self.shape.hidden_size))
        qk_norm = None
        if self.architecture.qk_norm:
            norms = [self._fetch_norm(read, f"{prefix}self_attn.{part}_norm.weight")[pairs] for part in "qk"]
            qk_norm = torch.cat([norms[0].expand(self._heads, -1), norms[1].expand(self._kv_heads, -1)]).float()
        added_norms = None
        if self.architecture.sandwich:
            names = [f"{prefix}post_{part}_layernorm.weight" for part in ("attention", "feedforward")]
            added_norms = (self._fetch_norm(read, names[0]), self._fetch_norm(read, names[1]))
        sinks = self._fetch(read, f"{prefix}self_attn.sinks").float() if self.architecture.sinks else None
        out_weight, out_bias = projection("o", 0, False)
        return _Layer(
            qkv=self._linear(qkv, torch.cat(biases) if biases else None),
            out=self._linear(out_weight, out_bias),
            mlp=self._read_mlp(read, index, mlp_norm * math.sqrt(self.shape.hidden_size) if self._folded else None),
            attention_norm=None if self._folded else attention_norm,
            mlp_norm=None if self._folded else mlp_norm,
            qk_norm=qk_norm,
            added_norms=added_norms,
            scoring=Scoring(self.architecture.query_scale or None, self.architecture.attention_cap, sinks),
        )

    def _read_mlp(self, read: ReadWeight, index: int, scale: Tensor | None) -> Mlp | Experts:
        """What follows attention in a layer; scale [H]: the norm in front of it where that is folded."""

        def scaled(weight: Tensor, bias: Tensor | None = None) -> Linear:
            return self._linear(weight if scale is None else weight * scale, bias)

        def first(*names: str) -> Linear:
            return scaled(torch.cat([self._fetch(read, f"{name}.weight") for name in names]))

        def mlp(prefix: str, gate: str, up: str, down: str) -> Mlp:
            last = self._linear(self._fetch(read, f"{prefix}.{down}.weight"))
            return Mlp(first(f"{prefix}.{gate}", f"{prefix}.{up}"), last, self.architecture.activation)

        layer, settings = f"model.layers.{index}", self.architecture.experts
        if settings is None or not settings.layers[index]:
            return mlp(f"{layer}.mlp", "gate_proj", "up_proj", "down_proj")
        module = f"{layer}.{settings.module}"
        if settings.parts is not None:
            experts = [mlp(f"{module}.experts.{number}", *settings.parts) for number in range(settings.count)]
            return Experts(first(f"{module}.{settings.router}"), experts, settings.per_token, settings.is_normalised)
        parts = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        stacked = zip(*(self._fetch(read, f"{module}.experts.{part}") for part in parts), strict=True)
        experts = []
        for gate_up, gate_up_bias, down, down_bias in stacked:  # gate and up of [in, 2 * width] lie in turns
            halves = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1).t()
            biases = torch.cat([gate_up_bias[::2], gate_up_bias[1::2]])
            last = self._linear(down.t(), down_bias)
            experts.append(Mlp(scaled(halves, biases), last, self.architecture.activation))
        weight, bias = (self._fetch(read, f"{module}.{settings.router}.{part}") for part in ("weight", "bias"))
        return Experts(scaled(weight, bias), experts, settings.per_token, settings.is_normalised)

    def _pair_order(self) -> Tensor:
        """Head dimensions reordered so that the rotary pair (i, i + d/2) lies side by side."""
        half = self._head_dim // 2
        return torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten().to(self.device)

    @property
    def can_be_recorded(self) -> bool:
        """Whether a pass is the same work whatever its numbers are: a router's choice decides which experts run."""
        return self.architecture.experts is None

    # -- the cache ---------------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, capacity: int) -> StaticCache:
        self.rotations(capacity)
        shape = (self.shape.num_layers, batch_size, 2 * self._kv_heads, capacity, self._head_dim)
        return StaticCache(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def rotations(self, capacity: int) -> tuple[Tensor, ...]:
        """For each kind of rotary settings: e^{i t w_j} for at least the columns t below `capacity`.

        complex64 [>= capacity, 1, head_dim / 2].
        """
        if not self._rotations or self._rotations[0].shape[0] < capacity:
            self._rotations = tuple(self._rotation_table(capacity, *kind) for kind in self.architecture.ropes)
        return self._rotations

    def _rotation_table(self, capacity: int, layer_type: str | None, rope: JsonObject) -> Tensor:
        """e^{i t w_j} for column t and pair j, complex64 [capacity, 1, head_dim / 2], frequencies of transformers."""
        scaling, rope_type = 1.0, rope.get("rope_type", "default")
        if rope_type == "default":
            exponents = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
            frequencies = 1.0 / rope["rope_theta"] ** exponents
        else:
            of_type = {} if layer_type is None else {"layer_type": layer_type}
            initialise = ROPE_INIT_FUNCTIONS[rope_type]
            frequencies, scaling = initialise(self._config, device=torch.device("cpu"), **of_type)
        angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequencies.float()
        return (torch.complex(angles.cos(), angles.sin()) * scaling).unsqueeze(1).to(self.device)

    def per_layer(self, of_kind: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Of each layer its entry of `of_kind`, which has one for each kind of rotary settings."""
        return tuple(of_kind[kind] for kind in self.architecture.rope_kinds)

    def _rotations_at(self, columns: Tensor) -> tuple[Tensor, ...]:
        """Rotations of columns int64 [B, T] on the CPU, per layer: complex64 [B, T, 1, head_dim / 2]."""
        # index_select costs half of what indexing with a tensor of two axes does.
        places, shape = columns.view(-1).to(self.device), (*columns.shape, 1, -1)
        return self.per_layer([table.index_select(0, places).view(shape) for table in self._rotations])

    # -- the pass ----------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self,
        ids: Tensor,
        cache: AbstractCache,
        *,
        num_valid: Tensor | None = None,
        logits: Literal["all", "last", "none"] = "all",
        features: bool | TapLayers = False,
        tree: TreeRows | None = None,
    ) -> TargetPass:
        assert isinstance(cache, StaticCache)
        num_sequences, num_rows = ids.shape
        geometry = self._geometry(cache, num_sequences, num_rows, num_valid, tree)
        x = self.embed(ids.to(self.device).reshape(-1))
        out = self.run_layers(x, geometry, cache, num_sequences, num_rows, logits == "all", features)
        cache.lengths = cache.lengths + (num_rows if num_valid is None else num_valid)
        if logits == "last":
            assert out.last is not None
            if num_valid is None:
                rows = out.last[:, -1]
            else:
                rows = out.last[torch.arange(num_sequences), (num_valid - 1).clamp(min=0)]
            out = out._replace(logits=self.silence(self.unembed(self.final_norm(rows))).unsqueeze(1))
        return out if features else out._replace(last=None)

    def run_layers(
        self,
        x: Tensor,
        geometry: Geometry,
        cache: StaticCache,
        num_sequences: int,
        num_rows: int,
        logits: bool,
        features: bool | TapLayers,
    ) -> TargetPass:
        """All layers over embedded rows [B * T, H]; gives `last` always, logits of every row and taps on request."""
        taps, tapped = self.tapped_by(features), dict[int, Tensor]()
        assert self._layers, "it was opened without its layers"
        if geometry.slots is not None and self._in_one_call is not None and x.shape[0] in self._in_one_call.rows:
            start = geometry.views[0].first + geometry.keys[0].shape[2] - num_rows
            of = (num_sequences, num_rows)
            states = self._in_one_call(x, cache.kv, start, of, geometry.views, geometry.rotations)
            tapped, x = {index: states[index] for index in taps}, states[-1]
        else:
            for index, layer in enumerate(self._layers):
                if index in taps:
                    tapped[index] = x
                x = self._run_layer(layer, index, x, geometry, cache, num_sequences, num_rows)
        shape = (num_sequences, num_rows, -1)
        return TargetPass(
            self.silence(self.unembed(self.final_norm(x))).view(shape) if logits else None,
            torch.cat([tapped[index] for index in taps], dim=-1).view(shape) if taps else None,
            x.view(shape),
        )

    def _geometry(
        self, cache: StaticCache, num_sequences: int, num_rows: int, num_valid: Tensor | None, tree: TreeRows | None
    ) -> Geometry:
        lengths = cache.lengths
        start = int(lengths[0])
        aligned = num_sequences == 1 or bool((lengths == start).all())
        longest = start if aligned else int(lengths.max())
        stop = longest + num_rows
        assert stop <= cache.capacity, f"{stop} columns do not fit a cache of {cache.capacity}"
        kv, windows = cache.kv, self._windows
        slots, scatter = None, None
        if aligned:
            slots = kv[:, :, :, start:stop].unbind(0)
        else:
            columns = lengths[:, None] + torch.arange(num_rows)
            valid = torch.ones_like(columns, dtype=torch.bool)
            if num_valid is not None:
                valid = torch.arange(num_rows) < num_valid[:, None]
            sequence, row = valid.nonzero().to(self.device).unbind(1)
            scatter = (sequence, row, sequence, columns.to(self.device)[sequence, row])
        if tree is not None:
            rotations = self._rotations_at(lengths[:, None] + tree.depths)
            views = {window: view_of_tree(lengths, tree, stop, window, kv) for window in windows}
        elif aligned:
            rotations = self.per_layer([table[start:stop] for table in self._rotations])
            whole = self._layers[0].scoring.materialises
            views = {window: view_of_chain(num_rows, start, window, kv, materialises=whole) for window in windows}
        else:
            rotations = self._rotations_at(columns)
            views = {window: view_of_columns(columns, stop, window, kv) for window in windows}
        keys, values = self._read_columns(kv, stop, views)
        return Geometry(rotations, slots, scatter, keys, values, tuple(views[of] for of in self.architecture.windows))

    def _read_columns(
        self, kv: Tensor, stop: int, views: Mapping[int, View]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Keys and values of each layer, from the first column of its view to `stop`; views: by window."""
        both = []
        for heads in (slice(self._kv_heads), slice(self._kv_heads, None)):
            of = {window: kv[:, :, heads, view.first : stop].unbind(0) for window, view in views.items()}
            layers = enumerate(self.architecture.windows)
            both.append(next(iter(of.values())) if len(of) == 1 else tuple(of[window][n] for n, window in layers))
        return both[0], both[1]

    def _run_layer(
        self, layer: _Layer, index: int, x: Tensor, geometry: Geometry, cache: StaticCache, batch: int, rows: int
    ) -> Tensor:
        heads, all_heads = self._heads, self._heads + 2 * self._kv_heads
        qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(batch, rows, all_heads, self._head_dim)
        slots, rotation = None if geometry.slots is None else geometry.slots[index], geometry.rotations[index]
        if self._in_one:
            rotate(qkv, self._kv_heads, layer.qk_norm, self._head_dim * self._eps, rotation, slots)
        else:
            self._rotate(qkv.narrow(2, 0, heads + self._kv_heads), layer.qk_norm, rotation)
        new = qkv.narrow(2, heads, 2 * self._kv_heads)
        if slots is None:
            assert geometry.scatter is not None
            from_sequence, from_row, sequence, column = geometry.scatter
            cache.kv[index][sequence, :, column] = new[from_sequence, from_row]
        elif not self._in_one:
            slots.copy_(new.transpose(1, 2))
        queries, view = qkv.narrow(2, 0, heads), geometry.views[index]
        attended = attend(queries, geometry.keys[index], geometry.values[index], view, layer.scoring)
        attended = attended.view(batch * rows, -1)
        norms = layer.added_norms
        x = layer.out.add_to(x, attended) if norms is None else x + self._normed(layer.out(attended), norms[0])
        inner = self._normed(x, layer.mlp_norm)
        return layer.mlp.add_to(x, inner) if norms is None else x + self._normed(layer.mlp(inner), norms[1])

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if self._in_one and not x.requires_grad:
            return normed(x, weight, self.shape.hidden_size * self._eps)
        if weight is None:
            return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return self._rms_norm(x, weight)

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight.dtype == x.dtype:
            return F.rms_norm(x, (x.shape[-1],), weight, self._eps)
        return F.rms_norm(x.float(), (x.shape[-1],), weight, self._eps).to(x.dtype)

    def _rotate(self, qk: Tensor, norm: Tensor | None, rotation: Tensor) -> None:
        """Norm and rotate queries and keys [B, T, heads, head_dim] in place."""
        exact = qk if qk.dtype == torch.float32 else qk.float()
        if norm is not None:
            size = torch.hypot(torch.linalg.vector_norm(exact, dim=-1, keepdim=True), self._head_floor)
            exact.div_(size.div_(math.sqrt(self._head_dim))).mul_(norm)
        torch.view_as_complex(exact.unflatten(-1, (-1, 2))).mul_(rotation)
        if exact is not qk:
            qk.copy_(exact)

    def final_norm(self, last: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `last`."""
        return self._normed(last, self._norm)

    def unembed(self, normed: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `normed`."""
        cap = self.architecture.logit_cap
        if normed.requires_grad:  # the prepacked kernel has no backward pass
            logits = F.linear(normed, self._head_rows.to(self.dtype)).float()
            return torch.tanh(logits / cap) * cap if cap else logits
        logits = self._head(normed.reshape(-1, normed.shape[-1])).float().view(*normed.shape[:-1], -1)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def embed(self, ids: Tensor) -> Tensor:
        """What the first layer reads for ids int64 [N] on the device: [N, H]."""
        rows = F.embedding(ids, self._rows).to(self.dtype)
        return rows if self._embedding_scale is None else rows * self._embedding_scale

    @functools.cached_property
    def embedding(self) -> Tensor:
        """As AbstractTarget; a table that is stored in more bits is rounded, and in memory, once somebody asks."""
        return self._rows if self._rows.dtype.itemsize <= self.dtype.itemsize else self._rows.to(self.dtype)


def read_optional(read: ReadWeight, name: str) -> Tensor | None:
    """The tensor, or None where the checkpoint has none of that name."""
    try:
        return read(name)
    except KeyError:
        return None
