"""Our own forward pass for dense Llama-shaped targets, used for plain decoding and verification.

Decoding one token of a small model takes dozens of tiny operators, so their number matters as much as the bytes of the
weights. It therefore differs from the reference implementation in transformers:
  - q, k, v are one linear layer, gate and up another; the residual is added by the projection's own kernel;
  - q and k rows are permuted at load so that a rotary pair lies side by side: rotation is one in-place complex product;
  - in float32, norm weights and sqrt(H) are folded into the following linear layer, leaving x / sqrt(|x|^2 + H eps);
  - keys and values of all layers live in one tensor, allocated once, and are written in place.
Permutation leaves q.k as it is; folding changes rounding only (the tests hold logits to transformers within 1e-4).

It runs a checkpoint whose configuration and exact set of tensor names it knows (`is_supported`): one tensor more or
less is another architecture under a known name, and transformers runs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from components.contract import UserError
from components.targets.forward.linear import Linear, lay_out
from components.targets.forward.static_cache import StaticCache, additive, tree_mask
from components.targets.interface import AbstractCache, AbstractTarget, TargetPass, TreeRows
from components.targets.shape import TapLayers, TargetShape, is_full_attention, kv_bytes_per_token, rope_parameters

ReadWeight = Callable[[str], Tensor]


class _Layer(NamedTuple):
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear
    attention_norm: Tensor | None  # None where folded into the next linear layer
    mlp_norm: Tensor | None
    qk_norm: Tensor | None  # [heads + kv_heads, head_dim], Qwen3


class Geometry(NamedTuple):
    """Cache places, rotations and mask of the rows of one pass; the same for every layer."""

    rotation: Tensor  # complex64, broadcastable to [B, T, heads, head_dim / 2]
    slots: tuple[Tensor, ...] | None  # per layer: the rows' places [B, 2 * kv_heads, T, head_dim], if side by side
    scatter: tuple[Tensor, Tensor, Tensor, Tensor] | None  # else (b, t) of each valid row and its (b, column)
    keys: tuple[Tensor, ...]  # per layer [B, kv_heads, S, head_dim]
    values: tuple[Tensor, ...]
    mask: Tensor | None  # [T, S] or [B, 1, T, S], 0 or -inf
    is_causal: bool


class FastTarget(AbstractTarget):
    """A Llama-shaped causal LM (Llama, Mistral without window, Qwen2, Qwen3) on one device in float32 or bfloat16."""

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
    ) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        self._config = config
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
        with torch.no_grad():
            self._embedding = self._fetch(read, "model.embed_tokens.weight")
            self._norm = self._fetch(read, "model.norm.weight")
            self._head_weight = self._fetch(read, "lm_head.weight") if has_lm_head else self._embedding
            self._head = self._linear(self._head_weight)
            self._layers = [self._read_layer(read, index) for index in range(shape.num_layers)]
        self._rotations = torch.empty(0)
        self._choose_kernels(kernel)

    # -- loading -----------------------------------------------------------------------------------------------------

    def _fetch(self, read: ReadWeight, name: str) -> Tensor:
        return read(name).to(device=self.device, dtype=self.dtype)

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        return Linear(weight.contiguous(), bias)

    def _choose_kernels(self, kernel: str) -> None:
        """Lay out every linear layer: as `kernel` says, or by timing on a CPU."""
        linears = [*(part for layer in self._layers for part in layer[:4]), self._head]
        self.kernel = lay_out(linears, kernel)

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
        attention_norm = self._fetch(read, f"{prefix}input_layernorm.weight")
        mlp_norm = self._fetch(read, f"{prefix}post_attention_layernorm.weight")
        qkv = torch.cat([weight for weight, _ in parts])
        gate_up = torch.cat([self._fetch(read, f"{prefix}mlp.{part}_proj.weight") for part in ("gate", "up")])
        if self._folded:
            qkv = qkv * (attention_norm * math.sqrt(self.shape.hidden_size))
            gate_up = gate_up * (mlp_norm * math.sqrt(self.shape.hidden_size))
        qk_norm = None
        if self._config.model_type == "qwen3":
            norms = [self._fetch(read, f"{prefix}self_attn.{part}_norm.weight")[pairs] for part in "qk"]
            qk_norm = torch.cat([norms[0].expand(self._heads, -1), norms[1].expand(self._kv_heads, -1)])
        out_weight, out_bias = projection("o", 0, False)
        return _Layer(
            qkv=self._linear(qkv, torch.cat(biases) if biases else None),
            out=self._linear(out_weight, out_bias),
            gate_up=self._linear(gate_up),
            down=self._linear(self._fetch(read, f"{prefix}mlp.down_proj.weight")),
            attention_norm=None if self._folded else attention_norm,
            mlp_norm=None if self._folded else mlp_norm,
            qk_norm=qk_norm,
        )

    def _pair_order(self) -> Tensor:
        """Head dimensions reordered so that the rotary pair (i, i + d/2) lies side by side."""
        half = self._head_dim // 2
        return torch.stack([torch.arange(half), torch.arange(half) + half], dim=1).flatten().to(self.device)

    # -- the cache ---------------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int, capacity: int) -> StaticCache:
        self.rotations(capacity)
        shape = (self.shape.num_layers, batch_size, 2 * self._kv_heads, capacity, self._head_dim)
        return StaticCache(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def rotations(self, capacity: int) -> Tensor:
        """e^{i t w_j} for at least the columns t below `capacity`, complex64 [>= capacity, 1, head_dim / 2]."""
        if self._rotations.shape[0] < capacity:
            self._rotations = self._rotation_table(capacity)
        return self._rotations

    def _rotation_table(self, capacity: int) -> Tensor:
        """e^{i t w_j} for column t and pair j, complex64 [capacity, 1, head_dim / 2], frequencies of transformers."""
        rope_type = rope_parameters(self._config).get("rope_type", "default")
        initialise = (
            LlamaRotaryEmbedding.compute_default_rope_parameters
            if rope_type == "default"
            else ROPE_INIT_FUNCTIONS[rope_type]
        )
        frequencies, scaling = initialise(self._config, device=torch.device("cpu"))
        angles = torch.arange(capacity, dtype=torch.float32)[:, None] * frequencies.float()
        return (torch.complex(angles.cos(), angles.sin()) * scaling).unsqueeze(1).to(self.device)

    def _rotations_at(self, columns: Tensor) -> Tensor:
        """Rotations of columns int64 [B, T] on the CPU: complex64 [B, T, 1, head_dim / 2]."""
        # index_select costs half of what indexing with a tensor of two axes does.
        rotations = self._rotations.index_select(0, columns.view(-1).to(self.device))
        return rotations.view(*columns.shape, *rotations.shape[1:])

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
        x = F.embedding(ids.to(self.device), self._embedding).view(num_sequences * num_rows, -1)
        out = self.run_layers(x, geometry, cache, num_sequences, num_rows, logits == "all", features)
        cache.lengths = cache.lengths + (num_rows if num_valid is None else num_valid)
        if logits == "last":
            assert out.last is not None
            if num_valid is None:
                rows = out.last[:, -1]
            else:
                rows = out.last[torch.arange(num_sequences), (num_valid - 1).clamp(min=0)]
            out = out._replace(logits=self.unembed(self.final_norm(rows)).unsqueeze(1))
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
        for index, layer in enumerate(self._layers):
            if index in taps:
                tapped[index] = x
            x = self._run_layer(layer, index, x, geometry, cache, num_sequences, num_rows)
        shape = (num_sequences, num_rows, -1)
        return TargetPass(
            self.unembed(self.final_norm(x)).view(shape) if logits else None,
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
        kv = cache.kv
        keys = kv[:, :, : self._kv_heads, :stop].unbind(0)
        values = kv[:, :, self._kv_heads :, :stop].unbind(0)
        if aligned:
            slots = kv[:, :, :, start:stop].unbind(0)
            mask = None
            if tree is not None:
                rotation = self._rotations_at(start + tree.depths)
                return Geometry(rotation, slots, None, keys, values, tree_mask(lengths, tree, stop, kv), False)
            if num_rows > 1 and start > 0:
                mask = kv.new_zeros(num_rows, stop)
                mask.narrow(1, start, num_rows).fill_(-math.inf).triu_(1)
            return Geometry(self._rotations[start:stop], slots, None, keys, values, mask, num_rows > 1 and start == 0)
        columns = lengths[:, None] + torch.arange(num_rows)
        valid = torch.ones_like(columns, dtype=torch.bool)
        if num_valid is not None:
            valid = torch.arange(num_rows) < num_valid[:, None]
        sequence, row = valid.nonzero().to(self.device).unbind(1)
        on_device = columns.to(self.device)
        scatter = (sequence, row, sequence, on_device[sequence, row])
        if tree is not None:
            rotation = self._rotations_at(lengths[:, None] + tree.depths)
            return Geometry(rotation, None, scatter, keys, values, tree_mask(lengths, tree, stop, kv), False)
        mask = additive(torch.arange(stop) <= columns[:, None, :, None], cache.kv)
        return Geometry(self._rotations[on_device], None, scatter, keys, values, mask, False)

    def _run_layer(
        self, layer: _Layer, index: int, x: Tensor, geometry: Geometry, cache: StaticCache, batch: int, rows: int
    ) -> Tensor:
        heads, all_heads = self._heads, self._heads + 2 * self._kv_heads
        qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(batch, rows, all_heads, self._head_dim)
        self._rotate(qkv.narrow(2, 0, heads + self._kv_heads), layer.qk_norm, geometry.rotation)
        new = qkv.narrow(2, heads, 2 * self._kv_heads)
        if geometry.slots is not None:
            geometry.slots[index].copy_(new.transpose(1, 2))
        else:
            assert geometry.scatter is not None
            from_sequence, from_row, sequence, column = geometry.scatter
            cache.kv[index][sequence, :, column] = new[from_sequence, from_row]
        queries, grouped = qkv.narrow(2, 0, heads).transpose(1, 2), batch > 1 and rows == 1 and x.device.type == "cpu"
        if (
            grouped
        ):  # the CPU's kernel reads keys and values once per row of queries: fold each group of heads into rows
            queries = queries.reshape(batch, self._kv_heads, -1, self._head_dim)
        attended = F.scaled_dot_product_attention(
            queries,
            geometry.keys[index],
            geometry.values[index],
            attn_mask=geometry.mask,
            is_causal=geometry.is_causal,
            enable_gqa=not grouped,
        )
        if grouped:
            attended = attended.reshape(batch, heads, 1, self._head_dim)
        x = layer.out.add_to(x, attended.transpose(1, 2).reshape(batch * rows, -1))
        gate_up = layer.gate_up(self._normed(x, layer.mlp_norm))
        width = gate_up.shape[1] // 2
        return layer.down.add_to(x, F.silu(gate_up.narrow(1, 0, width)).mul_(gate_up.narrow(1, width, width)))

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._floor)
        return F.rms_norm(x, (x.shape[-1],), weight, self._eps)

    def _rotate(self, qk: Tensor, norm: Tensor | None, rotation: Tensor) -> None:
        """Norm (Qwen3) and rotate queries and keys [B, T, heads, head_dim] in place."""
        exact = qk if qk.dtype == torch.float32 else qk.float()
        if norm is not None:
            size = torch.hypot(torch.linalg.vector_norm(exact, dim=-1, keepdim=True), self._head_floor)
            exact.div_(size.div_(math.sqrt(self._head_dim))).mul_(norm)
        torch.view_as_complex(exact.unflatten(-1, (-1, 2))).mul_(rotation)
        if exact is not qk:
            qk.copy_(exact)

    def final_norm(self, last: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `last`."""
        return F.rms_norm(last, (last.shape[-1],), self._norm, self._eps)

    def unembed(self, normed: Tensor) -> Tensor:
        """As AbstractTarget; gradients flow to `normed`."""
        if normed.requires_grad:  # the prepacked kernel has no backward pass
            return F.linear(normed, self._head_weight).float()
        return self._head(normed.reshape(-1, normed.shape[-1])).float().view(*normed.shape[:-1], -1)

    @property
    def embedding(self) -> Tensor:
        return self._embedding


