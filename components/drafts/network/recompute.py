"""Activation checkpointing: parts of a training graph that keep their inputs alone and are computed again backwards.

The second computation gives the same bits as the first, so gradients are the same; a step takes up to a third longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
_blocks = ContextVar("blocks_are_recomputed", default=False)


@contextmanager
def recomputing_blocks(on: bool) -> Iterator[None]:
    """While it lasts, `of_block` recomputes."""
    token = _blocks.set(on)
    try:
        yield
    finally:
        _blocks.reset(token)


def of_block(function: Callable[..., T], *inputs: Any) -> T:
    """function(*inputs), a decoder block's work; it keeps no activations where blocks are recomputed."""
    return recomputed(function, *inputs) if _blocks.get() else function(*inputs)


def recomputed(function: Callable[..., T], *inputs: Any) -> T:
    """function(*inputs), keeping no activations between inputs and result. It must draw no random numbers."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    result: T = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
