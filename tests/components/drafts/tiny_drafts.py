"""Batches, untrained drafters, contexts and feature artifacts that the tests of this room share."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from saved_drafts import draw_wide

from components.contract import Context, Features
from components.drafts.interface import AbstractDraft, Batch
from components.drafts.settings import settings_class
from components.drafts.storage.files import build_draft
from components.methods import METHODS
from components.targets.interface import AbstractTarget
from components.targets.shape import TapLayers

TRAINED = tuple(name for name in METHODS if settings_class(name)().trained)
INDEPENDENT = ("medusa", "mtp-parallel")  # no step feeds the next
READING = tuple(name for name in METHODS if METHODS[name].reads_taps)
ODD_TAPS: tuple[TapLayers, ...] = ((6,), (1, 7), (1, 2, 3, 5, 7))
"""Taps of an eight-layer target that are not its usual ones."""
ANSWER_FROM = 6  # tokens before this one are the prompt


def batch_of(target: AbstractTarget, num_rows: int = 2, num_tokens: int = 24, seed: int = 0) -> Batch:
    """Random tokens and the target's real features over them; the answer starts at ANSWER_FROM."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, target.shape.vocab_size, (num_rows, num_tokens), generator=generator)
    out = target.forward(ids, target.new_cache(num_rows, num_tokens), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    mask = torch.zeros(num_rows, num_tokens, dtype=torch.bool)
    mask[:, ANSWER_FROM:] = True
    return Batch(ids, mask, out.taps.clone(), out.last.clone(), torch.full((num_rows,), num_tokens))


def new_draft(target: AbstractTarget, method: str, *, spread: bool = True, **settings: object) -> AbstractDraft:
    """An untrained drafter over every second token. spread: weights wide enough that every part changes the guesses."""
    draft_ids = torch.arange(0, target.shape.vocab_size, 2)
    draft: AbstractDraft = build_draft(method, target, settings, draft_ids)
    if spread:
        draw_wide(draft, kept=("lm_head.weight",))
    return draft


def train_on(draft: AbstractDraft, batch: Batch, num_steps: int) -> list[float]:
    """Train a drafter on one batch; the loss of each step."""
    optimizer = torch.optim.AdamW(draft.parameters(), lr=4e-3, weight_decay=0.0)
    losses = []
    for _ in range(num_steps):
        result = draft.losses(batch)
        optimizer.zero_grad()
        result.loss.backward()
        optimizer.step()
        losses.append(float(result.loss.detach()))
    return losses


def new_context(root: Path, key: str = "k") -> Context:
    """A context with its own empty directories."""
    out, scratch = root / "out", root / "scratch"
    out.mkdir(parents=True, exist_ok=True)
    scratch.mkdir(parents=True, exist_ok=True)
    return Context(key=key, out=out, scratch=scratch, num_threads=1, seed=3)


def write_features(target: AbstractTarget, directory: Path, num_train: int = 12, num_validation: int = 4) -> Features:
    """A Features artifact of the target's own greedy answers to random prompts, two workloads."""
    directory.mkdir(parents=True)
    num_rows = num_train + num_validation
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, target.shape.vocab_size, (num_rows, ANSWER_FROM), generator=generator)
    cache, answer = target.new_cache(num_rows, 64), ids
    for _ in range(18):
        logits = target.forward(answer, cache, logits="last").logits
        assert logits is not None
        answer = logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat((ids, answer), 1)
    out = target.forward(ids, target.new_cache(num_rows, 64), logits="none", features=True)
    assert out.taps is not None and out.last is not None
    lengths = [ids.shape[1] - i % 5 for i in range(num_rows)]
    rows, parts, offsets = [], [], [0]
    for i, length in enumerate(lengths):
        mask = torch.arange(length) >= ANSWER_FROM
        parts.append((ids[i, :length].int(), mask, out.taps[i, :length].bfloat16(), out.last[i, :length].bfloat16()))
        offsets.append(offsets[-1] + length)
        rows.append(
            {
                "row_id": f"row-{i}",
                "workload": "code" if i % 2 else "chat",
                "split": "train" if i < num_train else "validation",
                "shard": "shard-00000.safetensors",
                "index": i,
                "num_tokens": length,
                "num_answer_tokens": length - ANSWER_FROM,
            }
        )
    names = ("ids", "mask", "taps", "last")
    tensors = {name: torch.cat([part[n] for part in parts]).contiguous() for n, name in enumerate(names)}
    save_file({**tensors, "offsets": torch.tensor(offsets)}, directory / "shard-00000.safetensors")
    manifest = {
        "target_key": "",
        "tap_layers": list(target.tap_layers),
        "vocab_size": target.shape.vocab_size,
        "rows": rows,
        "shards": ["shard-00000.safetensors"],
    }
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return Features(key="f", path=directory)
