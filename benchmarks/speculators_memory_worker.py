"""The other side of training_memory: speculators' EAGLE-3 of random weights, inside its own environment.

Imports nothing of Draftsmith. Takes one optimiser step under bfloat16 autocast, with its moments there already, and
prints the most memory that the process held.

    python speculators_memory_worker.py '{"shape": {...}, "tokens": 2048, "threads": 2}'
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from speculators_worker import build, inputs


def weights(shape: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights of the drafter and of the frozen parts of its target."""
    hidden, inner, vocab, pruned = (
        shape[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "draft_vocab_size")
    )
    queries, keys = (shape["head_dim"] * shape[name] for name in ("num_attention_heads", "num_key_value_heads"))
    sizes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "midlayer.input_layernorm": (hidden,),
        "midlayer.hidden_norm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "norm": (hidden,),
        "lm_head": (pruned, hidden),
    }
    drawn = {f"draft.{name}.weight": torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    drawn |= {"embed": torch.empty(vocab, hidden, dtype=torch.bfloat16), "final_norm": torch.empty(hidden)}
    drawn["head"] = torch.empty(vocab, hidden, dtype=torch.bfloat16)
    for tensor in drawn.values():
        tensor.normal_(0.0, hidden**-0.5)
    return drawn | {"draft_ids": torch.arange(0, vocab, vocab // pruned)[:pruned]}


def batch_of(shape: dict[str, Any], num_tokens: int) -> dict[str, torch.Tensor]:
    """One answer of so many tokens, as the shared sample file holds it."""
    hidden, length = shape["hidden_size"], num_tokens + 1
    return {
        "ids": torch.randint(0, shape["vocab_size"], (1, length)),
        "mask": torch.ones(1, length, dtype=torch.bool),
        "taps": torch.randn(1, length, 3 * hidden),
        "last": 4 * torch.randn(1, length, hidden),
    }


def status(name: str) -> int:
    """A number of bytes of /proc/self/status."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    """Measure one case and print it as JSON."""
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    if limit := case.get("limit"):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    shape = {**case["shape"], "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_steps": case["shape"]["ttt_steps"]}
    model, batch = build(shape, weights(shape)), inputs(batch_of(shape, case["tokens"]), "cpu")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, betas=(0.9, 0.95))
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    held, start = status("VmRSS"), time.perf_counter()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, loss, _ = model(**batch, ttt_steps=shape["num_steps"], loss_config=resolve_loss_config("kl_div", "eager"))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    answer = {"peak_bytes": status("VmHWM"), "held_bytes": held, "step_seconds": time.perf_counter() - start}
    print(json.dumps({**answer, "loss": float(loss.detach())}))


if __name__ == "__main__":
    main()
