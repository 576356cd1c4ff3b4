"""The feature store at some size: how fast a random row comes, in how much memory, and what on-the-fly costs instead.

Three questions, on the built-in target's own shape:
  random access  rows of a store of `--megabytes` read in random order by a fresh process: rows/s, and by how much its
                 private memory (RssAnon) and its mapped pages (RssFile, which the kernel takes back when it needs them)
                 grew, against what was read;
  estimate       the seconds that `record_features` says beforehand against those that it then took;
  on the fly     seconds of an epoch's features read from the store (bf16, fp8) against computed while training.

    python -m benchmarks.feature_store [--megabytes 512] [--reads 2000] [--prompts 512]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.record import ROOT, write_record
from components.contract import Context, Conversations, Features, Target
from components.data import collect_prompts, features_on_the_fly, record_features, write_answers
from components.data.features.format import FeatureSource, open_features
from components.data.features.record import FeatureShard, estimated_seconds
from components.data.formats.responses import open_answers
from components.drafts.training.batches import BatchOrder
from components.targets import load_target
from components.targets.load import open_target, target_facts, threads_for

HIDDEN, ROW_TOKENS, ROWS_IN_SHARD = 192, 256, 64

READER = """
import json, sys, time
from pathlib import Path
import torch
from components.contract import Features
from components.data.features.format import open_features

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Rss")}

folder, reads = Path(sys.argv[1]), int(sys.argv[2])
source = open_features(Features(key="", path=folder))
rows = source.rows("train")
source.load(rows[0]).taps.float().sum()
before, begun = resident(), time.perf_counter()
places = torch.randint(len(rows), (reads,), generator=torch.Generator().manual_seed(0)).tolist()
for place in places:
    example = source.load(rows[place])
    example.taps.float().sum(), example.last.float().sum()
seconds, after = time.perf_counter() - begun, resident()
bytes_of = sum(part.numel() * part.element_size() for part in example[4:])
print(json.dumps({
    "rows_per_second": reads / seconds,
    "read_mib": reads * bytes_of / 2**20,
    "different_rows_mib": len(set(places)) * bytes_of / 2**20,
    "private_growth_mib": (after["RssAnon"] - before["RssAnon"]) / 1024,
    "mapped_growth_mib": (after["RssFile"] - before["RssFile"]) / 1024,
}))
"""


def write_store(folder: Path, megabytes: int) -> None:
    """A bf16 store of that size, its numbers random."""
    row_bytes = ROW_TOKENS * (8 * HIDDEN + 5)
    num_shards = max(1, megabytes * 2**20 // (row_bytes * ROWS_IN_SHARD))
    total = ROWS_IN_SHARD * ROW_TOKENS
    tensors = {
        "ids": torch.zeros(total, dtype=torch.int32),
        "mask": torch.ones(total, dtype=torch.bool),
        "taps": torch.randn(total, 3 * HIDDEN).bfloat16(),
        "last": torch.randn(total, HIDDEN).bfloat16(),
        "offsets": torch.arange(ROWS_IN_SHARD + 1) * ROW_TOKENS,
    }
    rows = []
    for shard in range(num_shards):
        name = f"shard-{shard:05d}.safetensors"
        save_file(tensors, folder / name)
        for index in range(ROWS_IN_SHARD):
            row = {"row_id": f"{shard}-{index}", "workload": "w", "split": "train", "shard": name, "index": index}
            rows.append({**row, "num_tokens": ROW_TOKENS, "num_answer_tokens": ROW_TOKENS})
    manifest = {"target_key": "", "vocab_size": 4096, "rows": rows, "shards": []}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def random_access(megabytes: int, reads: int) -> dict[str, Any]:
    """What a fresh process needs for random rows of a store."""
    with tempfile.TemporaryDirectory() as root:
        write_store(Path(root), megabytes)
        command = [sys.executable, "-c", READER, root, str(reads)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return {"store_mib": megabytes, "reads": reads, **found}


def context(folder: Path, send: Callable[[Mapping[str, Any]], None] | None = None) -> Context:
    """A context with a directory of its own."""
    folder.mkdir(parents=True)
    return Context(key="", out=folder, scratch=folder, num_threads=os.cpu_count() or 1, send=send)


def recorded(target: Target, answers: Conversations, folder: Path) -> tuple[dict[str, Features], Mapping[str, float]]:
    """The features in every form, and the seconds that were said and taken for bf16."""
    begun = 0.0

    def from_the_last_note(event: Mapping[str, Any]) -> None:
        """The estimate is the last that is noted before recording begins, and its probe is no part of recording."""
        nonlocal begun
        if event["event"] == "note":
            begun = time.perf_counter()

    ctx = context(folder / "bf16", from_the_last_note)
    shards = [answers.path / name for name in open_answers(answers).shards]
    num_threads = threads_for(target_facts(target)["num_params"], ctx.num_threads)
    said = estimated_seconds(
        ctx, FeatureShard(ctx.out, shards[0], target.path, 2048, "bf16", "cpu", num_threads), shards
    )
    if said is None:
        raise SystemExit("--prompts: so few are recorded at once, and nothing is estimated; give more")
    forms = {"bf16": record_features(target, answers, ctx=ctx)}
    taken = time.perf_counter() - begun
    forms["fp8"] = record_features(target, answers, storage="fp8", ctx=context(folder / "fp8"))
    forms["on the fly"] = features_on_the_fly(target, answers, ctx=context(folder / "live"))
    return forms, {"said_seconds": said, "taken_seconds": taken, "said_by_taken": said / taken}


def epoch(source: FeatureSource) -> dict[str, float]:
    """Loading an epoch's batches, without training on them."""
    order = BatchOrder(tuple(source.rows("train")), 1024, 2048, seed=0)
    batches, tokens, begun = order.epoch(0), 0, time.perf_counter()
    for rows in batches:
        tokens += int(order.batch(source, rows).to(torch.device("cpu")).lengths.sum())
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens_per_second": tokens / seconds}


def main() -> None:
    """Answer the three questions, print them, write the record."""
    parser = argparse.ArgumentParser(description="the feature store: random access, estimate, on the fly")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--reads", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=512)
    asked = parser.parse_args()
    access = random_access(asked.megabytes, asked.reads)
    print(
        f"random access: {access['rows_per_second']:.0f} rows/s; {access['different_rows_mib']:.0f} MiB of rows "
        f"of {asked.megabytes} MiB read, private memory +{access['private_growth_mib']:.1f} MiB, "
        f"mapped +{access['mapped_growth_mib']:.0f} MiB"
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        target = load_target(ctx=context(folder / "target"))
        prompts = collect_prompts(
            num_train=asked.prompts, num_validation=8, num_test=4, ctx=context(folder / "prompts")
        )
        answers = write_answers(target, prompts, ctx=context(folder / "answers"))
        forms, times = recorded(target, answers, folder)
        print(f"estimate: {times['said_seconds']:.1f} s said, {times['taken_seconds']:.1f} s taken")
        model = open_target(target, kernel="plain")
        epochs = {name: epoch(open_features(features).computed_by(model)) for name, features in forms.items()}
        sizes = {name: features.info["bytes"] for name, features in forms.items()}
    for name, found in epochs.items():
        print(f"{name:10} {sizes[name] / 2**20:7.1f} MiB, an epoch's features in {found['seconds']:.2f} s")
    results = {"random_access": access, "estimate": times, "epoch": epochs, "bytes": sizes}
    file = write_record("feature-store", {"prompts": asked.prompts, **results, "load_average": os.getloadavg()[0]})
    print(f"written: {file.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
