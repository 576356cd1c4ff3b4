"""MTP modules under DeepSeek-V3's names: `model.layers.{n + j}.*`, n = the target's layers, j = 0 .. modules - 1.

Each module is one decoder block between a join (`enorm`, `hnorm`, `eh_proj`, embedding first) and `shared_head.norm`.
The embedding and the LM head are the target's own and are referenced, not copied: DeepSeek's files repeat them as
`embed_tokens` and `shared_head.head`, and a checkpoint that does so is accepted here as well. The block is a Llama
block (grouped-query attention, SwiGLU), not DeepSeek's latent attention and experts, so that no engine reads it as it
is: mimo_layout.py has one module in the shape that vLLM serves, mtp_stitch.py puts a model's own module back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from components.contract import UserError
from components.publish.eagle3_layout import check_architecture, dtype_of
from components.publish.exact_check import LaidOut, Spec, check_tensors, check_vocabulary
from components.publish.layout import AbstractLayout, OwnForm, Source, inner_size, without_vocabulary
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
    """See the module docstring."""

    format = "mtp"
    methods = ("mtp",)
    shares_head = True

    def lay_out(self, own: OwnForm, source: Source) -> LaidOut:
        """See AbstractLayout. d2t and t2d (our pruned head) are checked and left out."""
        shape, settings = source.shape, own.settings
        check_cut(own, shape.vocab_size, "mtp checkpoint")
        inner = inner_size(own, shape)
        block = block_config(shape, intermediate_size=inner, num_layers=shape.num_layers, dtype=dtype_of(own))
        config = {
            "architectures": ["LlamaMtpModel"],
            "model_type": "llama",
            # The target's: the modules' layer numbers count on from it.
            **block,
            "tie_word_embeddings": shape.tie_word_embeddings,
            "num_nextn_predict_layers": int(settings.get("mtp_modules", 3)),
            "shared_with_target": ["embed_tokens.weight", "shared_head.head.weight"],
            "mtp_first_hidden": str(settings.get("first_hidden", "post_norm")),
        }
        return LaidOut(config, without_vocabulary(own.tensors))

    def recognises(self, config: Mapping[str, Any], names: frozenset[str]) -> bool:
        """See AbstractLayout."""
        return "num_nextn_predict_layers" in config or any(name.endswith(".eh_proj.weight") for name in names)

    def check_config(self, config: Mapping[str, Any], where: str) -> None:
        """See AbstractLayout."""
        check_architecture(config, ("LlamaMtpModel",), where)
        check_facts(config, IS_LLAMA, where)
        check_block(config, where)
        check_facts(config, {"num_nextn_predict_layers": LAYERS}, where)
        check_facts(config, {"mtp_first_hidden": Fact(str, only=("post_norm", "pre_norm"))}, where)

    def expected(self, config: Mapping[str, Any]) -> dict[str, Spec]:
        """See AbstractLayout."""
        hidden, vocab_size = int(config["hidden_size"]), int(config["vocab_size"])
        specs: dict[str, Spec] = {}
        for layer in range(
            config["num_hidden_layers"], config["num_hidden_layers"] + config["num_nextn_predict_layers"]
        ):
            at = f"model.layers.{layer}."
            specs |= {
                f"{at}enorm.weight": Spec((hidden,)),
                f"{at}hnorm.weight": Spec((hidden,)),
                f"{at}eh_proj.weight": Spec((hidden, 2 * hidden)),
                **block_specs(config, at),
                f"{at}shared_head.norm.weight": Spec((hidden,)),
                f"{at}embed_tokens.weight": Spec((vocab_size, hidden), optional=True),
                f"{at}shared_head.head.weight": Spec((vocab_size, hidden), optional=True),
            }
        return specs

    def check_target(self, config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
        """See AbstractLayout."""
        check_positions(config, shape, where)
        check_width(config, shape, where)
        check_numbering(config, shape, where)

    def own_form(self, laid_out: LaidOut, source: Source) -> OwnForm:
        """See AbstractLayout."""
        config = laid_out.config
        settings = {
            "mtp_modules": config["num_nextn_predict_layers"],
            "first_hidden": config["mtp_first_hidden"],
            "intermediate_size": config["intermediate_size"],
        }
        shared = (".embed_tokens.weight", ".shared_head.head.weight")
        return OwnForm("mtp", settings, {n: t for n, t in laid_out.tensors.items() if not n.endswith(shared)})


def check_cut(own: OwnForm, vocab_size: int, where: str) -> None:
    """d2t and t2d of a drafter whose format leaves them out are sound all the same; raises UserError, one line."""
    cut: dict[str, torch.Tensor] = {name: own.tensors[name] for name in ("d2t", "t2d") if name in own.tensors}
    if cut:
        size = cut["d2t"].numel() if "d2t" in cut else 0
        specs = {"d2t": Spec((size,), torch.int64), "t2d": Spec((vocab_size,), torch.bool)}
        check_tensors(cut, specs, where)
        check_vocabulary(cut["d2t"], cut["t2d"], where)


def check_numbering(config: Mapping[str, Any], shape: TargetShape, where: str) -> None:
    """A module's layers count on from the target's; raises UserError, one line, where they do not."""
    if config["num_hidden_layers"] != shape.num_layers:
        raise UserError(
            f"{where}/config.json: num_hidden_layers is {config['num_hidden_layers']}, the target has"
            f" {shape.num_layers}: its modules bear the numbers of layers that are not theirs"
        )
