"""A million chats collected, cleaned, deduplicated, decontaminated and mixed: how fast, in how much memory, how well?

Made-up rows with known faults (synthetic_chats.py) in four files; the three steps as a pipeline runs them, their shards
by worker processes. Each size in a process of its own. Printed and recorded: rows a second of every step, peak memory
of the process tree (proportional set size: what is shared counts once), which of the planted duplicates and benchmark
prompts went, and how time grows. Ends with exit code 1 when memory passes 4 GB, when a row is unaccounted for, or when
the last size takes more than 1.2 times its share of the time of the one before.

    python -m benchmarks.datasets_at_scale [--sizes 100000 1000000] [--workers 2] [--scratch DIR] [--no-record]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import ROOT, write_record
from benchmarks.synthetic_chats import SOURCES, SyntheticChats, numbers_of
from components.contract import Chats, Context, Mapper, Prompts

MAX_GIB, MAX_GROWTH = 4.0, 1.2
SAMPLED_EVERY_S = 0.5


def main() -> int:
    """Measure, print, write the record; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[100_000, 1_000_000], help="rows, ascending")
    parser.add_argument("--workers", type=int, default=2, help="processes that work on shards")
    parser.add_argument("--scratch", type=Path, help="where the rows are made (3 GB for a million); default: temporary")
    parser.add_argument("--no-record", action="store_true", help="write no file under benchmarks/results")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # one size in this process, its numbers to a file
    asked = parser.parse_args()
    if asked.one is not None:
        numbers = measure(asked.scratch, asked.sizes[0], asked.workers)
        asked.one.write_text(json.dumps(numbers), encoding="utf-8")
        return 0
    sizes = {}
    for size in asked.sizes:
        sizes[str(size)] = in_own_process(size, asked.workers, asked.scratch)
        show(size, sizes[str(size)])
    growth = growth_of([(size, sizes[str(size)]["seconds"]) for size in asked.sizes])
    for step, factor in growth.items():
        print(f"{step}: {factor:.3f} x linear from {asked.sizes[-2]} to {asked.sizes[-1]} rows")
    if not asked.no_record:
        record = {"workers": asked.workers, "limit_gib": MAX_GIB, "limit_growth": MAX_GROWTH, "growth": growth}
        print(f"written: {write_record('datasets_at_scale', {**record, 'sizes': sizes}).relative_to(ROOT)}")
    fine = all(one["peak_gib"] < MAX_GIB and one["accounted_for"] for one in sizes.values())
    return 0 if fine and growth.get("all", 0.0) <= MAX_GROWTH else 1


