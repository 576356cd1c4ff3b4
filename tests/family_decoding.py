"""What a family says by its own `generate`, and whether other ways of decoding say the same."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from tiny_families import make_family

from components.targets.forward.transformers_model import TransformersTarget
from components.targets.load import open_target

PROMPTS = [[5, 9, 2, 7], [3, 8], [11, 4, 4, 8, 30, 2, 6, 19, 25]]
LENGTH = 16
TIE = 1e-2
"""Logits by which the best two tokens of a random model lead where rounding may choose between them."""


class Alone(NamedTuple):
    """A family, and what its own `generate` says to each prompt: LENGTH tokens and their logits [LENGTH, V]."""

    family: str
    target: TransformersTarget
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    def first_fault(self, answers: list[list[int]]) -> str:
        """Where answers to PROMPTS differ from these by more than a tie; "" where they do not."""
        for row, (expected, answer, logits) in enumerate(zip(self.tokens, answers, self.logits, strict=True)):
            if len(answer) != LENGTH:
                return f"{self.family}: answer {row} has {len(answer)} tokens"
            apart = next((place for place in range(LENGTH) if answer[place] != expected[place]), None)
            if apart is not None:
                best = logits[apart].topk(2)
                if answer[apart] not in best.indices.tolist() or float(best.values[0] - best.values[1]) >= TIE:
                    return f"{self.family}: token {apart} of answer {row} is {answer[apart]}, not {expected[apart]}"
        return ""


def said_alone(family: str, folder: Path) -> Alone:
    """Write the tiny model into `folder` and let it answer PROMPTS by transformers' own greedy decoding."""
    torch.set_num_threads(1)
    target = open_target(make_family(family, folder), kernel="transformers")
    assert isinstance(target, TransformersTarget)
    target.model.generation_config.eos_token_id = None
    tokens, logits = [], []
    for prompt in PROMPTS:
        said = target.model.generate(
            torch.tensor([prompt]),
            max_new_tokens=LENGTH,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens.append(said.sequences[0, len(prompt) :].tolist())
        logits.append(torch.cat(said.logits))
    return Alone(family, target, tokens, logits)
