"""A drafter's checkpoint with quantised weights: compressed-tensors' "pack-quantized", which vLLM and SGLang read.

Any layout can hold it. In place of the weight of a linear layer, `m.weight`, there are `m.weight_packed`,
`m.weight_scale` and `m.weight_shape` (drafts/storage/quantisation.py), and the `quantization_config` of config.json
gives bits, groups and the layers that are not quantised. Only weight-only, symmetric integers are accepted: the other
features of compressed-tensors (activations, zero points, fp8, sparsity) are refused, because Draftsmith does not check
them.

For engines the target "Linear" excludes the LM head, which is therefore named where it is quantised.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from components.contract import UserError
from components.drafts.storage.quantisation import (
    EMBEDDINGS,
    LM_HEAD,
    PACKED,
    QUANTIZATION,
    SCALE,
    SHAPE,
    WEIGHT,
    check_layer,
    dequantise_tensors,
    ending_pattern,
    is_linear,
    layer_of,
    packed_layers,
)
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.interface import AbstractLayout, DrafterState, Source
from components.weight_format import Storage


def lay_out_quantised(layout: AbstractLayout, drafter: DrafterState, source: Source) -> Checkpoint:
    """`layout.lay_out` of a drafter whose weights were rounded: packed layers as codes, all others in bfloat16.

    Raises:
        UserError: the layout changes a quantised weight (Medusa's heads of a cut vocabulary), so it cannot hold it.
    """
    assert drafter.storage is not None
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in drafter.tensors.items()}
    checkpoint = layout.lay_out(drafter._replace(tensors=tensors), source)
    if drafter.storage.bits is None:
        return checkpoint
    # Layouts rename tensors: the same object under another name is an unchanged tensor of the drafter.
    places = {id(tensors[name]): name for name in drafter.packed}
    stored = dict(checkpoint.tensors)
    for name, tensor in checkpoint.tensors.items():
        if id(tensor) in places:
            layer, module = drafter.packed[places.pop(id(tensor))], name.removesuffix(WEIGHT)
            del stored[name]
            stored |= {module + PACKED: layer.packed, module + SCALE: layer.scale, module + SHAPE: layer.shape}
    if places:
        name = sorted(places.values())[0]
        raise UserError(
            f"{layout.format} checkpoint: the format holds {name} changed, so not in {drafter.storage.weights}: say"
            f" keep: [{layer_of(name)}] in drafts.quantise_draft, or leave the step out"
        )
    own_names = {id(tensor) for tensor in tensors.values()}
    for name, tensor in stored.items():
        if is_linear(name, tensor) and id(tensor) not in own_names and layer_of(name) not in drafter.storage.keep:
            raise UserError(
                f"{layout.format} checkpoint: the format adds {name}, which is not in {drafter.storage.weights}: leave"
                " drafts.quantise_draft out"
            )
    head = any(name.endswith(LM_HEAD + PACKED) for name in stored)
    return Checkpoint({**checkpoint.config, QUANTIZATION: quantization_config(drafter.storage, head)}, stored)


def quantization_config(storage: Storage, head: bool) -> JsonObject:
    """The `quantization_config` of config.json. head: whether the LM head is quantised."""
    weights: JsonObject = {
        "num_bits": storage.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if storage.group_size else "channel",
        "group_size": storage.group_size or None,
        "dynamic": False,
    }
    targets = ["Linear", *([ending_pattern(LM_HEAD)] if head else [])]
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [ending_pattern(name) for name in storage.keep],
        "kv_cache_scheme": None,
    }


def _targets(config: Config) -> list[str]:
    (group,) = config[QUANTIZATION]["config_groups"].values()
    return list(group["targets"])


def packed_specs(specs: Mapping[str, Spec], config: Config, storage: Storage, location: str) -> dict[str, Spec]:
    """The specs of a layout with every quantised layer replaced by its packed tensors.

    Raises:
        UserError: groups that do not divide a layer's inputs; an LM head that is neither a target nor ignored.
    """
    assert storage.bits is not None
    stored_specs: dict[str, Spec] = {}
    for name, spec in specs.items():
        module = name.removesuffix(WEIGHT)
        linear = name.endswith(WEIGHT) and len(spec.shape) == 2 and spec.dtype is None
        if not linear or layer_of(name) in EMBEDDINGS or module.endswith(storage.keep):
            stored_specs[name] = spec
            continue
        if layer_of(name) == LM_HEAD and ending_pattern(LM_HEAD) not in _targets(config):
            raise UserError(
                f"{location}/config.json: {QUANTIZATION}: {LM_HEAD} is neither ignored nor a target; say which"
            )
        rows, columns = spec.shape
        if storage.group_size and columns % storage.group_size:
            raise UserError(
                f"{location}/config.json: {QUANTIZATION}: groups of {storage.group_size} do not divide the {columns}"
                f" inputs of {module}"
            )
        groups = columns // storage.group_size if storage.group_size else 1
        words = -(-columns * storage.bits // 32)
        stored_specs[module + PACKED] = Spec((rows, words), torch.int32, spec.optional)
        stored_specs[module + SCALE] = Spec((rows, groups), None, spec.optional)
        stored_specs[module + SHAPE] = Spec((2,), torch.int64, spec.optional)
    return stored_specs


def check_packed(checkpoint: Checkpoint, specs: Mapping[str, Spec], storage: Storage, location: str) -> None:
    """Check the packed layers: scales above zero, and the shapes of the layout's matrices. Raises UserError, one line.

    specs: the layout's, for a checkpoint that is not quantised.
    """
    for name, layer in sorted(packed_layers(checkpoint.tensors).items()):
        if tuple(layer.shape.tolist()) != specs[name].shape:
            raise UserError(
                f"{location}: {name.removesuffix(WEIGHT)}{SHAPE} is {layer.shape.tolist()}, must be"
                f" {list(specs[name].shape)}"
            )
        check_layer(checkpoint.tensors, name.removesuffix(WEIGHT), storage, location)


def dequantise_checkpoint(checkpoint: Checkpoint, storage: Storage) -> Checkpoint:
    """The checkpoint with its quantised weights in float32, and without its quantization_config."""
    config = {name: value for name, value in checkpoint.config.items() if name != QUANTIZATION}
    return Checkpoint(config, dequantise_tensors(checkpoint.tensors, storage, "checkpoint"))
