"""How fast do answers come? Ours (continuous batching) against transformers' `generate`: same batch, target and rows.

Ragged lengths: prompts of 16 to 192 tokens, answers whose lengths are spread like those of chats (log-normal, 8 to 256
tokens), greedy, no early end, so that both sides make exactly the same number of tokens for every row; this is checked.
`generate` gets the rows as it likes them best, sorted by prompt length, left-padded, in batches of the same size, each
row stopped at its own length (a batch goes on until its longest has ended). Both run in one process on the same threads
with the target opened once each, taking turns in random order; a round is all rows, tokens/s its useful tokens over
wall clock. Medians and the ratio of the medians, for bfloat16 and float32, for the built-in target and a random one of
medium size. Ends with exit code 1 when a bfloat16 ratio is below 1.5.

    python -m benchmarks.answering_speed [--rounds 3] [--rows 96] [--batch 32] [--threads 2] [--sizes built-in medium]
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import ROOT, write_record
from components.contract import Context
from components.targets import load_target
from components.targets.generate import ContinuationRequest, continue_rows
from components.targets.interface import AbstractTarget
from components.targets.load import open_target

LEAST_RATIO = 1.5
SHORTEST_ANSWER, LONGEST_ANSWER = 8, 256
SHORTEST_PROMPT, LONGEST_PROMPT = 16, 192


def main() -> None:
    """Time it, print, write the record."""
    parser = argparse.ArgumentParser(description="answering speed against transformers' generate")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side answers all rows")
    parser.add_argument("--rows", type=int, default=96, help="prompts")
    parser.add_argument("--batch", type=int, default=32, help="prompts answered together")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--sizes", nargs="+", default=["built-in", "medium"], choices=["built-in", "medium", "small"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    found: dict[str, Any] = {}
    for size in asked.sizes:
        with tempfile.TemporaryDirectory() as folder:
            model = "builtin" if size == "built-in" else str(random_model(Path(folder) / "model", size))
            out = Path(folder) / "artifact"
            out.mkdir()
            target = load_target(model=model, ctx=Context(key="", out=out, scratch=out, num_threads=asked.threads))
            for dtype in asked.dtypes:
                found[f"{size} {dtype}"] = compare(target.path, size, dtype, asked)
    numbers = {"rounds": asked.rounds, "rows": asked.rows, "batch": asked.batch, "threads": asked.threads}
    slow = [name for name, one in found.items() if "bfloat16" in name and one["ratio"] < LEAST_RATIO]
    record = write_record("answering-speed", {**numbers, "least_ratio": LEAST_RATIO, "found": found, "slow": slow})
    print(f"written: {record.relative_to(ROOT)}")
    if slow:
        raise SystemExit(f"below {LEAST_RATIO} x: {', '.join(slow)}")


def compare(folder: Path, size: str, dtype: Any, asked: argparse.Namespace) -> dict[str, Any]:
    """Both sides over the same rows, by turns."""
    ours = open_target(folder, dtype=dtype, kernel="plain")  # as data.write_answers opens it
    reference = open_target(folder, dtype=dtype, kernel="transformers")
    model: Any = reference.model  # type: ignore[attr-defined]
    model.generation_config.eos_token_id = None  # every row runs to its own length
    prompts, limits = ragged_rows(asked.rows, ours.shape.vocab_size)
    sides: dict[str, Callable[[], list[int]]] = {
        "ours": lambda: answer_ours(ours, prompts, limits, asked.batch),
        "generate": lambda: answer_with_generate(model, prompts, limits, asked.batch),
    }
    for side in sides.values():  # once untimed: kernels are compiled for every new shape
        assert side() == limits, "both sides make exactly the tokens that were asked for"
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    order = random.Random(0)
    for _ in range(asked.rounds):
        for name in order.sample(list(sides), len(sides)):
            begun = time.perf_counter()
            made = sides[name]()
            seconds[name].append(time.perf_counter() - begun)
            assert made == limits
    rates = {name: sum(limits) / statistics.median(times) for name, times in seconds.items()}
    ratio = rates["ours"] / rates["generate"]
    shown = ", ".join(f"{name} {rate:,.0f} tokens/s" for name, rate in rates.items())
    print(f"{size:9} {dtype:9} {shown}: {ratio:.2f} x", flush=True)
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "tokens": sum(limits),
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "seconds": {name: [round(one, 3) for one in times] for name, times in seconds.items()},
        "ratio": round(ratio, 3),
    }


def ragged_rows(count: int, vocab_size: int) -> tuple[list[list[int]], list[int]]:
    """Prompts of random tokens, sorted by length as the step sorts them, and how many tokens each answer has."""
    draw = random.Random(1)
    lengths = sorted(draw.randint(SHORTEST_PROMPT, LONGEST_PROMPT) for _ in range(count))
    prompts = [[draw.randrange(vocab_size) for _ in range(length)] for length in lengths]
    limits = [int(min(LONGEST_ANSWER, max(SHORTEST_ANSWER, draw.lognormvariate(4.2, 0.8)))) for _ in range(count)]
    return prompts, limits


def answer_ours(target: AbstractTarget, prompts: Sequence[list[int]], limits: Sequence[int], batch: int) -> list[int]:
    """Tokens made for every row, by continuous batching."""
    asks = [ContinuationRequest(prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    return [len(one.ids) for one in continue_rows(target, asks, batch_size=batch, stop_at_eos=False)]


def answer_with_generate(model: Any, prompts: Sequence[list[int]], limits: Sequence[int], batch: int) -> list[int]:
    """Tokens made for every row, by `generate` in left-padded batches; each row is stopped at its own length."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class AtLimit(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, width: int, most: Tensor) -> None:
            self.width, self.most = width, most

        def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
            return self.most <= input_ids.shape[1] - self.width

    made: list[int] = []
    for start in range(0, len(prompts), batch):
        rows, most = prompts[start : start + batch], torch.tensor(limits[start : start + batch])
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, prompt in enumerate(rows):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=int(most.max()),
                pad_token_id=0,
                stopping_criteria=StoppingCriteriaList([AtLimit(width, most)]),
            )
        assert out.shape[1] - width == int(most.max()), "a batch runs until its longest row has ended"
        made += most.tolist()
    return made


def random_model(folder: Path, size: str) -> Path:
    """A Llama with random weights and the tests' tokenizer: medium 12 layers of 768, small 8 of 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_targets import make_tiny_tokenizer

    layers, hidden, vocabulary = (12, 768, 32_000) if size == "medium" else (8, 128, 512)
    folder.mkdir()
    make_tiny_tokenizer(folder)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 192),
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
