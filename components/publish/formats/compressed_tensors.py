"""A drafter's checkpoint with quantised weights: compressed-tensors' "pack-quantized", which vLLM and SGLang read.

Any layout can hold it. In place of the weight of a linear layer, `m.weight`, there are `m.weight_packed`,
`m.weight_scale` and `m.weight_shape` (drafts/storage/quantisation.py), and the `quantization_config` of config.json
gives bits, groups and the layers that are not quantised. Only weight-only, symmetric integers are accepted: the other
features of compressed-tensors (activations, zero points, fp8, sparsity) are refused, because Draftsmith does not check
them.

For engines the target "Linear" excludes the LM head, which is therefore named where it is quantised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from components.contract import UserError
from components.drafts.storage.quantisation import (
    EMBEDDINGS,
    PACKED,
    SCALE,
    SHAPE,
    WEIGHT,
    check_layer,
    dequantise_tensors,
    is_linear,
    layer_of,
    packed_layers,
)
from components.outside_json import JsonObject
from components.publish.formats.checkpoint import Checkpoint, Config, Spec
from components.publish.formats.interface import AbstractLayout, DrafterState, Source
from components.weight_format import BITS, Storage

CONFIG = "quantization_config"
LM_HEAD = "lm_head"
ENDING = re.compile(r"re:\.\*([\w.]+)\$")


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
    return Checkpoint({**checkpoint.config, CONFIG: quantization_config(drafter.storage, head)}, stored)


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
    targets = ["Linear", *([_ending_pattern(LM_HEAD)] if head else [])]
    group = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [_ending_pattern(name) for name in storage.keep],
        "kv_cache_scheme": None,
    }


def _ending_pattern(name: str) -> str:
    return f"re:.*{name}$"


def parse_storage(config: Config, location: str) -> Storage | None:
    """How a checkpoint's weights are stored, by its config.json; None without a quantization_config.

    Raises:
        UserError: it is anything but weight-only, symmetric integers packed by compressed-tensors.
    """
    section = config.get(CONFIG)
    if not section:
        return None
    label = f"{location}/config.json: {CONFIG}"
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
    if targets not in (["Linear"], ["Linear", _ending_pattern(LM_HEAD)]):
        raise UserError(
            f"{label}: targets are {targets!r:.80}, must be Linear, and {_ending_pattern(LM_HEAD)} where it is"
            " quantised"
        )
    if not isinstance(ignored, list):
        raise UserError(f"{label}: ignore is {ignored!r:.60}, must be a list of layers")
    keep = [_parse_ignored(one, label) for one in ignored]
    return Storage(named[bits], int(size) if grouped else 0, tuple(keep))  # type: ignore[arg-type]


def _targets(config: Config) -> list[str]:
    (group,) = config[CONFIG]["config_groups"].values()
    return list(group["targets"])


def _parse_ignored(pattern: Any, label: str) -> str:
    """The name, or its ending, of an ignored layer. Other regular expressions are refused, not run."""
    ending = ENDING.fullmatch(pattern) if isinstance(pattern, str) else None
    if ending is None and (not isinstance(pattern, str) or not re.fullmatch(r"[\w.]+", pattern)):
        raise UserError(f"{label}: ignore names {pattern!r:.60}; must be a layer's name, or re:.*NAME$")
    return ending[1] if ending is not None else pattern


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
        if layer_of(name) == LM_HEAD and _ending_pattern(LM_HEAD) not in _targets(config):
            raise UserError(f"{location}/config.json: {CONFIG}: {LM_HEAD} is neither ignored nor a target; say which")
        rows, columns = spec.shape
        if storage.group_size and columns % storage.group_size:
            raise UserError(
                f"{location}/config.json: {CONFIG}: groups of {storage.group_size} do not divide the {columns} inputs"
                f" of {module}"
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
    config = {name: value for name, value in checkpoint.config.items() if name != CONFIG}
    return Checkpoint(config, dequantise_tensors(checkpoint.tensors, storage, "checkpoint"))
