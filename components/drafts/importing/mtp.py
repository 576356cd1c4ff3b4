"""MTP modules: new ones in a folder of their own, and the native one inside a model's own checkpoint.

mtp      `model.layers.{n + j}.*`, DeepSeek-V3's names around Llama blocks: what is exported here as `mtp`
mimo     `model.mtp_layers.0.*`, one module in the shape of MiMo-7B (hidden state first, so the halves of the
         projection change places; biases that are zero)
own-mtp  the checkpoint of a whole model: DeepSeek-V3, GLM, Kimi (`model.layers.{n}.eh_proj`), Qwen3-Next (`mtp.fc`),
         MiMo (`model.mtp_layers.0.input_proj`), ERNIE 4.5 (`model.mtp_linear_proj.0`). Its block is the target's own,
         so the target must have a module of the same layout itself; a fine-tuned one (a stitched release) is read in
         its place
speculators-mtp  `mtp_layers.0.*`, such a module of Qwen3-Next or Qwen3.5 as the speculators library takes it out of a
         model and trains it; the target must have its own as well
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from transformers import AutoConfig

from components.contract import UserError
from components.drafts.importing.block import check_block, read_block
from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.eagle import SECTION, proposed_depth
from components.drafts.importing.reader import AbstractReader, Faults, Imported, pop_zero_biases
from components.drafts.methods.mtp_native_weights import LAYOUTS, find_native_mtp, stack_experts
from components.drafts.storage.files import build_draft
from components.targets.config import read_config
from components.targets.interface import AbstractTarget
from components.text import message_of

TIED = (
    *("hidden_size", "num_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_theta",),
)
MOST_MODULES = 8
MIMO = "model.mtp_layers.0."
MIMO_NAMES = {
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "input_proj.weight": "eh_proj.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
}
SHARED = ("model.embed_tokens.weight", "lm_head.weight")
SPECULATORS = "mtp_layers.0."
SPECULATORS_NAMES = {
    "token_norm": "token_layernorm",
    "hidden_norm": "hidden_layernorm",
    "projection": "input_proj",
    "last_norm": "final_layernorm",
}
BLOCK_FIELDS = (
    *("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"),
    *("rope_parameters", "hidden_act", "num_experts_per_tok", "norm_topk_prob"),
)
"""Fields of a configuration that say what the module's tensors do not."""
EMBEDDING = "embed_tokens.weight"
REPEATED = (".embed_tokens.weight", ".shared_head.head.weight")


@final
class MtpReader(AbstractReader):
    """New modules under DeepSeek-V3's names."""

    layout = "mtp"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return any(name.endswith(".eh_proj.weight") for name in checkpoint.files) and not is_whole_model(checkpoint)

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        copies = [name for name in checkpoint.files if name.endswith(REPEATED)]
        imported = Imported("mtp", {}, checkpoint.read(name for name in checkpoint.files if name not in copies))
        for name in copies:
            check_copy(name, checkpoint, target, faults)
        modules, first = checkpoint.config.get("num_nextn_predict_layers"), checkpoint.config.get("mtp_first_hidden")
        if type(modules) is not int or not 1 <= modules <= MOST_MODULES:
            faults.add(f"num_nextn_predict_layers is {modules!r:.40}; drafters here have 1 to {MOST_MODULES} modules")
        if first not in (None, "post_norm", "pre_norm"):
            faults.add(f"mtp_first_hidden is {first!r:.40}, must be post_norm or pre_norm")
        if first is None:
            imported.remarks.append(
                "mtp_first_hidden is not said: module 1 reads the target's normed state, as in vLLM"
            )
        faults.raise_any()
        imported.settings |= {"mtp_modules": modules, "first_hidden": first or "post_norm"}
        _read_sizes(checkpoint, target, imported, faults, ("llama",))
        pop_zero_biases(imported.tensors, (), imported, faults)
        return imported


