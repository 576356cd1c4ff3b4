"""Medusa heads: under the names of FasterDecoding's release, and under those of vLLM's own model.

FasterDecoding: `{head}.{layer}.linear.{weight,bias}` and `{head}.{layers}.weight`, the LM head; files of whole Medusa
models have `medusa_head.` before that. vLLM: `blocks.{head}.layers.{layer}.{weight,bias}` and `lm_heads.{head}.weight`,
without biases unless `medusa_fc_bias` is on. A head is a residual layer of the target's last normed state, so nothing
but sizes can differ.
"""

from __future__ import annotations

import re
from typing import final

import torch

from components.drafts.importing.checkpoint import FoundCheckpoint
from components.drafts.importing.reader import AbstractReader, Faults, Imported
from components.targets.interface import AbstractTarget

PREFIX = "medusa_head."
OFFICIAL = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)")
VLLM_LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
VLLM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
MOST = 8
"""Heads, and layers of a head, that a drafter here may have are fewer; more in a name is no Medusa."""


@final
class MedusaReader(AbstractReader):
    """Medusa heads."""

    layout = "medusa"

    def recognises(self, checkpoint: FoundCheckpoint) -> bool:
        return checkpoint.config.get("model_type") == "medusa" or "medusa_num_heads" in checkpoint.config

    def read(self, checkpoint: FoundCheckpoint, target: AbstractTarget, faults: Faults) -> Imported:
        heads, layers = checkpoint.config.get("medusa_num_heads"), checkpoint.config.get("medusa_num_layers", 1)
        for name, value in (("medusa_num_heads", heads), ("medusa_num_layers", layers)):
            most = MOST if name == "medusa_num_heads" else MOST // 2
            if type(value) is not int or not 1 <= value <= most:
                faults.add(f"{name} is {value!r:.40}; drafters here have 1 to {most}")
        for name, own in (("hidden_size", target.shape.hidden_size), ("vocab_size", target.shape.vocab_size)):
            if checkpoint.config.get(name) not in (None, own):
                faults.add(f"{name} is {checkpoint.config[name]!r:.40}, the target's is {own}: made for another target")
        faults.raise_any()
        assert isinstance(heads, int) and isinstance(layers, int)
        imported = Imported("medusa", {"num_heads": heads, "num_layers": layers}, {})
        from_vllm = any(VLLM_HEAD.fullmatch(name) for name in checkpoint.files)
        for name, tensor in checkpoint.read(checkpoint.files).items():
            renamed = own_name(name, layers, from_vllm)
            imported.tensors[renamed] = tensor
            if renamed != name:
                imported.names[renamed] = name
        if not from_vllm and not any(name.startswith(PREFIX) for name in checkpoint.files):
            imported.names[PREFIX] = ""
        if from_vllm and not checkpoint.config.get("medusa_fc_bias"):
            hidden = target.shape.hidden_size
            absent = [f"{PREFIX}{head}.{layer}.linear.bias" for head in range(heads) for layer in range(layers)]
            imported.tensors |= {name: torch.zeros(hidden) for name in absent if name not in imported.tensors}
            imported.remarks.append("its layers have no bias (medusa_fc_bias is off): zeros here")
        return imported


def own_name(name: str, num_layers: int, from_vllm: bool) -> str:
    """The name of a checkpoint's tensor in a Medusa drafter here; the name itself where it is none of a head."""
    if from_vllm:
        if match := VLLM_LAYER.fullmatch(name):
            return f"{PREFIX}{match[1]}.{match[2]}.linear.{match[3]}"
        if match := VLLM_HEAD.fullmatch(name):
            return f"{PREFIX}{match[1]}.{num_layers}.weight"
        return name
    match = OFFICIAL.fullmatch(name)
    return f"{PREFIX}{match[1]}.{match[2]}.{match[3]}" if match else name
