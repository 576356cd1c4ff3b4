"""The built-in target as a GLM-4.5-Air checkpoint with a module for multi-token prediction: the same function.

GLM-4.5's attention and dense MLP are Llama's, so its layers can hold the built-in target's weights bit for bit. Layers
added up to the 46 of GLM-4.5-Air, the last with experts, write nothing to the residual stream. The module in
`model.layers.46` begins as one that hands the hidden state on, and is fine-tuned by `mtp` with `start: own`. So three
readers of one checkpoint, vLLM, transformers (which finds MTP weights by that layer number) and our own loop, speak
real text about which a drafter is right now and then.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

NUM_LAYERS = 46
EXPERTS, EXPERT_SIZE = 4, 64
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def write_glm(source: Path, folder: Path) -> Path:
    """Write it. source: the built-in target's folder."""
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    known = int(config["num_hidden_layers"])
    hidden = int(config["hidden_size"])
    tensors["lm_head.weight"] = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"]).clone()
    first = {
        name.removeprefix("model.layers.0."): t for name, t in tensors.items() if name.startswith("model.layers.0.")
    }
    for layer in range(known, NUM_LAYERS):
        silent = {name: tensor.clone() for name, tensor in first.items()}
        silent["self_attn.o_proj.weight"].zero_()
        if layer == NUM_LAYERS - 1:
            silent = {name: tensor for name, tensor in silent.items() if not name.startswith("mlp.")} | _experts(hidden)
        for name in silent:
            if "mlp." in name and name.endswith("down_proj.weight"):
                silent[name].zero_()
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in silent.items()}
    tensors |= {f"model.layers.{NUM_LAYERS}.{name}": tensor for name, tensor in _module(first, hidden).items()}
    tensors[f"model.layers.{NUM_LAYERS}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    experts = {
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    rope = {"rope_type": "default", "rope_theta": config["rope_theta"], "partial_rotary_factor": 1.0}
    config |= {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": NUM_LAYERS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": NUM_LAYERS - 1,
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
        "partial_rotary_factor": 1.0,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **experts,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in source.glob("*.json"):
        if file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    return folder


def _experts(hidden: int) -> dict[str, Tensor]:
    """A router, routed experts and the shared one, small and random."""
    draw = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    found = {"mlp.gate.weight": matrix(EXPERTS, hidden), "mlp.gate.e_score_correction_bias": torch.zeros(EXPERTS)}
    for expert in (*(f"experts.{number}" for number in range(EXPERTS)), "shared_experts"):
        for name in PROJECTIONS:
            shape = (hidden, EXPERT_SIZE) if name == "down_proj" else (EXPERT_SIZE, hidden)
            found[f"mlp.{expert}.{name}.weight"] = matrix(*shape)
    return found


def _module(block: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
    """The module: norms of ones, a projection that passes the hidden half, a block that hardly writes."""
    found = {name: tensor.clone() for name, tensor in block.items() if not name.startswith("mlp.")} | _experts(hidden)
    for name, tensor in found.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.mul_(0.1)
        if "layernorm" in name:
            tensor.fill_(1.0)
    half = torch.randn(hidden, hidden, generator=torch.Generator().manual_seed(2)) * 0.1 * hidden**-0.5
    found |= {"enorm.weight": torch.ones(hidden), "hnorm.weight": torch.ones(hidden)}
    found["eh_proj.weight"] = torch.cat((half, torch.eye(hidden)), 1)
    return found
