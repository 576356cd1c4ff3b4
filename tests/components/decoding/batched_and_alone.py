"""Sequences decoded in a batch, each beside itself alone with the same draws."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from components.decoding.batch import decode_batch, decode_tree
from components.decoding.chain import Decoded, decode
from components.decoding.tree_shapes import TreeShape
from components.drafts.interface import Proposer, Sampling
from components.targets.interface import AbstractTarget


def generators(count: int) -> list[torch.Generator]:
    """So many generators, every one with its own seed, every time the same."""
    return [torch.Generator().manual_seed(100 + number) for number in range(count)]


def batched_and_alone(
    target: AbstractTarget,
    drafter: Proposer,
    prompts: Sequence[list[int]],
    how: int | TreeShape,
    sampling: Sampling,
    max_new_tokens: int,
) -> Iterator[tuple[list[int], Decoded, Decoded]]:
    """For every prompt: (prompt, its run in the batch, its run alone). how: a chain's depth or a tree's shape."""
    asked = {"max_new_tokens": max_new_tokens, "sampling": sampling, "ignore_eos": True}
    way = {"depth": how} if isinstance(how, int) else {"shape": how}
    together = decode_batch(target, drafter, prompts, **way, **asked, rngs=generators(len(prompts)))
    for prompt, run, rng in zip(prompts, together, generators(len(prompts)), strict=True):
        if isinstance(how, int):
            yield prompt, run, decode(target, drafter, prompt, depth=how, **asked, rng=rng)
        else:
            yield prompt, run, decode_tree(target, drafter, prompt, how, **asked, rng=rng)
