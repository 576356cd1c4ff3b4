"""What the tests of this room measure: drafters trained for a moment, right now and then, not always."""

from __future__ import annotations

import torch

from components.drafts.draft import AbstractDraft, Batch
from components.targets.generate import continue_batch
from components.targets.model import AbstractTarget

VOCAB = 64


def train_briefly(drafter: AbstractDraft, opened: AbstractTarget, starts: list[list[int]]) -> None:
    """Forty steps on one batch of greedy continuations."""
    answers = continue_batch(opened, starts, max_new_tokens=48, stop_at_eos=False)
    ids = torch.tensor([start + answer.ids for start, answer in zip(starts, answers, strict=True)])
    passed = opened.forward(ids, opened.new_cache(*ids.shape), logits="none", features=True)
    assert passed.taps is not None and passed.last is not None
    mask = torch.ones_like(ids, dtype=torch.bool)
    lengths = torch.full((ids.shape[0],), ids.shape[1])
    batch = Batch(ids.clone(), mask, passed.taps.clone(), passed.last.clone(), lengths)
    optimiser = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=4e-3)
    for _ in range(40):
        optimiser.zero_grad()
        drafter.losses(batch).loss.backward()
        optimiser.step()
    drafter.requires_grad_(False)
