"""Small random targets of real architectures, for every room's tests: seconds to make, real code all the way.

Their heads are drawn wide, so that the largest logit stands clear of the second and greedy comparisons mean something.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from components.targets.forward.llama import FastTarget
from components.targets.shape import shape_of

Family = Literal[
    "llama",
    "qwen3",
    "deepseek_v3",
    "qwen3_moe",
    "mistral",
    "qwen2",
    "phi3",
    "gemma",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "gpt_oss",
]
FAMILIES: tuple[Family, ...] = ("llama", "qwen3", "deepseek_v3", "qwen3_moe")
OURS: tuple[Family, ...] = (
    *("llama", "qwen3", "mistral", "qwen2", "phi3", "gemma", "gemma2", "gemma3_text"),
    *("qwen3_moe", "mixtral", "gpt_oss"),
)
"""Families that our own forward pass runs, with every kind of layer that it knows."""
TELLING: tuple[Family, ...] = ("mistral", "gemma2", "gpt_oss")
"""Those of OURS that together have what FAMILIES lack: windows, caps, sinks, norms behind layers, stacked experts."""
WINDOW = 6
VOCAB_SIZE = 384
EOS_TOKEN = "<|end|>"

_SENTENCES = [
    "def read_rows(path, encoding='utf-8'):\n    return [line.strip() for line in open(path)]\n",
    "class Queue:\n    def put(self, item):\n        self.items.append(item)\n",
    "import os\nfor name in sorted(os.listdir(folder)):\n    print(name, os.path.getsize(name))\n",
    "if value is None:\n    raise ValueError('value must not be None')\n",
]


def make_tiny_target(family: Family, directory: Path, *, num_layers: int = 8, seed: int = 0) -> Path:
    """Write a random model of `family` (at least 8 layers, hidden size 64) and its tokenizer; returns `directory`.

    Made with transformers' own classes, saved as float32 safetensors; a byte-level BPE tokenizer with eos "<|end|>".
    """
    directory.mkdir(parents=True, exist_ok=True)
    make_tiny_tokenizer(directory)
    config, model_class = _architecture(family, num_layers)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = model_class(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight") or "layernorm" in name:
                    parameter.uniform_(0.6, 1.4)  # all ones would hide a norm applied in the wrong place
                    if family.startswith("gemma"):
                        parameter.sub_(1.0)  # they are stored less one
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                elif "lm_head" in name:
                    parameter.normal_(0.0, 0.6)
                elif "embed_tokens" in name:
                    parameter.normal_(0.0, 0.5)
                else:
                    parameter.normal_(0.0, 0.9 / parameter.shape[-1] ** 0.5)
    finally:
        torch.random.set_rng_state(state)
    model.save_pretrained(directory)
    return directory


def make_tiny_tokenizer(directory: Path, *, chat_template: str | None = None) -> Any:
    """A byte-level BPE tokenizer of VOCAB_SIZE tokens trained on a few lines of code; any text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_SENTENCES * 4, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN)
    if chat_template is not None:
        fast.chat_template = chat_template
    fast.save_pretrained(directory)
    return fast


def _architecture(family: Family, num_layers: int) -> tuple[Any, Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    if family == "llama":
        return transformers.LlamaConfig(**common, head_dim=16, attention_bias=True), transformers.LlamaForCausalLM
    if family == "qwen3":
        return transformers.Qwen3Config(**common, head_dim=16), transformers.Qwen3ForCausalLM
    if family == "qwen3_moe":
        experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
        experts["mlp_only_layers"] = [1]
        return transformers.Qwen3MoeConfig(**common, head_dim=16, **experts), transformers.Qwen3MoeForCausalLM
    if family != "deepseek_v3":
        return _windowed(family, common)
    latent = {
        "num_key_value_heads": 4,
        "kv_lora_rank": 24,
        "q_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "num_nextn_predict_layers": 0,
    }
    return transformers.DeepseekV3Config(**{**common, **latent}), transformers.DeepseekV3ForCausalLM


def _windowed(family: Family, common: dict[str, Any]) -> tuple[Any, Any]:
    """Families with layers that see WINDOW positions, beside others that see all of them where it has both."""
    types = [
        ("sliding_attention", "sliding_attention", "full_attention")[n % 3] for n in range(common["num_hidden_layers"])
    ]
    mixed = {"sliding_window": WINDOW, "layer_types": types, "use_sliding_window": True}
    gemma = {"head_dim": 16, "query_pre_attn_scalar": 11, "attn_logit_softcapping": 3.0}
    settings: dict[str, dict[str, Any]] = {
        "mistral": {"head_dim": 16, "sliding_window": WINDOW},
        "qwen2": mixed,
        "phi3": {"sliding_window": WINDOW},
        "mixtral": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
        "gpt_oss": {**mixed, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.5},
        "gemma": {"head_dim": 16, "tie_word_embeddings": True},
        "gemma2": {**mixed, **gemma, "final_logit_softcapping": 20.0, "tie_word_embeddings": True},
        "gemma3_text": {
            **mixed,
            **gemma,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            },
        },
    }
    config = transformers.AutoConfig.for_model(family, **{**common, **settings[family]})
    return config, type(transformers.AutoModelForCausalLM.from_config(config))


def tiny_llama(
    vocab_size: int, scale: Callable[[str], float], *, num_layers: int = 7, seed: int = 0, **changes: Any
) -> LlamaForCausalLM:
    """A random Llama of width 32; seeds torch. scale: factor of a matrix, by its name: larger than the usual 0.02,
    outputs depend on the whole context, do not collapse at once and have wide margins.
    """
    config = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **changes,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.mul_(scale(name))
    return model


def open_in_memory(model: LlamaForCausalLM) -> FastTarget:
    """Our own forward pass over these weights, in float32 on the CPU, without files."""
    return FastTarget(
        model.config,
        shape_of(model.config, "tiny"),
        model.state_dict().__getitem__,
        device=torch.device("cpu"),
        dtype=torch.float32,
        kernel="plain",
        has_lm_head=True,
    )


def save_with_words(model: LlamaForCausalLM, directory: Path, words: Sequence[str]) -> Path:
    """Write the model and a tokenizer of whole words: <bos>, <eos> and <pad>, then these; returns `directory`."""
    model.save_pretrained(directory)
    vocabulary = {word: number for number, word in enumerate(["<bos>", "<eos>", "<pad>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(directory)
    return directory
