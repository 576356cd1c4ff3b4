"""What a family says by its own `generate`, and whether other ways of decoding say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_families import VOCAB_SIZE, make_family

from components.drafts.interface import Batch
from components.drafts.storage.files import build_draft
from components.drafts.training.optimizer import Optimizer
from components.targets.forward.transformers_model import TransformersTarget
from components.targets.load import open_target

PROMPTS = [[5, 9, 2, 7], [3, 8], [11, 4, 4, 8, 30, 2, 6, 19, 25]]
LENGTH = 16
TIE = 1e-2
"""Logits by which the best two tokens of a random model lead where rounding may choose between them."""
NOT_LEARNT = "its loss does not fall"


class Alone(NamedTuple):
    """A family, and what its own `generate` says to each prompt: LENGTH tokens and their logits [LENGTH, V]."""

    family: str
    target: TransformersTarget
    tokens: list[list[int]]
    logits: list[torch.Tensor]

    def first_fault(self, answers: list[list[int]], tie: float = TIE) -> str:
        """Where answers to PROMPTS differ from these by more than a tie; "" where they do not."""
        for row, (expected, answer, logits) in enumerate(zip(self.tokens, answers, self.logits, strict=True)):
            if len(answer) != LENGTH:
                return f"{self.family}: answer {row} has {len(answer)} tokens"
            apart = next((place for place in range(LENGTH) if answer[place] != expected[place]), None)
            if apart is not None:
                best = logits[apart].topk(2)
                if answer[apart] not in best.indices.tolist() or float(best.values[0] - best.values[1]) >= tie:
                    return f"{self.family}: token {apart} of answer {row} is {answer[apart]}, not {expected[apart]}"
        return ""


def said_alone(family: str, folder: Path) -> Alone:
    """Write the tiny model into `folder` and let it answer PROMPTS by transformers' own greedy decoding."""
    return said_by(family, make_family(family, folder))


def said_by(family: str, folder: Path) -> Alone:
    """Let the model in `folder` answer PROMPTS by transformers' own greedy decoding."""
    torch.set_num_threads(1)
    target = open_target(folder, kernel="transformers")
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


def trained_on_own_text(alone: Alone, method: str, settings: dict[str, Any], num_steps: int) -> Any:
    """A drafter of this method after `num_steps` optimiser steps on the family's own answers, ready to decode.

    AssertionError, NOT_LEARNT, where its loss does not fall. Every step draws the same noise: losses compare.
    """
    target = alone.target
    draft = build_draft(method, target, settings, torch.arange(VOCAB_SIZE))
    texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, alone.tokens, strict=True)]
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.tensor([text + [0] * (int(lengths.max()) - len(text)) for text in texts])
    out = target.forward(ids, target.new_cache(*ids.shape), num_valid=lengths, logits="none", features=True)
    assert out.taps is not None and out.last is not None
    columns = torch.arange(ids.shape[1])
    answer = (columns >= torch.tensor([len(prompt) for prompt in PROMPTS])[:, None]) & (columns < lengths[:, None])
    batch = Batch(ids, answer, out.taps.clone(), out.last.clone(), lengths)
    draft.scale_to_target_features(batch.taps[0, :4])
    draft.train()
    optimizer, losses = Optimizer(draft, "adamw", weight_decay=0.0, muon_lr_scale=1.0), []
    for _ in range(num_steps):
        result = draft.losses(batch)
        losses.append(float(result.loss))
        optimizer.update(result.loss, 1e-2, clip_norm=1.0)
    assert losses[-1] < losses[0], NOT_LEARNT
    draft.eval().requires_grad_(False)
    draft.prepare_decoding()
    return draft
