"""Measures a trained target: held-out loss, and whether its greedy text loops (distinct bigrams).

Held-out loss is in nats per token over non-overlapping windows, each group of documents (library, tests) by itself.

Looping is measured on greedy continuations of held-out text. A prompt is the PROMPT_TOKENS tokens that end a `def` line
of a held-out file, or the last ones of a chat before an assistant's turn (a shorter chat is padded on the left); the
continuation is the next CONTINUATION_TOKENS tokens, cut before the first EOS. One with fewer than two tokens is left
out and counted. The ratio is distinct bigrams / all bigrams of a text, averaged over texts (distinct-n: Li et al. 2016,
arXiv:1510.03055); the held-out texts' own continuations are measured alike, for comparison.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from components.outside_json import JsonObject
from components.targets.pretraining.llama import LeanLlama
from components.targets.pretraining.plan import TrainingPlan, pack_documents, read_documents, source_group
from components.targets.pretraining.tokenizer import ANSWER_BEGINS, BOS_ID, EOS_ID, PAD_ID

NUM_PROMPTS: Final = 64
PROMPT_TOKENS: Final = 64
CONTINUATION_TOKENS: Final = 96
_DEF_LINE: Final = re.compile(r"^[ \t]*(?:async )?def [^\n]*:$", re.MULTILINE)


@dataclass(frozen=True)
class Loops:
    """Distinct-bigram ratios, 0 .. 1: of the model's greedy text and of the files' own; how many were measured."""

    greedy: float
    real: float
    num_measured: int
    num_too_short: int


def held_out_windows(path: Path, tokenizer: Tokenizer, length: int) -> dict[str, np.ndarray]:
    """Group -> non-overlapping windows [windows, length + 1] int64 of the documents in a corpus file."""
    groups = sorted({source_group(source) for source, _ in read_documents(path)})
    windows = {}
    for group in groups:
        only = {other: int(other == group) for other in groups}
        stream = pack_documents(path, tokenizer, only)
        count = (len(stream) - 1) // length
        if count:
            starts = np.arange(count)[:, None] * length + np.arange(length + 1)[None, :]
            windows[group] = stream[starts].astype(np.int64)
    return windows


@torch.no_grad()
def held_out_loss(model: LeanLlama, windows: np.ndarray, max_windows: int | None = None, batch: int = 4) -> float:
    """Mean next-token loss in nats per token over windows [windows, length + 1], or over max_windows evenly spread."""
    if max_windows is not None and len(windows) > max_windows:
        windows = windows[np.linspace(0, len(windows) - 1, max_windows).astype(int)]
    device = model.weights["model.norm.weight"].device
    pieces = torch.from_numpy(windows).split(batch)
    total = sum(float(model.loss(piece.to(device))) * len(piece) for piece in pieces)
    return total / len(windows)


def cut_prompts(
    path: Path, tokenizer: Tokenizer, group: str, num_prompts: int = NUM_PROMPTS
) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spread (prompts [n, PROMPT_TOKENS], the files' own continuations [n, CONTINUATION_TOKENS])."""
    candidates: list[tuple[list[int], list[int]]] = []
    for source, text in read_documents(path):
        if source_group(source) != group:
            continue
        for match in _DEF_LINE.finditer(text):
            before = tokenizer.encode(text[max(0, match.end() - 2000) : match.end()], add_special_tokens=False).ids
            after = tokenizer.encode(text[match.end() : match.end() + 2000], add_special_tokens=False).ids
            if len(before) > PROMPT_TOKENS and len(after) > CONTINUATION_TOKENS:
                candidates.append((before[-PROMPT_TOKENS:], after[:CONTINUATION_TOKENS]))
    return _spread(candidates, num_prompts)


