"""One EAGLE-3 drafter of random weights takes optimiser steps in this process, which says the most memory that it held.

    python -m benchmarks.training_memory_worker '{"shape": {...}, "tokens": 2048, "recompute": false, "estimate": true}'

It also runs in a checkout of an earlier commit, so it uses nothing newer than it must.

"float32_products": a processor without instructions for bfloat16 takes hours for a step of the largest shape. What is
multiplied is then made float32 a slice at a time: the same tensors exist, and slices of some 50 MB beside them.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.eagle3_sample import FrozenParts
from components.drafts.interface import Batch
from components.drafts.methods.eagle3 import Eagle3
from components.drafts.settings import Eagle3Settings
from components.drafts.training.loop import Schedule

try:
    from components.drafts.training.optimizer import Optimizer
except ImportError:  # earlier commits
    from components.drafts.training.loop import Optimizer  # type: ignore[no-redef, attr-defined]


SLICE = 1 << 22
"""Numbers of a slice. Two, and their product, exist at once: some 50 MB."""
ATEN = torch.ops.aten
FLASH, FLASH_BACKWARD = (
    ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward.default,
)


class Float32Products(TorchDispatchMode):
    """Multiplies bfloat16 in float32, a slice at a time, and rounds the product."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation."""
        kwargs = kwargs or {}
        if not any(isinstance(part, Tensor) and part.dtype == torch.bfloat16 for part in args):
            return func(*args, **kwargs)
        if func is ATEN.mm.default:
            return product(*args)
        if func is ATEN.bmm.default:
            return torch.stack([product(a, b) for a, b in zip(*args, strict=True)])
        if func in (FLASH, FLASH_BACKWARD):
            return by_heads(func, args, kwargs)
        assert not {"mm", "bmm", "addmm", "baddbmm"} & set(str(func).split(".")), f"{func} is not sliced"
        return func(*args, **kwargs)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [M, K] b [K, N] -> [M, N]."""
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    step = max(1, SLICE // len(b))
    for column in range(0, b.shape[1], step):
        right = b[:, column : column + step].float()
        for row in range(0, len(a), step):
            out[row : row + step, column : column + step] = a[row : row + step].float() @ right
    return out


def by_heads(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """An attention kernel [B, G, T, D], or its gradients, head by head."""
    found: list[tuple[Tensor, ...]] = []
    mask = kwargs.get("attn_mask")
    more = {**kwargs, "attn_mask": None if mask is None else mask.float()}
    for head in range(args[0].shape[1]):
        one = [part[:, head : head + 1].float() if isinstance(part, Tensor) else part for part in args]
        parts = func(*one, **more)
        # The log-sum-exp, float32 [B, G, T], is all that is not rounded.
        found.append(tuple(part.to(args[0].dtype) if part.dim() == 4 else part for part in parts))
    return tuple(torch.cat(parts, 1) for parts in zip(*found, strict=True))


class Parts(FrozenParts):
    """The frozen parts of a target whose drafter reads three layers."""

    tap_layers = (1, 2, 3)


def build(shape: dict[str, Any], window: int, device: torch.device) -> Eagle3:
    """A drafter on a device, and the parts of its target there in bfloat16."""
    facts = SimpleNamespace(**shape, rms_norm_eps=1e-6, rope_theta=10000.0)
    hidden, vocab = shape["hidden_size"], shape["vocab_size"]
    with device:
        tables = [torch.empty(vocab, hidden, dtype=torch.bfloat16).normal_(0.0, hidden**-0.5) for _ in range(2)]
        gains = torch.ones(hidden, dtype=torch.bfloat16)
    target: Any = Parts(facts, tables[0], gains, tables[1], torch.bfloat16)
    ids = torch.arange(0, vocab, vocab // shape["draft_vocab_size"])[: shape["draft_vocab_size"]]
    draft = Eagle3.build(target, Eagle3Settings(ttt_steps=shape["ttt_steps"], window=window), ids)
    return draft.train()


def batch_of(shape: dict[str, Any], num_tokens: int) -> Batch:
    """One answer of so many tokens."""
    hidden = shape["hidden_size"]
    ids = torch.randint(0, shape["vocab_size"], (1, num_tokens))
    mask = torch.ones(1, num_tokens, dtype=torch.bool)
    states = torch.randn(1, num_tokens, 3 * hidden), 4 * torch.randn(1, num_tokens, hidden)
    return Batch(ids, mask, *states, torch.tensor([num_tokens]))


def status(name: str) -> int:
    """A number of bytes of /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {name}")