def read_optional(read: ReadWeight, name: str) -> Tensor | None:
    """The tensor, or None where the checkpoint has none of that name."""
    try:
        return read(name)
    except KeyError:
        return None


FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ROPE_TYPES = frozenset({"default", "llama3", "linear"})


def is_supported(config: Any, names: set[str]) -> bool:
    """Whether FastTarget can run this configuration with these tensors; else TransformersTarget does."""
    if config.model_type not in FAMILIES or config.hidden_act != "silu" or not is_full_attention(config):
        return False
    if rope_parameters(config).get("rope_type", "default") not in ROPE_TYPES:
        return False
    if rope_parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
        return False
    return names == expected_names(config, names)


def expected_names(config: Any, present: set[str]) -> set[str]:
    """The tensor names of such a checkpoint; biases of the attention projections and lm_head count where present."""
    names = {"model.embed_tokens.weight", "model.norm.weight"}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        names |= {f"{prefix}self_attn.{part}_proj.weight" for part in "qkvo"}
        names |= {f"{prefix}mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
        names |= {f"{prefix}input_layernorm.weight", f"{prefix}post_attention_layernorm.weight"}
        if config.model_type == "qwen3":
            names |= {f"{prefix}self_attn.q_norm.weight", f"{prefix}self_attn.k_norm.weight"}
        joined = {f"{prefix}self_attn.{part}_proj.bias" for part in "qkv"}  # one linear layer: all of them or none
        names |= (joined if joined & present else set()) | ({f"{prefix}self_attn.o_proj.bias"} & present)
    head = {"lm_head.weight"}
    return names | (head & present if config.tie_word_embeddings else head)


def check_shapes(shape: TargetShape, tensor_shapes: Mapping[str, list[int]], location: str) -> None:
    """Raises UserError where a tensor has another shape than config.json implies. tensor_shapes: by tensor name."""
    width, head_dim = shape.hidden_size, shape.head_dim
    queries, keys = shape.num_attention_heads * head_dim, shape.num_key_value_heads * head_dim
    outputs = {"q": queries, "k": keys, "v": keys, "o": width}
    by_ending = {f"{part}_proj.bias": [rows] for part, rows in outputs.items()}
    by_ending |= {f"{part}_proj.weight": [rows, width] for part, rows in outputs.items()}
    by_ending |= {"o_proj.weight": [width, queries], "down_proj.weight": [width, shape.intermediate_size]}
    by_ending |= {f"{part}_proj.weight": [shape.intermediate_size, width] for part in ("gate", "up")}
    by_ending |= {"embed_tokens.weight": [shape.vocab_size, width], "lm_head.weight": [shape.vocab_size, width]}
    by_ending |= {f"{part}_norm.weight": [head_dim] for part in "qk"}
    by_ending |= {f"{norm}.weight": [width] for norm in ("norm", "input_layernorm", "post_attention_layernorm")}
    for name, tensor_shape in tensor_shapes.items():
        expected = by_ending[".".join(name.split(".")[-2:])]
        if tensor_shape != expected:
            raise UserError(
                f"{location}: {name} is {tensor_shape}, and config.json asks for {expected}: they do not go together"
            )
