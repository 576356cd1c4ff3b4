"""The other side: speculators' EAGLE-3 on a sample file, inside its own environment.

Imports nothing of Draftsmith. Reads one JSON request a line and answers one JSON line:
  {"do": "compare", "out": FILE}   logits of every step, first-step loss and its gradients, to a safetensors file
  {"do": "train", "steps": N, "autocast": "", "kernels": "eager"}
                                   N optimiser steps, under autocast to a dtype where one is named, with their "eager"
                                   or "fused" losses; seconds, and peak memory so far beyond that before the first step

    python speculators_worker.py SAMPLE DEVICE THREADS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from contextlib import nullcontext
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig


def build(shape: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Eagle3DraftModel:
    """Their model with the sample's weights; every tensor of theirs is set."""
    layer = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=1,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        rms_norm_eps=shape["rms_norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        max_position_embeddings=1 << 15,
        pad_token_id=None,
    )
    layer._attn_implementation = "sdpa"  # their default, flex attention, has no backward on a CPU
    draft_vocab_size = len(tensors["draft_ids"])
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=draft_vocab_size,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=[1, 2, 3],  # only their number counts here
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape["num_steps"])],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
    )
    model = Eagle3DraftModel(config=config)
    ids = tensors["draft_ids"]
    t2d = torch.zeros(shape["vocab_size"], dtype=torch.bool)
    t2d[ids] = True
    ours = {name.removeprefix("draft."): weight for name, weight in tensors.items() if name.startswith("draft.")}
    state = {name.replace("midlayer.", "layers.0."): weight for name, weight in ours.items()}
    state |= {"embed_tokens.weight": tensors["embed"], "verifier_lm_head.weight": tensors["head"][tensors["draft_ids"]]}
    state |= {"verifier_norm.weight": tensors["final_norm"]}
    if model.use_draft_vocab:
        state |= {"t2d": t2d, "d2t": ids - torch.arange(len(ids))}
    model.load_state_dict(state, strict=True)
    return model.float()


def inputs(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """The batch as their `shift_batch` lays it out: (x_1, g_0, y_1, m_1), positions from 1."""
    length = tensors["ids"].shape[1] - 1
    laid_out = {
        "hidden_states": tensors["taps"][:, :-1],
        "input_ids": tensors["ids"][:, 1:],
        "document_ids": torch.zeros(1, length, dtype=torch.long),
        "loss_mask": tensors["mask"][:, 1:],
        "position_ids": torch.arange(1, length + 1)[None],
        "verifier_last_hidden_states": tensors["last"][:, 1:],
    }
    return {name: tensor.to(device).contiguous() for name, tensor in laid_out.items()}


def compare(model: Eagle3DraftModel, batch: dict[str, torch.Tensor], num_steps: int, out: str) -> dict[str, Any]:
    """What the other side needs to see."""
    losses = resolve_loss_config("kl_div", "eager")
    caught: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda *call: caught.append(call[2].detach().clone()))
    with torch.no_grad():
        model(**batch, ttt_steps=num_steps, loss_config=losses)
    hook.remove()
    _, loss, _ = model(**batch, ttt_steps=1, loss_config=losses)
    loss.backward()
    found = {f"logits.{k}": logits[0] for k, logits in enumerate(caught)}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient.{name.replace('layers.0.', 'midlayer.')}"] = parameter.grad
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in found.items()}, out)
    return {"loss": float(loss.detach())}


def main() -> None:
    """Answer requests until stdin ends."""
    file, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    with safe_open(file, framework="pt") as opened:
        shape = json.loads(opened.metadata()["shape"])
    tensors = load_file(file)
    model = build(shape, tensors).to(device)
    batch = inputs(tensors, device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95))
    before = resident()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "compare":
            print(json.dumps(compare(model, batch, shape["num_steps"], request["out"])), flush=True)
            continue
        losses = resolve_loss_config("kl_div", request["kernels"])
        start = time.perf_counter()
        for _ in range(request["steps"]):
            optimizer.zero_grad(set_to_none=True)
            with autocast(device, request["autocast"]):
                _, loss, _ = model(**batch, ttt_steps=shape["num_steps"], loss_config=losses)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        parameters = sum(parameter.numel() for parameter in trained)
        answer = {"seconds": seconds, "peak_bytes": peak(device) - before, "loss": float(loss.detach())}
        print(json.dumps({**answer, "trained_parameters": parameters}), flush=True)


def autocast(device: str, dtype: str) -> Any:
    """Autocast to a dtype, or nothing."""
    return torch.autocast(device.split(":")[0], dtype=getattr(torch, dtype)) if dtype else nullcontext()


def resident() -> int:
    """Bytes in use now: of the process, or on the GPU."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak(device: str) -> int:
    """The most bytes in use so far."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
