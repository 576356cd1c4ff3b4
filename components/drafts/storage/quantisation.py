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

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from components.contract import UserError
from components.weight_format import BITS, Storage

EMBEDDINGS: Final = ("embed_tokens",)
"""Lookup tables: reading single rows in fewer bits would gain nothing."""
QUANTIZATION, LM_HEAD = "quantization_config", "lm_head"
ENDING = re.compile(r"re:\.\*([\w.]+)\$")
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


def parse_storage(config: Mapping[str, Any], location: str) -> Storage | None:
    """How a checkpoint's weights are stored, by its config.json; None without a quantization_config.

    Raises:
        UserError: it is anything but weight-only, symmetric integers packed by compressed-tensors.
    """
    section = config.get(QUANTIZATION)
    if not section:
        return None
    label = f"{location}/config.json: {QUANTIZATION}"
    if not isinstance(section, dict) or section.get("quant_method") != "compressed-tensors":
        method = section.get("quant_method") if isinstance(section, dict) else section
        raise UserError(
            f"{label} says the weights are quantised by {method!r:.60}; only compressed-tensors can be checked"
        )
    groups, ignored = section.get("config_groups"), section.get("ignore") or []
    if section.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
        raise UserError(f"{label}: format {section.get('format')!r:.60} in one group of layers must be pack-quantized")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("input_activations") or group.get("output_activations"):
        raise UserError(
            f"{label}: activations are quantised too, or no weights; only weights in few bits can be checked"
        )
    if section.get("quantization_status", "compressed") != "compressed":
        raise UserError(f"{label}: quantization_status is {section['quantization_status']!r:.60}, must be compressed")
    if section.get("kv_cache_scheme") or section.get("sparsity_config") or section.get("transform_config"):
        raise UserError(f"{label}: a cache scheme, sparsity or a transform; only weights in few bits can be checked")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    fixed = (weights.get("type", "int"), weights.get("symmetric", True), bool(weights.get("dynamic")))
    named = {number: name for name, number in BITS.items()}
    if fixed != ("int", True, False) or type(bits) is not int or bits not in named:
        raise UserError(
            f"{label}: {weights!r:.100} is not symmetric, static int of {' or '.join(map(str, named))} bits"
        )
    grouped = strategy == "group" and type(size) is int and 0 < size < 2**20
    if not grouped and not (strategy == "channel" and size in (None, -1, 0)):
        raise UserError(
            f"{label}: strategy {strategy!r:.40} with group_size {size!r:.40}; must be channel, or group and a size"
        )
    targets = group.get("targets")
    if targets not in (["Linear"], ["Linear", ending_pattern(LM_HEAD)]):
        raise UserError(
            f"{label}: targets are {targets!r:.80}, must be Linear, and {ending_pattern(LM_HEAD)} where it is quantised"
        )
    if not isinstance(ignored, list):
        raise UserError(f"{label}: ignore is {ignored!r:.60}, must be a list of layers")
    keep = [_parse_ignored(one, label) for one in ignored]
    return Storage(named[bits], int(size) if grouped else 0, tuple(keep))  # type: ignore[arg-type]


def ending_pattern(name: str) -> str:
    return f"re:.*{name}$"


def _parse_ignored(pattern: Any, label: str) -> str:
    """The name, or its ending, of an ignored layer. Other regular expressions are refused, not run."""
    ending = ENDING.fullmatch(pattern) if isinstance(pattern, str) else None
    if ending is None and (not isinstance(pattern, str) or not re.fullmatch(r"[\w.]+", pattern)):
        raise UserError(f"{label}: ignore names {pattern!r:.60}; must be a layer's name, or re:.*NAME$")
    return ending[1] if ending is not None else pattern
