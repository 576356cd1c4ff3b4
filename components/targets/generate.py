"""Continue a batch of prompts with a target: prefill, then one token a pass over the KV cache, rows kept in step.

Each row draws from its own generator, seeded by (seed, row id), so what a row samples does not depend on which rows
share its batch. Logits of a row may still differ in the last bits with the shape of the batch; steps whose files must
repeat exactly therefore fix their batches too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from components.targets.model import AbstractTarget


class Continuation(NamedTuple):
    """What one row became."""

    ids: list[int]  # the new tokens; the end-of-text token is included where it came
    ended: bool  # by an end-of-text token


def row_generator(seed: int, row_id: str) -> torch.Generator:
    """A CPU generator of this row's own."""
    digest = hashlib.sha256(f"{seed}:{row_id}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def continue_batch(
    target: AbstractTarget,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperatures: Sequence[float] | None = None,
    generators: Sequence[torch.Generator] | None = None,
    stop_at_eos: bool = True,
    on_token: Callable[[int], None] | None = None,
) -> list[Continuation]:
    """Up to `max_new_tokens` new tokens for each prompt (token ids, none empty).

    temperatures: one a row, 0 is greedy; default all greedy.
    generators: one a row, needed where a temperature is not 0.
    on_token: called with the number of tokens each row has so far, after every pass.
    """
    assert prompts and all(len(prompt) > 0 for prompt in prompts)
    temperatures = temperatures or [0.0] * len(prompts)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    padded = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    cache = target.new_cache(len(prompts), longest + max_new_tokens)
    passed = target.forward(padded, cache, num_valid=lengths, logits="last")
    ends = set(target.shape.eos_token_ids) if stop_at_eos else set()
    new: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for step in range(max_new_tokens):
        assert passed.logits is not None
        tokens = _pick(passed.logits[:, 0], temperatures, generators, ended)
        for row, token in enumerate(tokens.tolist()):
            if not ended[row]:
                new[row].append(token)
                ended[row] = token in ends
        if on_token is not None:
            on_token(step + 1)
        if all(ended) or step + 1 == max_new_tokens:
            break
        # ended rows go on with padding that is not counted, so that the batch keeps its shape
        alive = torch.tensor([0 if end else 1 for end in ended])
        passed = target.forward(tokens[:, None], cache, num_valid=alive, logits="last")
    return [Continuation(ids, end) for ids, end in zip(new, ended, strict=True)]


def _pick(
    logits: Tensor,
    temperatures: Sequence[float],
    generators: Sequence[torch.Generator] | None,
    ended: Sequence[bool],
) -> Tensor:
    """The next token of each row [B]: argmax, or a draw from softmax(logits / temperature)."""
    tokens = logits.argmax(dim=-1).cpu()
    for row, temperature in enumerate(temperatures):
        if temperature > 0.0 and not ended[row]:
            assert generators is not None, "sampling needs a generator for each row"
            probabilities = torch.softmax(logits[row].float().cpu() / temperature, dim=-1)
            tokens[row] = torch.multinomial(probabilities, 1, generator=generators[row])[0]
    return tokens
