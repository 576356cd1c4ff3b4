"""What the parts of a round cost on a GPU: batch 1 to 32, contexts 1k to 32k, bfloat16, recorded passes, CUDA events.

Needs no run and no download: target and drafter are made here with random weights of a usual shape, since a pass costs
the same whatever its weights say (acceptance does not, so nothing is said of it). Each cell is timed by
bench.measure_step_cost as it is anywhere else, with and without CUDA graphs; the clock, temperature and limits of the
GPU stand in the record. Cells whose caches do not fit the memory are named. `--device cpu --shape tiny` tries the
program where there is no GPU, and leaves no record.

    python -m benchmarks.gpu_sweep [--shape 1b] [--batch-sizes 1 2 4 8 16 32] [--kv-lengths 1024 4096 16384 32768]
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.record import ROOT, write_record
from components.bench import measure_step_cost
from components.contract import Context, Draft, Machine, Target, UserError
from components.data import collect_prompts
from components.drafts.storage.files import build_draft, save_draft
from components.machine import describe_machine
from components.rows import CostCell, read_rows
from components.targets.load import open_target

BUILTIN = ROOT / "components" / "targets" / "builtin"
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
"""Llama 3.2 1B and 3.1 8B but for the vocabulary, which is the built-in target's; "tiny" is for trying this program."""
NUM_KV_HEADS = {"tiny": 2, "1b": 8, "8b": 8}
POSITIONS = 40_960


def make_target(folder: Path, shape: str) -> Target:
    """A Llama with random weights in bfloat16 and the built-in target's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN / name, folder)
    known = json.loads((BUILTIN / "config.json").read_text(encoding="utf-8"))
    ends = {name: known[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "vocab_size")}
    sizes = {**SHAPES[shape], "num_key_value_heads": NUM_KV_HEADS[shape], "max_position_embeddings": POSITIONS}
    config = LlamaConfig(**sizes, **ends, tie_word_embeddings=False, dtype="bfloat16")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return Target(key="0" * 64, path=folder)


def make_draft(folder: Path, target: Target, device: str) -> Draft:
    """An untrained EAGLE-3 drafter of the target's width over half of its vocabulary."""
    opened = open_target(target, device=device, dtype="bfloat16")
    ids = torch.arange(0, opened.shape.vocab_size, 2, device=device)
    settings = {"ttt_steps": 7}
    drafter = build_draft("eagle3", opened, settings, ids)
    depths = {"num_steps": drafter.num_steps, "max_depth": drafter.max_depth}
    save_draft(folder, "eagle3", settings, opened, ids, drafter.state_dict(), {**depths, "target_key": target.key})
    del opened, drafter
    if device.startswith("cuda"):
        torch.cuda.empty_cache()  # the processes that measure need the memory
    return Draft(key="1" * 64, path=folder, info=depths)


def sweep(
    root: Path,
    machine: Machine,
    *,
    shape: str,
    device: str,
    dtype: Literal["float32", "bfloat16"],
    batch_sizes: Sequence[int],
    kv_lengths: Sequence[int],
    depths: int,
    seconds: float,
    processes: int,
    tokens: int,
    num_threads: int,
) -> Iterator[dict[str, Any]]:
    """Both ways of launching; one record each when it is done: its facts, and the median of every cell in ms."""
    numbers = itertools.count(2)

    def context() -> Context:
        folder = root / str(next(numbers))
        for part in ("out", "scratch"):
            (folder / part).mkdir(parents=True)
        out, scratch = folder / "out", folder / "scratch"
        return Context(key=folder.name * 16, out=out, scratch=scratch, device=device, num_threads=num_threads)

    for name in ("target", "draft"):
        (root / name).mkdir()
    target = make_target(root / "target", shape)
    draft = make_draft(root / "draft", target, device)
    num_test = max(8, *batch_sizes)
    prompts = collect_prompts(num_train=0, num_validation=0, num_warm_up=0, num_test=num_test, ctx=context())
    for graphs in (False, True):
        started = time.perf_counter()
        made = measure_step_cost(
            target,
            [draft],
            prompts,
            max_depth=depths,
            batch_sizes=list(batch_sizes),
            kv_lengths=list(kv_lengths),
            seconds=seconds,
            num_processes=processes,
            tokens_per_block=tokens,
            dtype=dtype,
            graphs=graphs,
            ctx=context(),
            machine=machine,
        )
        clocks = [c.clock_mhz for c in read_rows(made.path, CostCell) if c.clock_mhz is not None]
        known = ("kernel", "num_processes", "num_blocks", "ended", "precision_reached")
        names = (*known, "timer_overhead_ns", "device_state", "left_out", "medians_ms")
        yield {
            "graphs": graphs,
            "seconds": round(time.perf_counter() - started, 1),
            "clock_mhz_range": [min(clocks), max(clocks)] if clocks else None,
            **{name: made.info[name] for name in names},
        }


def main() -> None:
    """Sweep, print, and, on a GPU, write the record."""
    parser = argparse.ArgumentParser(description="cost cells over batch size and context on a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="1b", choices=sorted(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--kv-lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--depths", type=int, default=5, help="deepest chain to time")
    parser.add_argument("--seconds", type=float, default=600.0, help="time for measuring, each way of launching")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes at least")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each sequence in a cell of a block")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch may use on the host")
    asked = parser.parse_args()
    if asked.device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit("gpu_sweep: no CUDA device that torch can use; --device cpu --shape tiny tries the program")
    numbers: dict[str, Any] = {"shape": asked.shape, "dtype": asked.dtype, "sweeps": []}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for record in sweep(
                Path(folder),
                describe_machine(asked.device),
                shape=asked.shape,
                device=asked.device,
                dtype=asked.dtype,
                batch_sizes=asked.batch_sizes,
                kv_lengths=asked.kv_lengths,
                depths=asked.depths,
                seconds=asked.seconds,
                processes=asked.processes,
                tokens=asked.tokens,
                num_threads=asked.threads,
            ):
                print(f"graphs {record['graphs']}: {record['seconds']} s, left out: {record['left_out'] or 'nothing'}")
                for name, milliseconds in record["medians_ms"].items():
                    print(f"  {name:44} {milliseconds:9.4f} ms", flush=True)
                numbers["sweeps"].append(record)
                if asked.device != "cpu":  # after each: one that is ended costs not the other
                    print(f"written: {write_record('gpu-sweep', numbers, device='cuda').relative_to(ROOT)}", flush=True)
        except UserError as error:
            raise SystemExit(str(error)) from error
    if asked.device == "cpu":
        print("a try on the CPU: no record")


if __name__ == "__main__":
    main()
