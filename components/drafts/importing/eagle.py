"""Checkpoints of the EAGLE family: of SafeAILab's and SpecForge's code, and of the speculators library.

EAGLE-3 and P-EAGLE. The first public release named the layer `midlayer.*`, with the Llama fields at the top of
config.json; SpecForge and AngelSlim keep these names. speculators calls the layers `layers.{i}.*` and has the Llama
fields in `transformer_layer_config`; its P-EAGLE is the same with more layers, `mask_hidden` and a mask token. d2t
holds offsets in both. SpecForge writes P-EAGLE's tensors beside flat Llama fields. Which norms there are is said by
flags, and the tensors must agree with them.

The embedding is the target's where the file has none or a copy of it; another one is the drafter's own and is kept.

Taps: ids at top level count inputs of layers (id i is Hugging Face's hidden_states[i]), ids in `eagle_config` count
outputs (hidden_states[i + 1]); both default to hidden_states[2, n//2, n-3]. Any others are the drafter's own layers.

EAGLE-1, which EAGLE-2 and HASS share, has `fc.*` and `layers.0.*`. fc joins the embedding and the feature, embedding
first; the one layer has no input norm; the LM head is the target's. Our network reads embeddings scaled to the size of
the features, so the first half of fc is divided by that scale here; the product is the checkpoint's own.
"""

from __future__ import annotations

from typing import final

from components.drafts.importing.block import EAGLE_TYPES, FoundBlock, check_block, read_block, read_own_block
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.reader import AbstractReader, Faults, Imported, pop_zero_biases, read_vocabulary
from components.drafts.methods.eagle1 import token_scale_of
from components.drafts.network.layers import rows_unlike
from components.outside_json import JsonObject
from components.targets.interface import AbstractTarget
from components.targets.shape import TapLayers, TargetShape, tap_layers_fault

TAPS, SHORT_TAPS = "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids"
SECTION = "transformer_layer_config"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
NORMS_OF_FLAG = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}
FROZEN = ("verifier_norm.weight", "verifier_lm_head.weight")
"""Copies of the target's own norm and head that speculators trains beside; they draft nothing."""
UNLIKE = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
}
"""Switches of `eagle_config` (modelopt's) with the values that EAGLE-3's own network has."""


@final
class Eagle3Reader(AbstractReader):
    """EAGLE-3 under the names of its first release: `midlayer.*`."""

    layout = "eagle3"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return (
            "speculators_model_type" not in checkpoint.config
            and "mask_hidden" not in checkpoint.files
            and (
                any(name.startswith("midlayer.") for name in checkpoint.files)
                or "Eagle3" in str(checkpoint.config.get("architectures"))
            )
        )

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        imported = Imported("eagle3", {}, checkpoint.read(checkpoint.files))
        block = read_block(checkpoint.config, faults, model_types=EAGLE_TYPES, windows=True)
        first = "midlayer." if any(name.startswith("midlayer.") for name in checkpoint.files) else "layers.0."
        _rename(imported, first, "midlayer.")
        _read_shared(checkpoint, block, target, imported, faults)
        return imported


@final
class PEagleReader(AbstractReader):
    """P-EAGLE as SpecForge writes it: speculators' tensors, the Llama fields at the top of config.json."""

    layout = "p-eagle"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return "mask_hidden" in checkpoint.files and "speculators_model_type" not in checkpoint.config

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        imported = Imported("p-eagle", {}, checkpoint.read(checkpoint.files))
        _read_mask(checkpoint, imported, faults)
        block = read_block(checkpoint.config, faults, model_types=EAGLE_TYPES, windows=True)
        _read_shared(checkpoint, block, target, imported, faults)
        return imported


@final
class SpeculatorsReader(AbstractReader):
    """EAGLE-3 and P-EAGLE as the speculators library writes them."""

    layout = "speculators"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return "speculators_model_type" in checkpoint.config or "speculators_config" in checkpoint.config

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        kind, section = checkpoint.config.get("speculators_model_type"), checkpoint.config.get(SECTION)
        if kind not in ("eagle3", "peagle"):
            faults.add(f"speculators_model_type is {kind!r:.40}; eagle3, peagle, dflash, dspark and mtp are read here")
            faults.raise_any()
        if not isinstance(section, dict):
            faults.add(f"config.json has no {SECTION}, which holds the sizes")
            faults.raise_any()
        assert isinstance(section, dict)
        imported = Imported("eagle3" if kind == "eagle3" else "p-eagle", {}, checkpoint.read(checkpoint.files))
        block = read_block(section, faults, where=SECTION, model_types=EAGLE_TYPES, windows=True)
        if kind == "eagle3":
            _rename(imported, "layers.0.", "midlayer.")
        else:
            _read_mask(checkpoint, imported, faults)
        _read_shared(checkpoint, block, target, imported, faults)
        if depth := proposed_depth(checkpoint.config):
            imported.settings["ttt_steps" if kind == "eagle3" else "parallel_depth"] = depth
        return imported


