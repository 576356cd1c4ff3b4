"""Our own forward pass beside transformers': `python -m benchmarks.own_pass [FAMILY ...]`.

A random model of each family (width 512, 8 layers, a vocabulary of 4,096) is opened twice, and both run the same
verification passes in turns: 1, 4 and 8 rows of one text that is 256 and 2,048 tokens long, in float32 and bfloat16. As
in decoding, one row is kept of each pass and the others are dropped. Every pair gives a ratio of seconds, transformers'
to ours; the record holds medians and quartiles. One thread runs, as for every model of this size.

    python -m benchmarks.own_pass [FAMILY ...] [--turns 25] [--dry-run]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.record import write_record
from components.targets.interface import AbstractCache, AbstractTarget
from components.targets.load import open_target

LAYERS, WINDOW = 8, 512
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
MIXED: dict[str, Any] = {
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(LAYERS)],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": MIXED,
    "phi3": {"sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {**MIXED, "query_pre_attn_scalar": 64},
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 64},
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256},
    "gpt_oss": {**MIXED, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768},
}
"""Model type -> settings beside the common ones; a window is a quarter of the longer text."""
CONTEXTS, ROWS, WARM_UP = (256, 2048), (1, 4, 8), 3
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16")


def make_model(family: str, folder: Path) -> Path:
    """Write a random model of this family into `folder`, which is returned."""
    settings = {**COMMON, **FAMILIES[family]}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings)).save_pretrained(folder)
    Tokenizer(WordLevel({"word": 0}, unk_token="word")).save(str(folder / "tokenizer.json"))  # a target has one
    return folder


def seconds_of_pass(target: AbstractTarget, cache: AbstractCache, ids: torch.Tensor) -> float:
    """One verification of which one row is kept."""
    length = cache.lengths.clone()
    start = time.perf_counter()
    target.forward(ids, cache, features=True)
    cache.truncate(length + 1)
    return time.perf_counter() - start


def compare(targets: list[AbstractTarget], context: int, rows: int, turns: int) -> dict[str, Any]:
    """Ours and transformers' in turns: tokens per second of each, and the ratio of seconds."""
    prompt = torch.randint(0, COMMON["vocab_size"], (1, context), generator=torch.Generator().manual_seed(1))
    caches = [target.new_cache(1, context + turns + WARM_UP + rows) for target in targets]
    for target, cache in zip(targets, caches, strict=True):
        target.forward(prompt, cache, logits="none")
    pairs: list[list[float]] = []
    for turn in range(turns + WARM_UP):
        spent = [0.0, 0.0]
        for place in (0, 1) if turn % 2 else (1, 0):
            spent[place] = seconds_of_pass(targets[place], caches[place], prompt[:, :rows])
        if turn >= WARM_UP:
            pairs.append(spent)
    ratios = [theirs / ours for ours, theirs in pairs]
    low, median, high = statistics.quantiles(ratios, n=4)
    return {
        "ours_tokens_per_s": rows / statistics.median(ours for ours, _ in pairs),
        "transformers_tokens_per_s": rows / statistics.median(theirs for _, theirs in pairs),
        "ratio": median,
        "quartiles": [low, high],
    }


def measure(family: str, dtype: Dtype, turns: int) -> list[dict[str, Any]]:
    """All contexts and numbers of rows."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(family, Path(folder))
        targets = [open_target(model, dtype=dtype, kernel=kernel) for kernel in ("auto", "transformers")]
    assert targets[0].kernel != "transformers", f"{family} has no pass of our own"
    cells = [(context, rows) for context in CONTEXTS for rows in ROWS]
    return [{"context": c, "rows": r, **compare(targets, c, r, turns)} for c, r in cells]


def main() -> None:
    """Measure the families, print a line for each and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--dry-run", action="store_true", help="a few turns, no record")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for family in arguments.families:
        found[family] = {d: measure(family, d, 4 if arguments.dry_run else arguments.turns) for d in DTYPES}
        for dtype, cells in found[family].items():
            print(family, dtype, *(f"{cell['ratio']:.2f}" for cell in cells), flush=True)
    if not arguments.dry_run:
        print(write_record("own-pass", {"turns": arguments.turns, "families": found}))


if __name__ == "__main__":
    main()