def in_own_process(size: int, workers: int, scratch: Path | None) -> dict[str, Any]:
    """The numbers of one size, measured in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-datasets-", dir=scratch) as folder:
        result = Path(folder) / "numbers.json"
        command = [sys.executable, "-m", "benchmarks.datasets_at_scale", "--one", str(result), "--scratch", folder]
        subprocess.run([*command, "--sizes", str(size), "--workers", str(workers)], cwd=ROOT, check=True)
        return dict(json.loads(result.read_text(encoding="utf-8")))


def measure(folder: Path, num_rows: int, workers: int) -> dict[str, Any]:
    """Make the rows, run the steps, hold what came out against what was planted."""
    from components.data import collect_chats, deduplicate, mix_chats
    from components.data.settings import ChatSource

    made = SyntheticChats()
    started = time.perf_counter()
    files = in_workers(workers, partial(write_source, folder, num_rows), range(len(SOURCES)))
    (folder / "benchmark").mkdir()
    made.write_benchmark(folder / "benchmark" / "prompts.jsonl")
    print(f"{num_rows} rows made in {time.perf_counter() - started:.0f} s", flush=True)
    sources = [ChatSource(path=str(file)) for file in files]
    benchmark = Prompts("benchmark", folder / "benchmark")
    clock = Clock()
    with pool(workers) as mapper, memory_watched() as peak:
        given = {name: context(folder, name, mapper) for name in ("collect", "deduplicate", "mix")}
        collected: Chats = clock.timed("collect", lambda: collect_chats(sources=sources, ctx=given["collect"]))
        deduplicated: Chats = clock.timed(
            "deduplicate", lambda: deduplicate([collected], [benchmark], ctx=given["deduplicate"])
        )
        mixed: Prompts = clock.timed("mix", lambda: mix_chats([deduplicated], ctx=given["mix"]))
    seconds = {**clock.seconds, "all": sum(clock.seconds.values())}
    counts = {"collect": dict(collected.info), "deduplicate": dict(deduplicated.info), "mix": dict(mixed.info)}
    return {
        "rows": num_rows,
        "bytes": sum(file.stat().st_size for file in files),
        "seconds": {step: round(value, 2) for step, value in seconds.items()},
        "cpu_seconds": {step: round(value, 2) for step, value in clock.cpu_seconds.items()},
        "rows_per_s": {step: round(num_rows / value) for step, value in seconds.items()},
        "peak_gib": round(max(peak) / 2**30, 3),
        "accounted_for": accounted_for(counts, num_rows),
        "dropped": {step: info.get("dropped", {}) for step, info in counts.items()},
        "planted": held_against(made, num_rows, collected, deduplicated),
    }


def write_source(folder: Path, num_rows: int, number: int) -> Path:
    """Make the rows of one source."""
    return SyntheticChats().write(folder, num_rows, number)


class Clock:
    """Wall clock and CPU seconds of steps, the CPU that of the whole tree: it tells a busy machine from much work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.cpu_seconds: dict[str, float] = {}

    def timed(self, step: str, run: Callable[[], Any]) -> Any:
        """What the step returns."""
        started, cpu = time.perf_counter(), tree_cpu_seconds()
        result = run()
        self.seconds[step] = time.perf_counter() - started
        self.cpu_seconds[step] = tree_cpu_seconds() - cpu
        print(f"  {step}: {self.seconds[step]:.1f} s, {self.cpu_seconds[step]:.1f} s of CPU", flush=True)
        return result


def context(folder: Path, name: str, mapper: Mapper) -> Context:
    """What the engine would give a step."""
    for place in (folder / name, folder / f"{name}-scratch"):
        place.mkdir()
    return Context(name, folder / name, folder / f"{name}-scratch", mapper=mapper)


def in_workers(workers: int, function: Callable[[int], Path], numbers: Sequence[int]) -> list[Path]:
    """function(number) for each, in processes."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        return list(executor.map(function, numbers))


@contextmanager
def pool(workers: int) -> Iterator[Mapper]:
    """A mapper over processes of this machine, as a cluster would be."""
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as executor:
        yield lambda function, shards: executor.map(partial(run_shard, function), shards)


def run_shard(function: Callable[[Any, Callable[[float], None]], Any], shard: Any) -> Any:
    """One shard in a worker; nobody watches its progress."""
    return function(shard, lambda share: None)


@contextmanager
def memory_watched() -> Iterator[list[int]]:
    """The memory of this process and all below it, bytes, sampled while the block runs."""
    samples, over = [0], threading.Event()

    def watch() -> None:
        while not over.wait(SAMPLED_EVERY_S):
            samples.append(tree_bytes())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def tree_bytes() -> int:
    """Proportional set size of this process and those below it."""
    return sum(of_tree(lambda process: process.memory_full_info().pss))


def tree_cpu_seconds() -> float:
    """CPU that this process and those below it have used; workers live as long as they are measured."""
    return sum(of_tree(lambda process: sum(process.cpu_times()[:2])))


def of_tree(asked: Callable[[psutil.Process], Any]) -> Iterator[Any]:
    """What is asked of this process and of all below it."""
    own = psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            yield asked(process)
        except psutil.NoSuchProcess:  # it has just ended
            continue


def growth_of(sizes: Sequence[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Of every step: the time of the last size as a multiple of its share of the time of the one before."""
    if len(sizes) < 2:
        return {}
    (few, before), (many, after) = sizes[-2:]
    return {step: round(after[step] / before[step] * few / many, 3) for step in after}


