"""All layers of a pass of few rows in one function of our own: between its steps nothing goes through Python.

A layer is eleven operators. Of a small model with one row, starting them takes longer than reading its weights. So
where every linear layer is `streamed` for this number of rows, layers.c runs the same functions one after the other,
with the same bits. Layers that need more than that (experts, norms after a part, capped scores) run one by one. A
drafter's one layer has what follows attention in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref
from typing import NamedTuple

from torch import Tensor

from components.targets.forward.attention import mask_strides, room_for_parts
from components.targets.forward.compiled import LayerPass, LayerRope, LayerView, LayerWeights, run
from components.targets.forward.linear import Linear
from components.targets.forward.mlp import Mlp
from components.targets.forward.rows import GATES, rotation_strides
from components.targets.forward.static_cache import View, mask_of
from components.targets.forward.streamed import MOST_ROWS


class LayerParts(NamedTuple):
    """What layers.c needs of a layer; norms and sinks in float32.

    window, rope: the first layer that sees the same columns, and the first one that has the same rotations.
    """

    qkv: Linear
    out: Linear
    mlp: Mlp
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    head_norms: Tensor | None
    sinks: Tensor | None
    window: int
    rope: int


class LayerEnd:
    """What follows attention in a layer: h + mlp(h) with h = residual + out(mixed).

    rows: the numbers of rows for which it runs.
    """

    def __init__(self, out: Linear, mlp: Mlp, mlp_norm: Tensor | None, eps: float) -> None:
        """mlp_norm: float32 [H], or None where it is folded into the MLP. eps: of norms."""
        self._parts = LayerParts(out, out, mlp, None, mlp_norm, None, None, 0, 0)
        self._weights = _weights_of(self._parts)
        self.rows = _rows_of([out, *mlp.linears()])
        self._sizes = {"batch": 1, "heads": 1, "size": out.in_features, **_sizes_of(mlp, eps)}

    def __call__(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """[N, H] of residual [N, H] and what attention gives, [N, in]."""
        assert residual.dtype == mixed.dtype
        of = LayerPass(rows=residual.shape[0], **self._sizes)
        y = residual.new_empty(residual.shape)
        room = residual.new_empty(of.rows * (2 * of.hidden + 3 * of.inner))
        tensors = (residual.contiguous(), mixed.contiguous(), y, room)
        run("finish", y.dtype, tensors, byref(self._weights), byref(of))
        return y


class LayersInOne:
    """All layers of a target, whose weights it holds.

    rows: the numbers of rows, over all sequences, for which it runs them.
    """

    def __init__(
        self, layers: Sequence[LayerParts], heads: int, kv_heads: int, size: int, *, scale: float, eps: float
    ) -> None:
        """size: numbers of a head. scale: of scores. eps: of norms."""
        self._layers = list(layers)
        self.rows = _rows_of([linear for of in layers for linear in (of.qkv, of.out, *of.mlp.linears())])
        self._windows, self._ropes = {layer.window for layer in layers}, {layer.rope for layer in layers}
        self._weights = (LayerWeights * len(layers))(*(_weights_of(layer) for layer in layers))
        self._sizes = _sizes_of(layers[0].mlp, eps)
        self._sizes |= {"layers": len(layers), "heads": heads, "kv_heads": kv_heads, "size": size}
        self._sizes |= {"head_floor": size * eps, "scale": scale}

    def __call__(
        self, x: Tensor, kv: Tensor, start: int, shape: tuple[int, int], views: Sequence[View], turns: Sequence[Tensor]
    ) -> Tensor:
        """What every layer reads, and what the last one gives: [layers + 1, B T, H] of x [B T, H].

        kv: the cache of all layers, whose columns from `start` on are written. shape: (B, T). views, turns: per
        layer; a turn is complex64 [B or 1, T, 1, D / 2], or without the first axis.
        """
        batch, rows = shape
        states = x.new_empty(len(self._layers) + 1, *x.shape)
        states[0] = x
        of = LayerPass(batch=batch, rows=rows, start=start, **self._sizes)
        of.cache_layer, of.cache_batch, of.cache_head = kv.stride()[:3]
        # Records of C; of a layer that takes another's, its own stays empty.
        seen, turned = (LayerView * len(views))(), (LayerRope * len(views))()
        masks = {at: mask_of(views[at], rows, x) for at in self._windows}
        for at, mask in masks.items():
            seen[at] = LayerView(_address(mask), views[at].first, *mask_strides(mask))
        for at in self._ropes:
            turned[at] = LayerRope(_address(turns[at]), *rotation_strides(turns[at]))
        room = x.new_empty(batch * rows * (2 * of.hidden + 3 * of.inner + 2 * (of.heads + of.kv_heads) * of.size))
        first = min(views[at].first for at in self._windows)
        parts = room_for_parts(batch, of.heads, rows, of.size, first, start + rows)
        run("layers", x.dtype, (states, kv, room, parts), self._weights, seen, turned, byref(of))
        return states


def _rows_of(linears: Sequence[Linear]) -> frozenset[int]:
    return frozenset(rows for rows in range(1, MOST_ROWS + 1) if all(linear.is_streamed(rows) for linear in linears))


def _sizes_of(mlp: Mlp, eps: float) -> dict[str, float]:
    assert isinstance(mlp.activation, str)
    gate_a, gate_b = GATES[mlp.activation]
    hidden, inner = mlp.down.shape
    return {"hidden": hidden, "inner": inner, "floor": hidden * eps, "gate_a": gate_a, "gate_b": gate_b}


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _weights_of(layer: LayerParts) -> LayerWeights:
    of = LayerWeights(view=layer.window, rope=layer.rope)
    linears = {"qkv": layer.qkv, "out": layer.out, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    for name, linear in linears.items():
        setattr(of, name, _address(linear.weight))
        setattr(of, f"{name}_bias", _address(linear.bias))
    for name in ("attention_norm", "mlp_norm", "head_norms", "sinks"):
        setattr(of, name, _address(getattr(layer, name)))
    return of
