"""The other side: speculators' DFlash and DSpark on a file of block_sample.py, inside their own environment.

Imports nothing of Draftsmith. The sample's metadata names the cases. `compare` writes OUT/CASE.safetensors for each:
`anchors` int64 [A], `logits` [A, W, N] of all slots of the block after every anchor, for DSpark `confidence` [A, W];
`chains` int64 [A, W], what every slot drafts (target ids), each given the draft token before; `loss`, and
`gradient.NAME` of every weight. `train` trains the only case: {"do": "train", "steps": N} a line, answered as
speculators_worker.py does.

    python dflash_worker.py compare SAMPLE OUT
    python dflash_worker.py train SAMPLE DEVICE THREADS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
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
    of_case = f"{case['name']}."
    state = {name.removeprefix(of_case): weight for name, weight in tensors.items() if name.startswith(of_case)}
    dspark, ids = case["method"] == "dspark", state.pop("draft_ids")
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
    t2d = torch.zeros(shape["vocab_size"], dtype=torch.bool)
    t2d[ids] = True
    head = tensors["head"][ids]
    state |= {"embed_tokens.weight": tensors["embed"], "lm_head.weight": head}
    state |= {"verifier_lm_head.weight": head, "verifier_norm.weight": tensors["norm"]}
    if model.use_draft_vocab:
        state |= {"d2t": ids - torch.arange(len(ids)), "t2d": t2d}
    model.load_state_dict(state, strict=True)
    return model.float()


def inputs(tensors: dict[str, Tensor], device: str) -> dict[str, Tensor]:
    """The batch; no block begins with the first token, before which there are no features."""
    mask = tensors["mask"].float()
    mask[0] = 0.0
    laid_out = {
        "hidden_states": tensors["taps"],
        "input_ids": tensors["ids"],
        "loss_mask": mask,
        "verifier_last_hidden_states": tensors["last"],
        "document_ids": torch.zeros_like(tensors["ids"]),
    }
    return {name: tensor[None].to(device) for name, tensor in laid_out.items()}


def loss_settings(case: dict[str, Any], loss: str, kernels: str) -> dict[str, Any]:
    """The arguments of their loss; `loss` is the distance of token distributions, DSpark's first part; kernels: theirs,
    "eager" or "fused" (for GPUs)."""
    parts = {loss: case["ce_weight"], "tv": case["tv_weight"]} if case["method"] == "dspark" else {loss: 1.0}
    more = {"confidence_head_alpha": case["confidence_weight"]} if case["method"] == "dspark" else {}
    if case["method"] == "dspark":
        more["tv_loss_fn"] = resolve_loss_config("tv", kernels)["tv"][0]
    weights = {"per_position_loss_weight": "dpace"} if case["slot_weights"] == "dpace" else {}
    return {"loss_config": resolve_loss_config(json.dumps(parts), kernels), "gamma": 4.0, **weights, **more}


def compare(model: Any, case: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All blocks at once, as they train."""
    batch, width = inputs(tensors, "cpu"), case["block_size"]
    ids, num_anchors = tensors["ids"], len(tensors["ids"]) - width - 1  # they draw that many of as many, and sort them
    with torch.no_grad():
        hidden, logits, _, _, indices = model._backbone_forward(**batch, max_anchors=num_anchors)
        blocks = indices.view(num_anchors, width)
        base, states = logits.view(num_anchors, width, -1), hidden.view(num_anchors, width, -1)
        draft_ids = tensors[f"{case['name']}.draft_ids"]
        found = {"anchors": blocks[:, 0].contiguous(), "logits": base, "chains": draft_ids[base.argmax(-1)]}
        if case["method"] == "dspark":
            tokens = ids[blocks]
            before = tokens if case["sample_from_anchor"] else torch.cat((tokens[:, :1], tokens[:, :-1]), 1)
            bias = model.markov_head.block_bias
            embedded = model.markov_head.prev_embeddings(before)
            found["logits"] = base + bias(prev_token_ids=before, hidden_states=states)
            found["confidence"] = model.confidence_head(torch.cat((states, embedded), -1))
            first = 0 if case["sample_from_anchor"] else 1
            last = tokens[:, :1]
            for slot in range(first, width):
                of_slot = slice(slot, slot + 1)
                biased = base[:, of_slot] + bias(prev_token_ids=last, hidden_states=states[:, of_slot])
                last = draft_ids[biased.argmax(-1)]
                found["chains"][:, of_slot] = last
    _, loss, _ = model(**batch, max_anchors=num_anchors, **loss_settings(case, "kl_div", "eager"))
    loss.backward()
    found["loss"] = loss.detach()
    found |= {f"gradient.{name}": part.grad for name, part in model.named_parameters() if part.grad is not None}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def train(model: Any, case: dict[str, Any], batch: dict[str, Tensor], device: str) -> None:
    """Answer requests until stdin ends."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95))
    before = resident()
    for line in sys.stdin:
        request = json.loads(line)
        steps, dtype, settings = (
            request["steps"],
            request["autocast"],
            loss_settings(case, "kl_div", request["kernels"]),
        )
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device.split(":")[0], getattr(torch, dtype)) if dtype else nullcontext():
                _, loss, _ = model(**batch, max_anchors=case["max_anchors"], **settings)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        answer = {"seconds": seconds, "peak_bytes": peak(device) - before, "loss": float(loss.detach())}
        print(json.dumps({**answer, "trained_parameters": sum(p.numel() for p in trained)}), flush=True)


def resident() -> int:
    """Bytes in use now: of the process, or on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def peak(device: str) -> int:
    """The most bytes in use so far."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Answer every case, or train one."""
    do, file, *rest = sys.argv[1:]
    torch.manual_seed(0)
    with safe_open(file, framework="pt") as opened:
        said = json.loads(opened.metadata()["cases"])
    tensors = load_file(file)
    if do == "train":
        device, threads = rest
        torch.set_num_threads(int(threads))
        (case,) = said["cases"]
        model = build(case, said["shape"], tensors).to(device).train()
        train(model, case, inputs(tensors, device), device)
        return
    torch.set_num_threads(1)
    for case in said["cases"]:
        model = build(case, said["shape"], tensors).eval()
        save_file(compare(model, case, tensors), Path(rest[0]) / f"{case['name']}.safetensors")


if __name__ == "__main__":
    main()