def show(size: int, numbers: dict[str, Any]) -> None:
    """The numbers of one size in three lines."""
    rates = ", ".join(f"{step} {rate}" for step, rate in numbers["rows_per_s"].items())
    print(f"{size} rows in {numbers['seconds']['all']:.0f} s, rows a second: {rates}")
    print(f"  peak {numbers['peak_gib']:.2f} GiB; every row accounted for: {numbers['accounted_for']}")
    print("  " + ", ".join(f"{name} {value}" for name, value in numbers["planted"].items()))


def accounted_for(counts: dict[str, dict[str, Any]], num_rows: int) -> bool:
    """Whether every row of the files is in the result of a step or among what it dropped."""
    first, second = counts["collect"], counts["deduplicate"]
    left = num_rows - sum(first["dropped"].values())
    return bool(second["num_read"] == left and second["num_rows"] == left - sum(second["dropped"].values()))


def held_against(made: SyntheticChats, num_rows: int, collected: Chats, deduplicated: Chats) -> dict[str, float]:
    """How much of what was planted went, and how much of what went was planted.

    Of a plain row and its copies one is to stay. A row that went as a duplicate was rightly removed where it is a copy
    or has one; as contaminated, where a prompt was planted in it.
    """
    from components.data.formats.chats import iter_batches

    read = set(numbers_of(places(iter_batches(collected, ("source", "where")))))
    kept = set(numbers_of(places(iter_batches(deduplicated, ("source", "where")))))
    rows = [row for row in map(made.made, range(num_rows)) if row.number in read]
    groups: dict[str, dict[int, list[int]]] = {"copy": {}, "near_copy": {}}
    for row in rows:
        for kind, found in groups.items():
            if row.kind in ("copy", kind):  # a near copy of a row that was copied too: all are one group
                found.setdefault(row.of, [row.of] if row.of in read else []).append(row.number)
    planted = [row.number for row in rows if row.kind == "contaminated"]
    reasons = list(dropped_rows(deduplicated))
    gone = Counter(reason for reason, _ in reasons)
    duplicate = {number for found in groups.values() for group in found.values() for number in group}
    right = sum(number in duplicate for reason, number in reasons if reason != "contaminated")
    return {
        "planted_exact": sum(row.kind == "copy" for row in rows),
        "planted_near": sum(row.kind == "near_copy" for row in rows),
        "planted_contaminated": len(planted),
        "recall_exact": recall(groups["copy"], kept),
        "recall_all_duplicates": recall(groups["near_copy"], kept),
        "groups_without_a_row_left": sum(not kept.intersection(group) for group in groups["near_copy"].values()),
        "precision_duplicates": round(right / max(gone["exact_duplicate"] + gone["near_duplicate"], 1), 5),
        "recall_contaminated": round(sum(number not in kept for number in planted) / max(len(planted), 1), 5),
        "precision_contaminated": round(
            sum(number in set(planted) for reason, number in reasons if reason == "contaminated")
            / max(gone["contaminated"], 1),
            5,
        ),
    }


def recall(groups: dict[int, list[int]], kept: set[int]) -> float:
    """Of the rows that are one too many in their group, the share that went."""
    too_many = sum(len(group) - 1 for group in groups.values())
    left = sum(max(sum(number in kept for number in group) - 1, 0) for group in groups.values())
    return round(1.0 - left / max(too_many, 1), 5)


def dropped_rows(chats: Chats) -> Iterator[tuple[str, int]]:
    """(reason, number) of every row that deduplication dropped."""
    from pyarrow import parquet

    rows = parquet.read_table(chats.path / "dropped.parquet", columns=["reason", "source", "where"])
    yield from zip(rows.column("reason").to_pylist(), numbers_of(places([rows])), strict=True)


def places(batches: Any) -> Iterator[tuple[str, str]]:
    """(source, where) of every row."""
    for batch in batches:
        yield from zip(batch.column("source").to_pylist(), batch.column("where").to_pylist(), strict=True)


if __name__ == "__main__":
    sys.exit(main())