def held_by(device: torch.device) -> int:
    """Bytes that are in use now: of the GPU, or of this process."""
    return torch.cuda.memory_allocated() if device.type == "cuda" else status("VmRSS")


def attention_alone(
    shape: dict[str, Any], num_tokens: int, device: torch.device, times: int
) -> dict[str, dict[str, float]]:
    """A step's attention forwards and backwards, in bfloat16: ours, and torch's own without the later steps' columns.

    Seconds are the median of so many times after the first; bytes, of a GPU, are those beyond what goes in.
    """
    from components.drafts.methods.training_time_test import joined_attention
    from components.drafts.network.layers import CausalMask, Sight

    heads, num_steps = shape["num_key_value_heads"], shape["ttt_steps"]

    def draw(*size: int) -> Tensor:
        return torch.randn(1, heads, *size, shape["head_dim"], dtype=torch.bfloat16, device=device).requires_grad_()

    queries, keys, values = draw(shape["num_attention_heads"] // heads, num_tokens), draw(num_tokens), draw(num_tokens)
    later = [(draw(num_tokens), draw(num_tokens)) for _ in range(num_steps - 1)]
    inputs = [queries, keys, values, *itertools.chain(*later)]
    sight = Sight(CausalMask(num_tokens, device), torch.arange(num_tokens, device=device)[None])

    def ours(step: int) -> Tensor:
        return joined_attention(queries, keys, values, sight, later[:step])

    def fused(_: int) -> Tensor:
        whole = queries.flatten(1, 2)
        return F.scaled_dot_product_attention(whole, keys, values, is_causal=True, enable_gqa=True)

    answer = {}
    for way in (ours, fused):
        seconds, before = [], held_by(device)
        for _ in range(times + 1):
            start = time.perf_counter()
            mixed = [way(step) for step in range(num_steps)]
            torch.autograd.grad(mixed, inputs, [torch.ones_like(one) for one in mixed], allow_unused=True)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            if len(seconds) == 1 and device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
        answer[way.__name__] = {"seconds": statistics.median(seconds[1:])}
        if device.type == "cuda":
            answer[way.__name__]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return answer


def main() -> None:
    """Measure one case and print it as JSON."""
    case = json.loads(sys.argv[1])
    shape, num_tokens = case["shape"], case["tokens"]
    torch.set_num_threads(case["threads"])
    if limit := case.get("limit"):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.manual_seed(0)
    device = torch.device(case.get("device", "cpu"))
    draft = build(shape, case.get("window", 0), device)
    schedule = Schedule(1, 1e-4, 0.0, 0.01, 1.0, 1, 1, "bfloat16", case["optimizer"], 1.0)
    answer: dict[str, Any] = {}
    products = Float32Products() if case.get("float32_products") else nullcontext()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    if case.get("estimate"):
        from dataclasses import asdict, replace

        from components.drafts.training.memory import Sizes, peak_of

        schedule = replace(schedule, recompute=case["recompute"])
        with products:
            estimate = peak_of(draft, Sizes(num_tokens, num_tokens), schedule, device)
        answer = {"parts": asdict(estimate), "estimated_bytes": estimate.total}
    with device:
        batch = batch_of(shape, num_tokens)
    optimizer = Optimizer(draft, case["optimizer"], weight_decay=0.01, muon_lr_scale=1.0)
    optimizer.update(sum(weight.sum() for weight in draft.parameters()) * 0.0, 0.0, clip_norm=1.0)  # makes the moments
    held, start = held_by(device), time.perf_counter()
    ends, steps = [start], case.get("steps", 1)
    for _ in range(steps):
        draft.zero_grad(set_to_none=True)
        with products, torch.autocast(device.type, dtype=torch.bfloat16), ExitStack() as settings:
            if case["recompute"]:
                from components.drafts.network.recompute import recomputing_blocks

                settings.enter_context(recomputing_blocks(True))
            result = draft.losses(batch)
        with products:
            optimizer.update(result.loss, 1e-4, clip_norm=1.0)
        loss = float(result.loss.detach())  # waits for the device
        ends.append(time.perf_counter())
    seconds = statistics.median(end - begin for begin, end in itertools.pairwise(ends[min(1, steps - 1) :]))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else status("VmHWM")
    answer |= {"peak_bytes": peak, "held_bytes": held, "step_seconds": seconds, "loss": loss}
    if steps > 1 and case.get("estimate") and not case["recompute"]:
        answer["attention"] = attention_alone(shape, num_tokens, device, steps)
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