@final
class MimoReader(AbstractReader):
    """One new module in the shape of MiMo-7B's."""

    layout = "mimo"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return f"{MIMO}input_proj.weight" in checkpoint.files and not is_whole_model(checkpoint)

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        imported = Imported("mtp", {"mtp_modules": 1, "first_hidden": "post_norm"}, {})
        place = f"model.layers.{target.shape.num_layers}."
        for name, tensor in checkpoint.read(name for name in checkpoint.files if name not in SHARED).items():
            inside = name.removeprefix(MIMO)
            name_here = place + MIMO_NAMES.get(inside, inside) if name.startswith(MIMO) else name
            imported.tensors[name_here], imported.names[name_here] = tensor, name
        imported.names |= {place + renamed: MIMO + part for part, renamed in MIMO_NAMES.items()} | {place: MIMO}
        for name in SHARED:
            if name in checkpoint.files:
                check_copy(name, checkpoint, target, faults)
        if checkpoint.config.get("num_nextn_predict_layers") not in (None, 1):
            faults.add(
                f"num_nextn_predict_layers is {checkpoint.config['num_nextn_predict_layers']!r:.40}, the layout has 1"
            )
        _read_sizes(checkpoint, target, imported, faults, ("qwen2", "mimo"))
        pop_zero_biases(imported.tensors, (), imported, faults)
        joined = imported.tensors.get(f"{place}eh_proj.weight")
        if joined is not None and joined.ndim == 2 and not joined.shape[1] % 2:
            imported.tensors[f"{place}eh_proj.weight"] = torch.cat(joined.chunk(2, 1)[::-1], 1)
        return imported


@final
class OwnMtpReader(AbstractReader):
    """The native module inside a whole model's checkpoint."""

    layout = "own-mtp"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return is_whole_model(checkpoint) and any(module_files(checkpoint))

    def stored(self, checkpoint: FoundCheckpoint) -> Iterable[str]:
        return module_files(checkpoint)

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        weights = find_native_mtp(checkpoint.folder, target.shape.num_layers, checkpoint.label)
        _require_own(weights.layout.name, target, faults)
        settings = {"start": "own"}
        network: Any = build_draft("mtp", target, settings, torch.arange(target.shape.vocab_size))
        inside = weights.read(network.module.state_dict(), checkpoint.label)
        return Imported("mtp", settings, {f"module.{name}": tensor for name, tensor in inside.items()})


@final
class SpeculatorsMtpReader(AbstractReader):
    """A native module that the speculators library took out of a model (Qwen3-Next, Qwen3.5) and trained."""

    layout = "speculators-mtp"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return checkpoint.config.get("speculators_model_type") == "mtp"

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        _require_own("qwen", target, faults)
        if checkpoint.config.get("num_nextn_predict_layers", 1) != 1:
            faults.add(f"num_nextn_predict_layers is {checkpoint.config['num_nextn_predict_layers']!r:.40}, must be 1")
        imported = Imported("mtp", {"start": "own"}, {})
        if depth := proposed_depth(checkpoint.config):
            imported.settings["recursive_steps"] = depth
        _compare_configs(checkpoint, target, faults)
        faults.raise_any()
        for name in (name for name in (EMBEDDING, "lm_head.weight") if name in checkpoint.files):
            check_copy(name, checkpoint, target, faults)
        shared = (EMBEDDING, "lm_head.weight")
        stored = stack_experts(checkpoint.read(name for name in checkpoint.files if name not in shared))
        parts = {f"{SPECULATORS}{stored_name}.": f"module.{name}." for name, stored_name in SPECULATORS_NAMES.items()}
        for name, tensor in stored.items():
            before = next((part for part in parts if name.startswith(part)), SPECULATORS)
            new_name = parts.get(before, "module.block.") + name.removeprefix(before)
            imported.tensors[new_name if name.startswith(SPECULATORS) else name] = tensor
        imported.names = {name: stored_name for stored_name, name in parts.items()} | {"module.block.": SPECULATORS}
        imported.remarks.append(
            "step 0 reads the target's state after its final norm, as engines feed it; speculators trains on the state"
            " before it"
        )
        return imported


