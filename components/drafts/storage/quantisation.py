"""Draft weights in few bits: symmetric codes rounded to nearest, one scale a group, packed into 32-bit words.

Weight-only quantisation of a linear layer's W [O, I], b bits, groups of g neighbouring inputs (g = I: one scale for
each output channel), Q = 2^(b-1) - 1:

    s = bf16(max |w| / Q) over the group,    q = clip(round(w / s), -Q, Q),    w ~ q s

This is absmax quantisation as of LLM.int8() (Dettmers et al. 2022, arXiv:2208.07339, section 2, their s_x = Q / max,
ours its inverse), by rows and by groups as round-to-nearest is in GPTQ's comparison (Frantar et al. 2022,
arXiv:2210.17323, section 4). Nothing is calibrated: a drafter is trained in minutes, and the cost of rounding is
measured. Codes keep to -Q..Q, so that zero is exact and a weight's sign is never favoured.

The scale is rounded to bfloat16 *before* the codes are taken: an engine that keeps scales in bfloat16 or float32 then
holds exactly those that were measured, and one that keeps them in float16 those from 2^-17 on. Rounding moves a scale
by 2^-8 of itself at most, less than half a code at Q = 127, so the largest weight of a group still has code Q.
Therefore quantising twice changes nothing, no weight moves by more than s / 2, and llama.cpp's Q8_0 (groups of 32, a
float16 scale of its own, max / 127) finds the same codes, and the same scales but for the small.

On disk the layer `m.weight` becomes three tensors, those that compressed-tensors calls pack-quantized:
  m.weight_packed  int32 [O, ceil(I / n)]   n = 32 / b codes a word, each with 2^(b-1) added, the first in the low bits
  m.weight_scale   bfloat16 [O, I / g]
  m.weight_shape   int64 [2]                (O, I)
What is not quantised is stored in bfloat16; d2t and t2d as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.weight_format import Storage

EMBEDDINGS: Final = ("embed_tokens",)
"""Lookup tables: reading single rows in fewer bits would gain nothing."""
WEIGHT, PACKED, SCALE, SHAPE = ".weight", ".weight_packed", ".weight_scale", ".weight_shape"
SMALLEST: Final = 1e-30
"""Groups of smaller weights become zero: bfloat16 cannot represent their scale."""


class Packed(NamedTuple):
    """One layer as it is stored; see the module docstring."""

    packed: Tensor
    scale: Tensor
    shape: Tensor

    def weight(self, bits: int) -> Tensor:
        """The dequantised weight: float32 [O, I], exact."""
        return dequantise(unpack(self.packed, bits, int(self.shape[1])), self.scale)


def quantise(weight: Tensor, bits: int, group_size: int = 0) -> tuple[Tensor, Tensor]:
    """Codes int8 [O, I] and scales bfloat16 [O, I / g] of a weight [O, I]; group_size must divide I, 0 is I itself."""
    columns = weight.shape[1]
    size, largest = group_size or columns, 2 ** (bits - 1) - 1
    assert columns % size == 0, f"groups of {size} do not divide {columns} inputs"
    groups = weight.detach().float().unflatten(1, (-1, size))
    peaks = groups.abs().amax(-1)
    scales = torch.where(peaks < SMALLEST, 1.0, peaks / largest).bfloat16()
    codes = (groups / scales.float().unsqueeze(-1)).round().clamp(-largest, largest)
    return codes.flatten(1).to(torch.int8), scales


def dequantise(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I] of codes [O, I] and scales [O, groups]."""
    groups = codes.float().unflatten(1, (scales.shape[1], -1))
    return (groups * scales.float().unsqueeze(-1)).flatten(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Codes int8 [O, I] in -2^(b-1) .. 2^(b-1) - 1 -> int32 [O, ceil(I / n)]; bits that no code takes are 0."""
    per_word = 32 // bits
    unsigned = codes.to(torch.int64) + 2 ** (bits - 1)
    padded = torch.nn.functional.pad(unsigned, (0, -codes.shape[1] % per_word))
    words = (padded.unflatten(1, (-1, per_word)) << (torch.arange(per_word) * bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def unpack(packed: Tensor, bits: int, columns: int) -> Tensor:
    """The inverse of `pack`: int8 [O, columns]."""
    shifts = torch.arange(32 // bits) * bits
    unsigned = (packed.to(torch.int64).unsqueeze(-1) >> shifts) & (2**bits - 1)
    return (unsigned.flatten(1)[:, :columns] - 2 ** (bits - 1)).to(torch.int8)


def layer_of(name: str) -> str:
    """The last part of a layer's name: midlayer.mlp.up_proj.weight -> up_proj."""
    return name.removesuffix(WEIGHT).rpartition(".")[2]


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear layer: a matrix that is no embedding."""
    return (
        tensor.is_floating_point() and tensor.ndim == 2 and name.endswith(WEIGHT) and layer_of(name) not in EMBEDDINGS
    )


def quantise_tensors(tensors: Mapping[str, Tensor], storage: Storage, location: str) -> dict[str, Tensor]:
    """Encode a drafter's tensors for storage.

    Raises:
        UserError: a group size that does not divide a layer's inputs, a weight that is no number, or too large for
            bfloat16.
    """
    linear = [name for name, tensor in tensors.items() if is_linear(name, tensor)]
    bits = storage.bits
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor.bfloat16()).all()):
            raise UserError(f"{location}: {name} holds NaN, or what bfloat16 calls infinity; train the drafter again")
        if bits is None or name not in linear or layer_of(name) in storage.keep:
            encoded[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor
            continue
        if storage.group_size and tensor.shape[1] % storage.group_size:
            raise UserError(
                f"{location}: groups of {storage.group_size} do not divide the {tensor.shape[1]} inputs of {name}: take"
                f" another group_size, or keep: [{layer_of(name)}]"
            )
        codes, scales = quantise(tensor, bits, storage.group_size)
        module = name.removesuffix(WEIGHT)
        encoded |= {module + PACKED: pack(codes, bits), module + SCALE: scales}
        encoded[module + SHAPE] = torch.tensor(tensor.shape)
    return encoded


def packed_layers(tensors: Mapping[str, Tensor]) -> dict[str, Packed]:
    """The quantised layers among stored tensors, under the names that their weights had."""
    modules = [name.removesuffix(PACKED) for name in tensors if name.endswith(PACKED)]
    return {m + WEIGHT: Packed(tensors[m + PACKED], tensors[m + SCALE], tensors[m + SHAPE]) for m in modules}


def dequantise_tensors(tensors: Mapping[str, Tensor], storage: Storage, location: str) -> dict[str, Tensor]:
    """The inverse of `quantise_tensors`: every weight in float32 under its own name.

    Raises:
        UserError: a quantised layer without one of its three tensors, or one that does not fit the others.
    """
    ends = (PACKED, SCALE, SHAPE)
    modules = {name.rpartition(".")[0] for name in tensors if name.endswith(ends)}
    for module in sorted(modules):
        check_layer(tensors, module, storage, location)
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    weights = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in plain.items()}
    bits = storage.bits or 8
    return weights | {name: layer.weight(bits) for name, layer in packed_layers(tensors).items()}


def check_layer(tensors: Mapping[str, Tensor], module: str, storage: Storage, location: str) -> None:
    """Raise UserError unless a layer's three tensors exist and fit, with finite scales above zero."""
    absent = [module + end for end in (PACKED, SCALE, SHAPE) if module + end not in tensors]
    bits = storage.bits
    if absent or bits is None:
        fault = f"{absent[0]} is missing" if absent else f"{module} is packed, and its weights are {storage.weights}"
        raise UserError(f"{location}: {fault}: it was not saved whole; make it again")
    layer = Packed(*(tensors[module + end] for end in (PACKED, SCALE, SHAPE)))
    per_word = 32 // bits
    sizes = layer.shape.tolist() if layer.shape.numel() == 2 else [0, 0]
    groups = sizes[1] // storage.group_size if storage.group_size else 1
    fits = sizes[0] > 0 and sizes[1] > 0 and sizes[1] % (storage.group_size or 1) == 0
    expected = [sizes[0], -(-sizes[1] // per_word)], [sizes[0], groups]
    if not fits or [list(layer.packed.shape), list(layer.scale.shape)] != list(expected):
        raise UserError(
            f"{location}: {module}: {PACKED[1:]} {list(layer.packed.shape)} and {SCALE[1:]} {list(layer.scale.shape)}"
            f" do not make a matrix of {sizes} in {storage.description}; make it again"
        )
    if layer.packed.dtype != torch.int32 or not layer.scale.is_floating_point():
        raise UserError(f"{location}: {module} is packed as {layer.packed.dtype} with scales {layer.scale.dtype}")
    if not bool(torch.isfinite(layer.scale).all()) or not bool((layer.scale > 0).all()):
        raise UserError(f"{location}: {module}{SCALE} holds a scale that is no number above zero; make it again")


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
