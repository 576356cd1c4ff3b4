"""How large a target is, from its configuration alone: transformers makes the model without contents, and counts it."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from components.contract import UserError
from components.targets.config import has_text_part, read_config
from components.targets.quantised import quantisation_of
from components.targets.shape import TargetShape, kv_bytes_per_token, shape_of
from components.targets.source import find_folder
from components.text import message_of

_NUM_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_OF_A_TOKEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")


@dataclass(frozen=True)
class TargetSize:
    """Numbers of a target. Parameters are counted one by one; a tied head is the embedding, counted once."""

    shape: TargetShape
    num_params: int
    num_in_layers: int  # matrices of the layers
    num_in_experts: int  # of those, the ones in experts that the router chooses
    share_of_experts: float  # that a token goes to; 1 where there are none
    kv_bytes: int  # a token takes in the cache, in two-byte numbers
    is_quantised: bool

    @property
    def num_active(self) -> int:
        """Parameters of the layers that a token is multiplied with."""
        return self.num_in_layers - round(self.num_in_experts * (1.0 - self.share_of_experts))

    @property
    def num_in_head(self) -> int:
        """Parameters of the LM head."""
        return self.shape.vocab_size * self.shape.hidden_size

    @property
    def num_kept(self) -> int:
        """Parameters that training from stored features opens: embedding, final norm and head."""
        return self.num_in_head * (1 if self.shape.tie_word_embeddings else 2) + self.shape.hidden_size

    def num_read(self, num_tokens: float) -> float:
        """Parameters of the layers that a pass over so many tokens reads: of experts those that one of them needs."""
        unread = self.num_in_experts * (1.0 - self.share_of_experts) ** num_tokens
        return self.num_in_layers - unread

    def flops(self, num_tokens: float, context: float, num_logits: float) -> float:
        """Of a pass over tokens that look back at `context` others each, with logits of `num_logits` of them."""
        attention = 4 * self.shape.num_layers * self.shape.num_attention_heads * self.shape.head_dim * context
        return num_tokens * (2 * self.num_active + attention) + num_logits * 2 * self.num_in_head


def size_of_model(model: str) -> TargetSize:
    """The size of a model: builtin, a folder with config.json, or a hub id. No weight is read.

    Raises:
        UserError: there is no configuration, or none that transformers can make a model of.
    """
    config = read_config(find_folder(model, weights=False), location=model, trust_remote_code=False)
    shape = shape_of(config, model)
    hollow = _hollow_model(config, model)
    table = hollow.get_input_embeddings().weight
    head = hollow.get_output_embeddings()
    in_head = 0 if head is None or head.weight is table else head.weight.numel()
    matrices = [(name, weight.numel()) for name, weight in hollow.named_parameters() if weight.dim() > 1]
    text = config.get_text_config(decoder=True)
    experts = _first(text, _NUM_EXPERTS)
    of_a_token = _first(text, _EXPERTS_OF_A_TOKEN)
    return TargetSize(
        shape=shape,
        num_params=sum(weight.numel() for weight in hollow.parameters()),
        num_in_layers=sum(size for _, size in matrices) - table.numel() - in_head,
        num_in_experts=sum(size for name, size in matrices if ".experts." in name),
        share_of_experts=min(1.0, of_a_token / experts) if experts and of_a_token else 1.0,
        kv_bytes=kv_bytes_per_token(config, 2),
        is_quantised=bool(quantisation_of(config)),
    )


def _hollow_model(config: Any, location: str) -> Any:
    """The language model of a configuration on the meta device."""
    config = copy.deepcopy(config)
    if has_text_part(config):
        text = config.get_text_config(decoder=True)
        config = text if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES else config
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    kind = AutoModelForImageTextToText if has_text_part(config) else AutoModelForCausalLM
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that no pass will use
            return kind.from_config(config, dtype=torch.bfloat16)
    except Exception as error:  # each architecture breaks in its own way on a configuration that does not fit
        raise UserError(f"{location}: no model can be made of its config.json ({message_of(error)})") from error


def _first(config: Any, names: tuple[str, ...]) -> int:
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)