def _require_own(layout: str, target: AbstractTarget, faults: Faults) -> None:
    """A fault, raised, unless the target's own checkpoint has a module of this layout."""
    folder: Path | None = getattr(target, "folder", None)
    try:
        native = (
            "none" if folder is None else find_native_mtp(folder, target.shape.num_layers, "the target").layout.name
        )
    except UserError:
        native = "none"
    if native != layout:
        module = native if native == "none" else f"one of layout {native}"
        faults.add(f"its module is of layout {layout}, and the target's own checkpoint has {module}")
        faults.raise_any()


def _compare_configs(checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> None:
    """Compare the section of the block with the target's configuration, by which the module here is built."""
    section = checkpoint.config.get(SECTION)
    if not isinstance(section, dict) or not isinstance(section.get("model_type"), str):
        faults.add(f"config.json has no {SECTION} with a model_type, which holds the sizes")
        return
    assert target.folder is not None
    config = read_config(target.folder, location="the target", trust_remote_code=False).get_text_config(decoder=True)
    try:
        of_section: Any = AutoConfig.for_model(**section)
    except Exception as error:  # foreign values break each configuration class in its own way
        faults.add(f"{SECTION} cannot be used ({message_of(error)})")
        return
    for name in ("model_type", *BLOCK_FIELDS):
        wants, has = getattr(config, name, None), getattr(of_section, name, None)
        if has != wants:
            faults.add(f"{SECTION}.{name} is {has!s:.60}, the target's is {wants!s:.60}")


def is_whole_model(checkpoint: FoundCheckpoint) -> bool:
    """Whether the checkpoint holds a model with its first layer, not drafting modules alone."""
    return any(name.startswith(("model.layers.0.", "model.language_model.layers.0.")) for name in checkpoint.files)


def module_files(checkpoint: FoundCheckpoint) -> list[str]:
    """The tensors of a native module, by the prefix of a tensor that is some layout's projection."""
    endings = tuple(f"{layout.projection}.weight" for layout in LAYOUTS)
    places = ("model.layers.", "model.mtp_layers.", "model.mtp_", "mtp.")
    in_place = [name for name in checkpoint.files if name.startswith(places) and ".mlp." not in name]
    joins = [name for name in in_place if name.endswith(endings)]
    before = [name.removesuffix(ending) for name in joins for ending in endings if name.endswith(ending)]
    prefixes = tuple(name for name in before if name.endswith((".", "_")))
    return [name for name in checkpoint.files if name.startswith(prefixes)] if prefixes else []


def check_copy(name: str, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> None:
    """A copy of the target's embedding or LM head is not needed, and must be one: modules here share the target's."""
    copy = checkpoint.read([name])[name]
    if name.endswith("embed_tokens.weight"):
        table: Tensor = target.embedding
    else:
        hidden = target.shape.hidden_size
        identity = torch.eye(hidden, dtype=target.dtype, device=target.device)
        table = torch.cat([target.unembed(rows[None])[0].float() for rows in identity.split(256)]).T
    if copy.shape != table.shape:
        faults.add(f"{name} is {list(copy.shape)}, the target's is {list(table.shape)}")
    elif not torch.allclose(copy.to(table.device).float(), table.to(copy.dtype).float(), rtol=1e-2, atol=1e-5):
        faults.add(f"{name} is its own and not the target's, which modules here share")


def _read_sizes(
    checkpoint: FoundCheckpoint,
    target: AbstractTarget,
    imported: Imported,
    faults: Faults,
    model_types: tuple[str, ...],
) -> None:
    block = read_block(checkpoint.config, faults, model_types=model_types)
    if block is None:
        return
    imported.settings["intermediate_size"] = block.intermediate_size
    check_block(block, target.shape, faults, imported.remarks, tied=TIED)
    if block.rope_scaling:
        faults.add(f"its rotary positions are scaled ({block.rope_scaling}), those of a module here are not")