@final
class Eagle1Reader(AbstractReader):
    """EAGLE-1, EAGLE-2 and HASS under the names of the first EAGLE release."""

    layout = "eagle1"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        names = checkpoint.files.keys()
        return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names and "d2t" not in names

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        imported = Imported("eagle1", {}, checkpoint.read(checkpoint.files))
        tensors, hidden = imported.tensors, target.shape.hidden_size
        read_embedding(imported, target, faults)
        bias = tensors.get("fc.bias")
        if bias is not None and not bool(bias.float().count_nonzero()):
            del tensors["fc.bias"]
            bias = None
        pop_zero_biases(tensors, ("fc.bias",), imported, faults)
        fuse = tensors.get("fc.weight")
        if fuse is not None and fuse.shape == (hidden, 2 * hidden) and fuse.is_floating_point():
            fuse = fuse.float().clone()
            fuse[:, :hidden] /= token_scale_of(target)
            tensors["fc.weight"] = fuse
        imported.settings["fc_bias"] = bias is not None
        block = read_block(checkpoint.config, faults, model_types=EAGLE_TYPES)
        if block is not None:
            imported.settings["intermediate_size"] = block.intermediate_size
            check_block(block, target.shape, faults, imported.remarks, tied=("hidden_size",))
            imported.settings |= read_own_block(block, target.shape, faults, imported.remarks)
            if block.num_layers != 1:
                faults.add(f"it has {block.num_layers} layers, an EAGLE-1 drafter here has one")
        return imported


def _rename(imported: Imported, before: str, after: str) -> None:
    """Give the tensors with one prefix another, and remember what the checkpoint calls them."""
    for name in [name for name in imported.tensors if name.startswith(before) and before != after]:
        renamed = after + name.removeprefix(before)
        imported.tensors[renamed] = imported.tensors.pop(name)
    imported.names[after] = before


def _read_shared(
    checkpoint: FoundCheckpoint, block: FoundBlock | None, target: AbstractTarget, imported: Imported, faults: Faults
) -> None:
    """What both layouts have: sizes, norms, taps, vocabulary, embedding, frozen copies."""
    tensors, shape = imported.tensors, target.shape
    for name in FROZEN:
        if tensors.pop(name, None) is not None:
            imported.remarks.append(f"{name} is a frozen copy of the target's and left out")
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    if d2t is not None:
        imported.draft_ids = read_vocabulary(d2t, t2d, shape.vocab_size, faults)
        if t2d is None:
            imported.remarks.append("there is no t2d that d2t could be checked against")
    elif "lm_head.weight" in tensors and tensors["lm_head.weight"].shape[0] != shape.vocab_size:
        faults.add(
            f"d2t is missing, and lm_head.weight has {tensors['lm_head.weight'].shape[0]} rows, not a row for"
            f" each of the target's {shape.vocab_size} tokens"
        )
    head, stated = tensors.get("lm_head.weight"), checkpoint.config.get("draft_vocab_size")
    if head is not None and stated not in (None, head.shape[0]):
        faults.add(f"draft_vocab_size is {stated!r:.40}, and lm_head.weight has {head.shape[0]} rows")
    mask_token = checkpoint.config.get("mask_token_id") if imported.method == "p-eagle" else None
    read_embedding(imported, target, faults, but=mask_token)
    pop_zero_biases(tensors, (), imported, faults)
    _read_norms(checkpoint.config, imported, faults)
    _read_taps(checkpoint.config, shape, imported, faults)
    if checkpoint.config.get("target_hidden_size") not in (None, shape.hidden_size):
        stated = checkpoint.config["target_hidden_size"]
        faults.add(f"target_hidden_size is {stated!r:.40}, the target's width is {shape.hidden_size}")
    if block is None:
        return
    imported.settings["intermediate_size"] = block.intermediate_size
    check_block(block, shape, faults, imported.remarks, tied=("hidden_size",))
    imported.settings |= read_own_block(block, shape, faults, imported.remarks)
    if imported.method == "eagle3" and block.num_layers != 1:
        faults.add(f"it has {block.num_layers} layers, an EAGLE-3 drafter here has one")
    if imported.method == "p-eagle":
        imported.settings["num_layers"] = block.num_layers


