"""The other side of dflash_parity.py: speculators' DFlash and DSpark on a sample file, inside their own environment.

Imports nothing of Draftsmith. The sample's metadata names the cases; for each it writes OUT/CASE.safetensors: `anchors`
int64 [A] and `logits` [A, W, N], all slots of the block after every anchor, and for DSpark `confidence` [A, W].

    python dflash_worker.py SAMPLE OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.dflash import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.models.dspark import DSparkSpeculatorConfig
from speculators.models.dspark.core import DSparkDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3Config


def layer_config(shape: dict[str, Any], num_layers: int, window: int) -> Qwen3Config:
    """Qwen3's configuration in the target's shape. window: 0 for none."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen3Config(
        **{name: shape[name] for name in (*names, "rms_norm_eps")},
        num_hidden_layers=num_layers,
        layer_types=["sliding_attention" if window else "full_attention"] * num_layers,
        sliding_window=window or None,
        use_sliding_window=window > 0,
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attention_bias=False,
        pad_token_id=None,
    )
    config._attn_implementation = "sdpa"  # their default, flex attention, is for GPUs
    return config


def build(case: dict[str, Any], shape: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    """Their model with the sample's weights; every tensor of theirs is set."""
    dspark, ids = case["method"] == "dspark", tensors["draft_ids"]
    config_class = DSparkSpeculatorConfig if dspark else DFlashSpeculatorConfig
    more = {"markov_rank": case["markov_rank"]} if dspark else {}
    config = config_class(
        transformer_layer_config=layer_config(shape, case["num_layers"], case["window"]),
        draft_vocab_size=len(ids),
        block_size=case["block_size"],
        sliding_window_non_causal=case["window"] > 0,
        sample_from_anchor=case["sample_from_anchor"],
        mask_token_id=case["mask_token_id"],
        aux_hidden_state_layer_ids=tensors["tap_layers"].tolist(),
        speculators_config=SpeculatorsConfig(
            algorithm=case["method"],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case["block_size"] - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **more,
    )
    model = (DSparkDraftModel if dspark else DFlashDraftModel)(config=config)
    of_case = f"{case['name']}."
    state = {name.removeprefix(of_case): weight for name, weight in tensors.items() if name.startswith(of_case)}
    t2d = torch.zeros(shape["vocab_size"], dtype=torch.bool)
    t2d[ids] = True
    state |= {"embed_tokens.weight": tensors["embed"], "lm_head.weight": tensors["head"]}
    state |= {"verifier_lm_head.weight": tensors["head"], "verifier_norm.weight": state["norm.weight"]}
    state |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    model.load_state_dict(state, strict=True)
    return model.float().eval()


def logits_of(model: Any, case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All blocks at once, as they train."""
    ids, width = tensors["ids"], case["block_size"]
    num_anchors = len(ids) - width  # they draw that many of as many, and sort them
    hidden, logits, _, _, indices = model._backbone_forward(
        tensors["taps"][None],
        ids[None],
        torch.ones(1, len(ids)),
        tensors["last"][None],
        torch.zeros(1, len(ids), dtype=torch.long),
        max_anchors=num_anchors,
    )
    blocks = indices.view(num_anchors, width)
    logits = logits.view(num_anchors, width, -1)
    found = {"anchors": blocks[:, 0].contiguous()}
    if case["method"] == "dspark":
        tokens = ids[blocks]
        before = tokens if case["sample_from_anchor"] else torch.cat((tokens[:, :1], tokens[:, :-1]), 1)
        embedded = model.markov_head.prev_embeddings(before)
        states = hidden.view(num_anchors, width, -1)
        logits = logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=states)
        found["confidence"] = model.confidence_head(torch.cat((states, embedded), -1)).contiguous()
    return {**found, "logits": logits.contiguous()}


def main() -> None:
    """Answer every case."""
    file, out = sys.argv[1:]
    torch.set_num_threads(1)
    with safe_open(file, framework="pt") as opened:
        said = json.loads(opened.metadata()["cases"])
    tensors = load_file(file)
    for case in said["cases"]:
        with torch.no_grad():
            save_file(
                logits_of(build(case, said["shape"], tensors), case, tensors), Path(out) / f"{case['name']}.safetensors"
            )


if __name__ == "__main__":
    main()
