"""Step `targets.fine_tune_target`: goes on training any target on a corpus, as an update of a model does.

The model's own code in transformers computes the loss, so every family that can be opened as a whole can be changed;
weights are trained in float32 and stored as they were. Only next-token loss on packed windows and AdamW: this makes a
changed target for questions about drafters, and is no recipe for a better one.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from components.contract import Context, Corpus, Target, UserError
from components.targets.config import facts_of, has_text_part, read_config
from components.targets.load import open_tokenizer, threads_for, transformers_model
from components.targets.pretraining.plan import TokenWindows, read_documents
from components.targets.pretraining.tokenizer import ROLE_TOKENS
from components.targets.source import list_files, open_record

BATCH_ROWS: Final = 8
"""Windows in a pass; more of them are summed up before a step."""
SCORED_WINDOWS: Final = 32
REPORT_EVERY: Final = 10


def fine_tune_target(
    target: Target,
    corpus: Corpus,
    *,
    num_steps: int,
    peak_lr: float,
    warmup_share: float,
    weight_decay: float,
    tokens_per_step: int,
    sequence_length: int,
    ctx: Context,
) -> Target:
    """The step `targets.fine_tune_target`; its settings are explained in components/targets/steps.py."""
    torch.manual_seed(ctx.seed)
    folder, record = open_record(target.path)
    location = str(record["model"])
    config = read_config(folder, location=location, trust_remote_code=False)
    if record["trust_remote_code"] or has_text_part(config) or getattr(config, "quantization_config", None):
        raise UserError(
            f"{location}: brings code of its own, reads images, or is quantised; such a target is not fine-tuned here:"
            " fine-tune it with its own code, and load the result"
        )
    if tokens_per_step % sequence_length:
        raise UserError(f"tokens_per_step: {tokens_per_step} is no multiple of sequence_length, {sequence_length}")
    tokenizer = open_tokenizer(target)
    train, held_out = (token_stream(corpus, name, tokenizer, location) for name in ("train", "held_out"))
    model = transformers_model(folder, config, torch.float32, False, location).to(ctx.device)
    torch.set_num_threads(threads_for(sum(weight.numel() for weight in model.parameters()), ctx.num_threads))
    scored = _scored(held_out, sequence_length, location).to(ctx.device)
    before = mean_loss(model, scored)
    windows = TokenWindows(train, sequence_length, ctx.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.95), weight_decay=weight_decay)
    count = tokens_per_step // sequence_length
    began = time.monotonic()
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * lr_scale(step, num_steps, warmup_share)
        total = 0.0
        for piece in torch.from_numpy(windows.batch(step * count, count)).split(BATCH_ROWS):
            loss = next_token_loss(model, piece.to(ctx.device)) * (len(piece) / count)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ctx.progress(step + 1, num_steps, "steps")
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == num_steps:
            ctx.record(step + 1, loss=total)
    after = mean_loss(model, scored)
    if not math.isfinite(after):
        raise UserError(f"{location}: fine-tuning ended in a loss that is no number; take a lower peak_lr")
    ctx.note(f"held-out loss on the new text: {before:.3f} before, {after:.3f} after {num_steps} steps")
    _save(model, folder, location, ctx.out)
    return Target.of_step(
        ctx,
        {
            **facts_of(ctx.out, location="fine_tune_target", trust_remote_code=False, dtype="auto", device=ctx.device),
            "model": f"{location}, fine-tuned",
            "fine_tuned_from": target.key,
            "num_steps": num_steps,
            "tokens_seen": num_steps * tokens_per_step,
            "held_out_loss_before": before,
            "held_out_loss": after,
            "training_seconds": time.monotonic() - began,
            "corpus": dict(corpus.info),
        },
    )


def token_stream(corpus: Corpus, name: str, tokenizer: Any, location: str) -> np.ndarray:
    """The documents of `train` or `held_out` one after the other, each ended by the target's end token: [tokens] int64.

    Raises:
        UserError: the corpus has turns in a markup that the tokenizer does not know, or the target has no end token.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(f"{location}: its tokenizer names no end token (eos_token), which must end each document")
    known = tokenizer.get_vocab()
    ids: list[int] = []
    for _, text in read_documents(corpus.path / f"{name}.jsonl"):
        if strange := next((role for role in ROLE_TOKENS if role in text and role not in known), None):
            raise UserError(
                f"corpus ({corpus.key[:12]}): its chats are written with {strange}, which {location} does not know;"
                " give plain documents"
            )
        ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], end]
    return np.array(ids, dtype=np.int64)


def lr_scale(step: int, num_steps: int, warmup_share: float) -> float:
    """Learning rate at a step as a share of its peak: linear up over the first steps, then a cosine to a tenth."""
    warmup = max(1, round(num_steps * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, num_steps - warmup)))


def next_token_loss(model: Any, rows: Tensor) -> Tensor:
    """Mean loss in nats per token over windows [rows, length + 1]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


@torch.no_grad()
def mean_loss(model: Any, rows: Tensor) -> float:
    """The loss of a model that does not train, over windows in passes of BATCH_ROWS."""
    model.eval()
    return sum(float(next_token_loss(model, piece)) * len(piece) for piece in rows.split(BATCH_ROWS)) / len(rows)


def _scored(stream: np.ndarray, length: int, location: str) -> Tensor:
    """At most SCORED_WINDOWS windows, evenly spread over the held-out text: [windows, length + 1]."""
    count = (len(stream) - 1) // length
    if count < 1:
        raise UserError(f"corpus: {len(stream)} held-out tokens of {location} are too few for a window of {length}")
    starts = length * np.unique(np.linspace(0, count - 1, min(count, SCORED_WINDOWS)).astype(int))
    return torch.from_numpy(np.stack([stream[start : start + length + 1] for start in starts]))


def _save(model: Any, folder: Path, location: str, out: Path) -> None:
    """Write the weights in the dtype that config.json names, and everything else of the folder as it is."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    dtype = stored.get("dtype") or stored.get("torch_dtype") or "float32"
    model.to(getattr(torch, dtype)).save_pretrained(out)
    for file in list_files(folder, location):
        if not file.name.endswith((".safetensors", ".safetensors.index.json")) and file.name != "config.json":
            shutil.copyfile(file, out / file.name)