def read_embedding(imported: Imported, target: AbstractTarget, faults: Faults, but: int | None = None) -> None:
    """Leave a copy of the target's embedding out; one of the drafter's own stays, and is said. but: a mask's row."""
    table = imported.tensors.get("embed_tokens.weight")
    if table is None:
        return
    shared = target.embedding
    if table.shape != shared.shape or not table.is_floating_point():
        faults.add(f"embed_tokens.weight is {list(table.shape)}, the target's is {list(shared.shape)}")
        del imported.tensors["embed_tokens.weight"]
        return
    differs = rows_unlike(table, shared)
    if type(but) is int and 0 <= but < len(differs):
        differs[but] = 0.0
    if not bool(differs.count_nonzero()):
        del imported.tensors["embed_tokens.weight"]
        return
    imported.settings["own_embedding"] = True
    imported.remarks.append(
        f"embed_tokens.weight is its own ({int(differs.count_nonzero())} of {len(differs)} rows differ from the"
        f" target's, by {float(differs.max()):.2g} at most): kept, and not trained further"
    )


def _read_norms(config: JsonObject, imported: Imported, faults: Faults) -> None:
    """The four flags, as settings; a flag and the tensors that it stands for must agree."""
    for name in FLAGS:
        value = config.get(name)
        if value is not None and not isinstance(value, bool):
            faults.add(f"{name} is {value!r:.40}, must be true or false")
            continue
        tensor = NORMS_OF_FLAG.get(name)
        if tensor is not None and bool(value) != (tensor in imported.tensors):
            there = "there" if tensor in imported.tensors else "missing"
            faults.add(f"{name} is {'on' if value else 'off'} and {tensor} is {there}")
        if imported.method == "eagle3":
            imported.settings[name] = bool(value)
        elif value:
            faults.add(f"{name} is on, which a P-EAGLE drafter does not have here")
    section = config.get("eagle_config")
    for name, value in UNLIKE.items():
        if isinstance(section, dict) and section.get(name, value) != value:
            faults.add(f"eagle_config.{name} is {section[name]!r:.40}: another network than EAGLE-3's")


def _read_taps(config: JsonObject, shape: TargetShape, imported: Imported, faults: Faults) -> None:
    """The tapped layers, wherever they are named; a fault unless the target has them all and two places agree."""
    section = config.get("eagle_config") or {}
    inner = section.get(TAPS) if isinstance(section, dict) else None
    named = [(name, config[name], 0) for name in (TAPS, SHORT_TAPS) if config.get(name) is not None]
    named += [(f"eagle_config.{TAPS}", inner, 1)] if inner is not None else []
    if not named and not shape.has_usual_taps:
        faults.add(f"{TAPS} is missing, and of {shape.num_layers} layers engines have no usual ones")
    found: dict[str, TapLayers] = {}
    for place, ids, shift in named:
        if not isinstance(ids, list) or not all(type(one) is int for one in ids):
            faults.add(f"{place} is {ids!r:.60}, no list of layers")
            continue
        taps = tuple(one + shift for one in ids)
        if fault := tap_layers_fault(taps) or (
            taps[-1] >= shape.num_layers and f"of a target of {shape.num_layers} layers"
        ):
            faults.add(f"{place} is {ids!s:.60}, that is hidden_states{list(taps)!s:.60}: {fault}")
        found[place] = taps
    if len(set(found.values())) > 1:
        faults.add("; ".join(f"{place} stands for hidden_states{list(taps)}" for place, taps in found.items()))
    imported.tap_layers = next(iter(found.values()), ())
    if imported.tap_layers not in ((), shape.tap_layers):
        imported.remarks.append(
            f"it reads hidden_states{list(imported.tap_layers)}, not the usual {list(shape.tap_layers)}: features to"
            f" train it further need tap_layers: {list(imported.tap_layers)}"
        )


def _read_mask(checkpoint: FoundCheckpoint, imported: Imported, faults: Faults) -> None:
    """P-EAGLE's mask state and mask token, which is a row of the checkpoint's embedding."""
    hidden, token = imported.tensors.pop("mask_hidden", None), checkpoint.config.get("mask_token_id")
    embedding = imported.tensors.get("embed_tokens.weight")
    if hidden is None:
        faults.add("mask_hidden is missing")
    else:
        imported.tensors["mask_hidden"] = hidden.reshape(-1)
    if type(token) is not int or embedding is None or not 0 <= token < embedding.shape[0]:
        faults.add(f"mask_token_id {token!r:.40} is no row of embed_tokens.weight")
    else:
        imported.tensors["mask_token"] = embedding[token].clone()


def proposed_depth(config: JsonObject) -> int:
    """The number of tokens that speculators' config proposes; 0 where it says none that a drafter here can have."""
    section = config.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    depth = first.get("speculative_tokens") if isinstance(first, dict) else None
    return depth if type(depth) is int and 1 <= depth <= 16 else 0
