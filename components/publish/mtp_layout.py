"""MTP modules under DeepSeek-V3's names: `model.layers.{n + j}.*`, n = the target's layers, j = 0 .. modules - 1.

Each module is one decoder block between a join (`enorm`, `hnorm`, `eh_proj`, embedding first) and `shared_head.norm`.
The embedding and the LM head are the target's and are not copied. DeepSeek's files repeat them as `embed_tokens` and
`shared_head.head`; a checkpoint with these copies is accepted as well. The block is a Llama block (grouped-query
attention, SwiGLU), not DeepSeek's latent attention and experts, so no engine can read this format: mimo_layout.py
writes one module in the shape that vLLM serves, mtp_stitch.py puts a model's native module back into its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from components.contract import UserError
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import Checkpoint, Spec, check_tensors, check_vocabulary
from components.publish.layout import AbstractLayout, DrafterState, Source, inner_size, without_vocabulary
from components.publish.llama_block import (
    IS_LLAMA,
    LAYERS,
    Fact,
    block_config,
    block_specs,
    check_block,
    check_facts,
    check_positions,
    check_width,
)
from components.targets.model import TargetShape


@final
class MtpLayout(AbstractLayout):
    """MTP modules under DeepSeek-V3's names, for Draftsmith's own reader."""

    format = "mtp"
    methods = ("mtp",)
    shares_head = True

    def lay_out(self, drafter: DrafterState, source: Source) -> Checkpoint:
        """Checks d2t and t2d (the cut draft vocabulary) and leaves them out."""
        shape, settings = source.shape, drafter.settings
        check_omitted_vocabulary(drafter, shape.vocab_size, "mtp checkpoint")
        inner = inner_size(drafter, shape)
        block = block_config(shape, intermediate_size=inner, num_layers=shape.num_layers, dtype=dtype_of(drafter))
        config = {
            "architectures": ["LlamaMtpModel"],
            "model_type": "llama",
            # Heads, positions and num_hidden_layers are the target's: the modules' layer numbers continue it.
            **block,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "num_nextn_predict_layers": int(settings.get("mtp_modules", 3)),
            "shared_with_target": ["embed_tokens.weight", "shared_head.head.weight"],
            "mtp_first_hidden": str(settings.get("first_hidden", "post_norm")),
        }
        return Checkpoint(config, without_vocabulary(drafter.tensors))

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        return "num_nextn_predict_layers" in config or any(name.endswith(".eh_proj.weight") for name in names)

    def check_config(self, config: Mapping[str, Any], location: str) -> None:
        check_architecture(config, ("LlamaMtpModel",), location)
        check_facts(config, IS_LLAMA, location)
        check_block(config, location)
        check_facts(config, {"num_nextn_predict_layers": LAYERS}, location)
        check_facts(config, {"mtp_first_hidden": Fact(str, only=("post_norm", "pre_norm"))}, location)

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        specs: dict[str, Spec] = {}
        for layer in range(
            config["num_hidden_layers"], config["num_hidden_layers"] + config["num_nextn_predict_layers"]
        ):
            prefix = f"model.layers.{layer}."
            specs |= {
                f"{prefix}enorm.weight": Spec((hidden,)),
                f"{prefix}hnorm.weight": Spec((hidden,)),
                f"{prefix}eh_proj.weight": Spec((hidden, 2 * hidden)),
                **block_specs(config, prefix),
                f"{prefix}shared_head.norm.weight": Spec((hidden,)),
                f"{prefix}embed_tokens.weight": Spec((vocab_size, hidden), optional=True),
                f"{prefix}shared_head.head.weight": Spec((vocab_size, hidden), optional=True),
            }
        return specs

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, location: str) -> None:
        check_positions(config, shape, location)
        check_width(config, shape, location)
        check_numbering(config, shape, location)

    def drafter_state(self, checkpoint: Checkpoint, source: Source) -> DrafterState:
        config = checkpoint.config
        settings = {
            "mtp_modules": config["num_nextn_predict_layers"],
            "first_hidden": config["mtp_first_hidden"],
            "intermediate_size": config["intermediate_size"],
        }
        shared = (".embed_tokens.weight", ".shared_head.head.weight")
        return DrafterState("mtp", settings, {n: t for n, t in checkpoint.tensors.items() if not n.endswith(shared)})


def check_omitted_vocabulary(drafter: DrafterState, vocab_size: int, location: str) -> None:
    """Check d2t and t2d of a drafter even though its format leaves them out. Raises UserError, one line."""
    vocabulary: dict[str, torch.Tensor] = {
        name: drafter.tensors[name] for name in ("d2t", "t2d") if name in drafter.tensors
    }
    if vocabulary:
        size = vocabulary["d2t"].numel() if "d2t" in vocabulary else 0
        specs = {"d2t": Spec((size,), torch.int64), "t2d": Spec((vocab_size,), torch.bool)}
        check_tensors(vocabulary, specs, location)
        check_vocabulary(vocabulary["d2t"], vocabulary["t2d"], location)


def check_numbering(config: Mapping[str, Any], shape: TargetShape, location: str) -> None:
    """Check that the modules' layer numbers continue the target's. Raises UserError, one line."""
    if config["num_hidden_layers"] != shape.num_layers:
        raise UserError(
            f"{location}/config.json: num_hidden_layers is {config['num_hidden_layers']}, the target has"
            f" {shape.num_layers}: its modules bear the numbers of layers that are not theirs"
        )
