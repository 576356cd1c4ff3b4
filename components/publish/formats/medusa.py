"""Medusa heads as their first release stores them (`medusa_lm_head.safetensors`), which vLLM and TensorRT-LLM read.

`{i}.{j}.linear.{weight,bias}` are the residual layers of head i, `{i}.{L}.weight` is its LM head over the vocabulary.
The config serves both readers: FasterDecoding reads medusa_num_heads and medusa_num_layers, and vLLM loads the layers'
biases only with medusa_fc_bias. vLLM cannot load a cut vocabulary (its token_map asks for rows that its own loader
refuses), so every head is written with V rows (layout.whole_vocabulary); heads tied to the target's LM head get a copy
of it each.
"""

from __future__ import annotations

from typing import final

import torch

from components.drafts.settings import MedusaSettings
from components.publish.formats.checkpoint import Checkpoint, Config, Spec, name_of
from components.publish.formats.interface import (
    AbstractLayout,
    DrafterState,
    Source,
    whole_vocabulary,
    without_vocabulary,
)
from components.publish.formats.llama_block import (
    COUNT,
    DTYPES,
    LAYERS,
    Fact,
    check_architecture,
    check_facts,
    check_vocab_size,
    check_width,
    dtype_of,
)
from components.targets.shape import TargetShape

PREFIX = "medusa_head."
FACTS = {
    "medusa_num_heads": LAYERS,
    "medusa_num_layers": LAYERS,
    "hidden_size": COUNT,
    "vocab_size": COUNT,
    "medusa_fc_bias": Fact(bool, only=(True,)),
    "torch_dtype": Fact(str, only=DTYPES, optional=True),
    "model_type": Fact(str, only=("medusa",), optional=True),
}


@final
class MedusaLayout(AbstractLayout):
    """Medusa heads under the names of FasterDecoding's release."""

    format = "medusa"
    methods = ("medusa",)
    weights_file = "medusa_lm_head.safetensors"

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        shape, settings = source.shape, MedusaSettings.model_validate(drafter.settings)
        heads, layers = settings.num_heads, settings.num_layers
        dtype = dtype_of(drafter)
        config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "base_model_name_or_path": source.name,
            "version": "2",
            "medusa_num_heads": heads,
            "medusa_num_layers": layers,
            "medusa_fc_bias": True,
            "hidden_size": shape.hidden_size,
            "vocab_size": shape.vocab_size,
            "torch_dtype": name_of(dtype),
        }
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in without_vocabulary(drafter.tensors).items()}
        d2t = drafter.tensors.get("d2t")
        names = [f"{head}.{layers}.weight" for head in range(heads)]
        if settings.head == "tied":
            rows = source.head().to(dtype)
            rows = rows if d2t is None else rows[d2t + torch.arange(d2t.numel())]
            tensors |= dict.fromkeys(names, rows)
        for name in names:
            if name in tensors:
                tensors[name] = whole_vocabulary(tensors[name], d2t, shape.vocab_size).clone()
        return Checkpoint(config, tensors)

    def recognises(self, config: Config, names: frozenset[str]) -> bool:
        return config.get("model_type") == "medusa" or "medusa_num_heads" in config

    def check_config(self, config: Config, location: str) -> None:
        check_architecture(config, ("MedusaModel",), location)
        check_facts(config, FACTS, location)

    def expected(self, config: Config) -> dict[str, Spec]:
        hidden, layers = int(config["hidden_size"]), int(config["medusa_num_layers"])
        specs: dict[str, Spec] = {}
        for head in range(int(config["medusa_num_heads"])):
            for layer in range(layers):
                specs[f"{head}.{layer}.linear.weight"] = Spec((hidden, hidden))
                specs[f"{head}.{layer}.linear.bias"] = Spec((hidden,))
            specs[f"{head}.{layers}.weight"] = Spec((int(config["vocab_size"]), hidden))
        return specs

    def check_target(self, config: Config, shape: TargetShape, location: str) -> None:
        check_width(config, shape, location)
        check_vocab_size(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        """Every head gets its own LM head, since the format has one a head."""
        config = checkpoint.config
        settings = {"num_heads": config["medusa_num_heads"], "num_layers": config["medusa_num_layers"]}
        return DrafterState("medusa", settings, {PREFIX + name: tensor for name, tensor in checkpoint.tensors.items()})
