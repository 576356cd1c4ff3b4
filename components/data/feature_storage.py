"""Encodes hidden states for a shard of features: as bf16, or as fp8 with one power of two for each token and state.

`encode` makes the tensors to write, and `decode` gives bf16 back; no other module knows the encoding.
fp8 is e4m3 (1 sign, 4 exponent, 3 mantissa bits; Micikevicius et al. 2022, arXiv:2209.05433), half the bytes of bf16.
Hidden states have a few channels far larger than the rest, which would spoil integers of one scale; e4m3 errs by at
most a sixteenth over 14 binades below the largest value of a state, so one exponent a state is enough. The exponent is
a whole number: scaling by a power of two does not round, and an e4m3 times it is exactly a bf16 again.
Shapes: N tokens, C states side by side (3 taps, or the 1 last), H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

import torch
from torch import Tensor

Storage = Literal["bf16", "fp8", "none"]
"""none: hidden states are not stored but computed while training (feature_live.py)."""

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 1.875 * 2.0**127
"""The largest e4m3 times a power of two that bf16 can hold. The few larger bf16, at most a sixteenth above, would round
up to infinity."""
STATES: Final = {"taps": 3, "last": 1}
"""Number of states C in each tensor."""


def encode(name: str, states: Tensor, storage: Storage) -> dict[str, Tensor]:
    """The tensors to write for states [N, C * H]: `name`, and with fp8 `name`_exponents int8 [N, C]."""
    if storage == "bf16":
        return {name: states.to(torch.bfloat16)}
    assert storage == "fp8", storage
    apart = states.float().unflatten(-1, (STATES[name], -1)).clamp(-LARGEST, LARGEST)
    largest = apart.abs().amax(-1, keepdim=True)
    # frexp: largest / max = m 2^e with m < 1: scaled by 2^-e nothing exceeds the largest e4m3, which has no infinity.
    exponents = torch.frexp(largest / torch.finfo(FP8).max).exponent.clamp(-126, 127)
    scaled = torch.ldexp(apart, -exponents).to(FP8)
    return {name: scaled.flatten(-2), f"{name}_exponents": exponents[..., 0].to(torch.int8)}


def decode(name: str, part: Callable[[str], Tensor], storage: Storage) -> Tensor:
    """States bf16 [N, C * H] from the written tensors; part: tensor name -> the requested rows of it."""
    written = part(name)
    if storage == "bf16":
        return written
    assert storage == "fp8", storage
    apart = written.float().unflatten(-1, (STATES[name], -1))
    return torch.ldexp(apart, part(f"{name}_exponents").int()[..., None]).flatten(-2).to(torch.bfloat16)


def bytes_per_token(hidden_size: int, storage: Storage) -> int:
    """Bytes on disk of a token: four states (three taps and the last), a token id and a mask byte."""
    states = sum(STATES.values())
    return {"bf16": states * 2 * hidden_size, "fp8": states * (hidden_size + 1), "none": 0}[storage] + 4 + 1