def cut_chats(path: Path, tokenizer: Tokenizer, num_prompts: int = NUM_PROMPTS) -> tuple[np.ndarray, np.ndarray]:
    """Like cut_prompts, for chats: prompts are padded with PAD on the left, shorter answers with EOS on the right."""
    candidates: list[tuple[list[int], list[int]]] = []
    for _, text in read_documents(path):
        for match in ANSWER_BEGINS.finditer(text):
            before = [BOS_ID, *tokenizer.encode(text[: match.end()], add_special_tokens=False).ids][-PROMPT_TOKENS:]
            after = until_eos(tokenizer.encode(text[match.end() :], add_special_tokens=False).ids)[:CONTINUATION_TOKENS]
            if len(after) >= 2:
                padded = [PAD_ID] * (PROMPT_TOKENS - len(before)) + before
                candidates.append((padded, after + [EOS_ID] * (CONTINUATION_TOKENS - len(after))))
    return _spread(candidates, num_prompts)


def _spread(candidates: Sequence[tuple[list[int], list[int]]], count: int) -> tuple[np.ndarray, np.ndarray]:
    if not candidates:
        return np.zeros((0, PROMPT_TOKENS), np.int64), np.zeros((0, CONTINUATION_TOKENS), np.int64)
    picked = np.linspace(0, len(candidates) - 1, min(count, len(candidates))).astype(int)
    return np.array([candidates[i][0] for i in picked]), np.array([candidates[i][1] for i in picked])


def distinct_bigram_ratio(tokens: Sequence[int]) -> float:
    """Distinct bigrams / all bigrams of a token sequence of at least two."""
    bigrams = list(pairwise(tokens))
    return len(set(bigrams)) / len(bigrams)


def until_eos(tokens: Sequence[int]) -> list[int]:
    """The tokens before the first EOS."""
    ids = list(tokens)
    return ids[: ids.index(EOS_ID)] if EOS_ID in ids else ids


def greedy_continuations(folder: Path, prompts: np.ndarray, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Greedy continuations [n, num_tokens] of prompts [n, time] by the saved model, as transformers generates them.

    PAD on the left of a prompt is masked.
    """
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).eval()
    tokens = torch.from_numpy(prompts)
    out: Tensor = model.generate(
        input_ids=tokens,
        attention_mask=(tokens != PAD_ID).long(),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=PAD_ID,
    )
    return out[:, prompts.shape[1] :]


def measure_loops(folder: Path, prompts: np.ndarray, references: np.ndarray, dtype: torch.dtype) -> Loops:
    """Distinct-bigram ratios of the saved model's greedy text and of the references."""
    continuations = [
        until_eos(row) for row in greedy_continuations(folder, prompts, references.shape[1], dtype).tolist()
    ]
    measured = [row for row in continuations if len(row) >= 2]
    greedy = [distinct_bigram_ratio(row) for row in measured]
    real = [distinct_bigram_ratio(until_eos(row)) for row in references.tolist()]
    return Loops(
        greedy=float(np.mean(greedy)) if greedy else 0.0,
        real=float(np.mean(real)) if real else 0.0,
        num_measured=len(measured),
        num_too_short=len(continuations) - len(measured),
    )


def measure_quality(
    folder: Path, plan: TrainingPlan, held_out: Path, tokenizer: Tokenizer, chats: bool = False
) -> JsonObject:
    """Facts of the stored weights for the model card: held_out_loss by group, loops, characters_per_token.

    Prompts come from the first group in alphabetical order ("stdlib" before "stdlib-tests"), or from all chats.
    """
    dtype = getattr(torch, plan.dtype)
    windows = held_out_windows(held_out, tokenizer, plan.shape.max_positions)
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    model = LeanLlama(plan.shape, weights, dtype)
    prompts, references = cut_chats(held_out, tokenizer) if chats else cut_prompts(held_out, tokenizer, min(windows))
    loops = measure_loops(folder, prompts, references, dtype) if len(prompts) else Loops(0.0, 0.0, 0, 0)
    texts = [text for _, text in read_documents(held_out)]
    num_tokens = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))
    return {
        "held_out_loss": {group: held_out_loss(model, rows) for group, rows in windows.items()},
        "loops": {**asdict(loops), "prompt_tokens": PROMPT_TOKENS, "continuation_tokens": CONTINUATION_TOKENS},
        "characters_per_token": sum(len(text) for text in texts) / max(1, num_tokens),
    }
