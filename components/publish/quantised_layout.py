"""A drafter's checkpoint with weights in few bits: compressed-tensors' "pack-quantized", which vLLM and SGLang read.

Any layout can hold it: where the layout has the weight of a linear layer, `m.weight`, there are `m.weight_packed`,
`m.weight_scale` and `m.weight_shape` (drafts/quantised.py), and config.json has a `quantization_config` that says bits,
groups, and which layers are not quantised. Weight-only, symmetric, int: what else compressed-tensors knows
(activations, zero points, fp8, sparsity) is refused, because nothing of ours would check it.

Engines mean by target "Linear" the linear layers and not the LM head, which is therefore named where it is quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from components.contract import UserError
from components.drafts.quantised import (
    EMBEDDINGS,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    check_layer,
    is_linear,
    layer_of,
    packed_layers,
)
from components.drafts.storage import BITS, Storage
from components.publish.exact_check import LaidOut, Spec
from components.publish.layout import AbstractLayout, OwnForm, Source

CONFIG = "quantization_config"
LM_HEAD = "lm_head"
ENDING = re.compile(r"re:\.\*([\w.]+)\$")


def lay_out_stored(layout: AbstractLayout, own: OwnForm, source: Source) -> LaidOut:
    """`layout.lay_out` of a drafter whose weights were rounded, in bfloat16 but for what is packed.

    Raises:
        UserError: the layout changes a quantised weight (Medusa's heads of a cut vocabulary), so it cannot hold it.
    """
    assert own.storage is not None
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in own.tensors.items()}
    laid_out = layout.lay_out(own._replace(tensors=tensors), source)
    if own.storage.bits is None:
        return laid_out
    # Layouts rename: a tensor that is the very same object is the drafter's own, under the format's name.
    places = {id(tensors[name]): name for name in own.packed}
    found = dict(laid_out.tensors)
    for name, tensor in laid_out.tensors.items():
        if id(tensor) in places:
            layer, module = own.packed[places.pop(id(tensor))], name.removesuffix(WEIGHT)
            del found[name]
            found |= {module + PACKED: layer.packed, module + SCALE: layer.scale, module + SHAPE: layer.shape}
    if places:
        name = sorted(places.values())[0]
        raise UserError(
            f"{layout.format} checkpoint: the format holds {name} changed, so not in {own.storage.weights}: say keep:"
            f" [{layer_of(name)}] in drafts.quantise_draft, or leave the step out"
        )
    own_names = {id(tensor) for tensor in tensors.values()}
    for name, tensor in found.items():
        if is_linear(name, tensor) and id(tensor) not in own_names and layer_of(name) not in own.storage.keep:
            raise UserError(
                f"{layout.format} checkpoint: the format adds {name}, which is not in {own.storage.weights}: leave"
                " drafts.quantise_draft out"
            )
    head = any(name.endswith(LM_HEAD + PACKED) for name in found)
    return LaidOut({**laid_out.config, CONFIG: quantization_config(own.storage, head)}, found)


def quantization_config(storage: Storage, head: bool) -> dict[str, Any]:
    """What config.json says of the packed layers. head: whether the LM head is one of them."""
    weights: dict[str, Any] = {
        "num_bits": storage.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if storage.group_size else "channel",
        "group_size": storage.group_size or None,
        "dynamic": False,
    }
    targets = ["Linear", *([_ending(LM_HEAD)] if head else [])]
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [_ending(name) for name in storage.keep],
        "kv_cache_scheme": None,
    }


def _ending(name: str) -> str:
    return f"re:.*{name}$"


def storage_in(config: Mapping[str, Any], where: str) -> Storage | None:
    """How a checkpoint's weights are stored by its config.json; None where it says nothing.

    Raises:
        UserError: it says anything but weight-only, symmetric integers packed by compressed-tensors.
    """
    told = config.get(CONFIG)
    if not told:
        return None
    at = f"{where}/config.json: {CONFIG}"
    if not isinstance(told, dict) or told.get("quant_method") != "compressed-tensors":
        method = told.get("quant_method") if isinstance(told, dict) else told
        raise UserError(
            f"{at} says the weights are quantised by {method!r:.60}; only compressed-tensors can be checked"
        )
    groups, ignored = told.get("config_groups"), told.get("ignore") or []
    if told.get("format") != "pack-quantized" or not isinstance(groups, dict) or len(groups) != 1:
        raise UserError(f"{at}: format {told.get('format')!r:.60} in one group of layers must be pack-quantized")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict) or group.get("input_activations") or group.get("output_activations"):
        raise UserError(f"{at}: activations are quantised too, or no weights; only weights in few bits can be checked")
    if told.get("quantization_status", "compressed") != "compressed":
        raise UserError(f"{at}: quantization_status is {told['quantization_status']!r:.60}, must be compressed")
    if told.get("kv_cache_scheme") or told.get("sparsity_config") or told.get("transform_config"):
        raise UserError(f"{at}: a cache scheme, sparsity or a transform; only weights in few bits can be checked")
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    fixed = (weights.get("type", "int"), weights.get("symmetric", True), bool(weights.get("dynamic")))
    named = {number: name for name, number in BITS.items()}
    if fixed != ("int", True, False) or type(bits) is not int or bits not in named:
        raise UserError(f"{at}: {weights!r:.100} is not symmetric, static int of {' or '.join(map(str, named))} bits")
    grouped = strategy == "group" and type(size) is int and 0 < size < 2**20
    if not grouped and not (strategy == "channel" and size in (None, -1, 0)):
        raise UserError(
            f"{at}: strategy {strategy!r:.40} with group_size {size!r:.40}; must be channel, or group and a size"
        )
    targets = group.get("targets")
    if targets not in (["Linear"], ["Linear", _ending(LM_HEAD)]):
        raise UserError(
            f"{at}: targets are {targets!r:.80}, must be Linear, and {_ending(LM_HEAD)} where it is quantised"
        )
    if not isinstance(ignored, list):
        raise UserError(f"{at}: ignore is {ignored!r:.60}, must be a list of layers")
    keep = [_kept(one, at) for one in ignored]
    return Storage(named[bits], int(size) if grouped else 0, tuple(keep))  # type: ignore[arg-type]


def _targets(config: Mapping[str, Any]) -> list[str]:
    (group,) = config[CONFIG]["config_groups"].values()
    return list(group["targets"])


def _kept(pattern: Any, at: str) -> str:
    """The name, or its ending, of an ignored layer; other expressions are not run."""
    found = ENDING.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None and (not isinstance(pattern, str) or not re.fullmatch(r"[\w.]+", pattern)):
        raise UserError(f"{at}: ignore names {pattern!r:.60}; must be a layer's name, or re:.*NAME$")
    return found[1] if found is not None else pattern


def packed_specs(specs: Mapping[str, Spec], config: Mapping[str, Any], storage: Storage, where: str) -> dict[str, Spec]:
    """What a layout expects, with the quantised layers as they are stored.

    Raises:
        UserError: groups that do not divide a layer's inputs; an LM head that some engines would take as quantised.
    """
    assert storage.bits is not None
    found: dict[str, Spec] = {}
    for name, spec in specs.items():
        module = name.removesuffix(WEIGHT)
        linear = name.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype is None
        if not linear or layer_of(name) in EMBEDDINGS or module.endswith(storage.keep):
            found[name] = spec
            continue
        if layer_of(name) == LM_HEAD and _ending(LM_HEAD) not in _targets(config):
            raise UserError(f"{where}/config.json: {CONFIG}: {LM_HEAD} is neither ignored nor a target; say which")
        rows, columns = spec.shape
        if storage.group_size and columns % storage.group_size:
            raise UserError(
                f"{where}/config.json: {CONFIG}: groups of {storage.group_size} do not divide the {columns} inputs of"
                f" {module}"
            )
        groups = columns // storage.group_size if storage.group_size else 1
        words = -(-columns * storage.bits // 32)
        found[module + PACKED] = Spec((rows, words), torch.int32, spec.optional)
        found[module + SCALE] = Spec((rows, groups), None, spec.optional)
        found[module + SHAPE] = Spec((2,), torch.int64, spec.optional)
    return found


def check_packed(laid_out: LaidOut, specs: Mapping[str, Spec], storage: Storage, where: str) -> None:
    """Scales above zero, and shapes that are those of the layout's matrices; raises UserError, one line.

    specs: what the layout expects of a checkpoint that is not quantised.
    """
    for name, layer in sorted(packed_layers(laid_out.tensors).items()):
        if tuple(layer.shape.tolist()) != specs[name].shape:
            raise UserError(
                f"{where}: {name.removesuffix(WEIGHT)}{SHAPE} is {layer.shape.tolist()}, must be"
                f" {list(specs[name].shape)}"
            )
        check_layer(laid_out.tensors, name.removesuffix(WEIGHT), storage, where)


def unpacked(laid_out: LaidOut, storage: Storage) -> LaidOut:
    """The checkpoint with every weight in float32, as if it had never been quantised."""
    from components.drafts.quantised import dequantised

    config = {name: value for name, value in laid_out.config.items() if name != CONFIG}
    return LaidOut(config, dequantised(laid_out.tensors, storage, "checkpoint"))
