"""What does opening a target take, and how quick is it then, beside others? `python -m benchmarks.opening`.

Every case is one model in one dtype. Each opening has a process of its own: `reading` reads the bytes of the files and
opens nothing, `first` times kernels and remembers the times, `again` finds them remembered, `transformers` is
AutoModelForCausalLM. The last two then decode in turns, greedily after 64 tokens, and ours verifies 1 to 8 rows at
once. With --llama-cpp, its own llama-bench does both on the same weights and threads, in the same turns; give it a
build with optimisation, which the one for tests has not. Memory has its turn too: a sum of numbers on the same threads
says what it streams.
With --autotune, `bench.autotune` chooses threads and kernels of a model, and its peak stands beside what it says
before. --release loads a released drafter with MLflow.

Memory is counted from where the process stood with everything imported. `peak` is all that was in memory at once, as
the kernel counts it; `peak_anonymous` (looked at every 5 ms) leaves out pages of files, which it may drop at any time.

    python -m benchmarks.opening [--model NAME=FOLDER ...] [--dtypes float32 bfloat16] [--autotune NAME ...]
        [--release FOLDER] [--random-qwen3 FOLDER] [--llama-cpp PROGRAM SOURCES]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, Literal, TypedDict

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.record import ROOT, write_record
from components.bench.calibration import choose_engine, peak_of_choice
from components.bench.clock import quiet_interpreter
from components.contract import Target
from components.decoding.chain import decode
from components.decoding.session import Session
from components.machine import num_usable_cores
from components.publish.formats.gguf import TYPES, run_converter
from components.targets.forward.compiled import compiled_functions
from components.targets.load import open_target, target_facts, threads_for

Dtype = Literal["float32", "bfloat16"]
BUILTIN: Final = ROOT / "components" / "targets" / "builtin"
CONTEXT, TOKENS, PASSES, MOST_ROWS = list(range(1, 65)), 24, 6, 8
LONG, LONG_ROWS = 2048, (1, 8)
"""Tokens of a longer context, and numbers of rows that are passed after it."""
STREAMED_BYTES: Final = 1 << 29
"""Bytes that are summed to see what memory streams: far more than caches hold."""
READ_BYTES: Final = 16 << 20
"""Bytes of a file that are read at once."""
SETTLE_S: Final = 2.0
"""Before a turn: llama-bench is a new process in each, and what ended before takes the system some time to put away."""
SHAPE: Final[dict[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
"""Of Qwen3-0.6B."""


class Said(TypedDict, total=False):
    """What a measuring process says of its part. rows_ms: milliseconds of a pass over 1, 2, ... rows."""

    seconds: float
    kernel: str
    num_threads: int
    said: int
    tokens_per_s: float
    rows_ms: list[float]


def random_qwen3(folder: Path) -> None:
    """Write a model of Qwen3-0.6B's shape with random weights in bfloat16, 1.2 GB."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in BUILTIN.glob("tokenizer*.json"):  # a target has a tokenizer, and llama.cpp wants one with merges
        shutil.copy(file, folder)


def serve(part: str, folder: Path, dtype: Dtype, num_threads: int) -> None:
    """The measuring process: do the part at the first line of stdin, then decode or verify at each other one."""
    logging.disable_progress_bar()
    torch.set_num_threads(num_threads)
    say: Callable[[object], None] = lambda what: print(json.dumps(what), flush=True)  # noqa: E731
    say("ready")
    tasks: dict[str, Callable[[], Said]] = {}
    for line in sys.stdin:
        if tasks:
            say(tasks[line.strip()]())
            continue
        began = time.perf_counter()
        tasks, said = PARTS[part](folder, dtype)
        say({"seconds": round(time.perf_counter() - began, 3), **said})


Tasks = dict[str, Callable[[], Said]]


def read_files(folder: Path, dtype: Dtype) -> tuple[Tasks, Said]:
    """The bytes of the weights' files, whatever the dtype is."""
    block = bytearray(READ_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(block):
                pass
    return {}, {}


def ours(folder: Path, dtype: Dtype) -> tuple[Tasks, Said]:
    """Our own opening."""
    target = open_target(folder, dtype=dtype)
    session = Session(target)

    def tokens() -> Said:
        run = decode(target, None, CONTEXT, max_new_tokens=TOKENS + 1, ignore_eos=True, session=session)
        return {"tokens_per_s": TOKENS / run.decode_ns * 1e9}

    def passes(length: int, numbers: Sequence[int]) -> Said:
        ids = torch.arange(1, length + 1)[None]
        cache = target.new_cache(1, length + MOST_ROWS)
        target.forward(ids, cache, logits="none")
        quickest = [float("inf")] * len(numbers)
        for turn in range(PASSES + 1):
            for index, number in enumerate(numbers):
                began = time.perf_counter()
                target.forward(ids[:, :number], cache)
                spent = time.perf_counter() - began
                cache.truncate(cache.lengths - number)
                if turn:
                    quickest[index] = min(quickest[index], spent)
        return {"rows_ms": [round(1e3 * spent, 3) for spent in quickest]}

    tasks = {
        "tokens": tokens,
        "rows": lambda: passes(len(CONTEXT), range(1, MOST_ROWS + 1)),
        "long": lambda: passes(LONG, LONG_ROWS),
    }
    return tasks, {"kernel": target.kernel}


def theirs(folder: Path, dtype: Dtype) -> tuple[Tasks, Said]:
    """Transformers' opening and its `generate`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)
    ids = torch.tensor([CONTEXT])

    def seconds(count: int) -> float:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        return time.perf_counter() - began

    return {"tokens": lambda: {"tokens_per_s": TOKENS / (seconds(TOKENS + 1) - seconds(1))}}, {}


def autotuned(folder: Path, dtype: Dtype) -> tuple[Tasks, Said]:
    """The choice of `bench.autotune` without drafters, and the peak that it says before."""
    target, threads = Target(key="", path=folder), torch.get_num_threads()
    with quiet_interpreter():
        tuned = choose_engine(target, [], CONTEXT, dtype=dtype, device="cpu", max_threads=threads, seconds=3.0)
    said: Said = {"kernel": tuned.kernel, "num_threads": tuned.num_threads, "said": peak_of_choice(target, [], dtype)}
    return {"": lambda: said}, said


LOADED: Final = """
import sys, time
started = time.perf_counter()
import mlflow.pyfunc
imported = time.perf_counter()
mlflow.pyfunc.load_model(sys.argv[1]).unwrap_python_model()
print(imported - started, time.perf_counter() - imported)
"""


def released(folder: Path, home: str) -> dict[str, float]:
    """Seconds in which a new process imports MLflow and loads a version with its target."""
    environment = {**os.environ, "DRAFTSMITH_HOME": home}
    command = [sys.executable, "-c", LOADED, str(folder)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    imported, loaded = map(float, done.stdout.splitlines()[-1].split())
    return {"import_seconds": round(imported, 2), "load_seconds": round(loaded, 2)}


class LlamaCpp:
    """llama.cpp's llama-bench on the same weights, converted by its own converter in the same dtype."""

    def __init__(self, program: Path, sources: Path, folder: Path, dtype: Dtype, num_threads: int, work: str) -> None:
        file = Path(work) / "model.gguf"
        # Random tokenizers are not known to it; which way a text is split does not matter here.
        run_converter(sources.resolve(), [str(folder), "--outfile", str(file), "--outtype", TYPES[dtype]], pre="gpt-2")
        self._command = [str(program), "-m", str(file), "-t", str(num_threads), "-o", "json"]

    def tokens(self) -> float:
        """Tokens a second of TOKENS tokens decoded after the context."""
        return float(self._run(len(CONTEXT), "-p", "0", "-n", str(TOKENS), "-r", "1")[0]["avg_ts"])

    def rows(self, length: int, numbers: Sequence[int]) -> list[float]:
        """Milliseconds of the quickest of PASSES passes over so many tokens; logits of the last one alone."""
        found = self._run(length, "-p", ",".join(map(str, numbers)), "-n", "0", "-r", str(PASSES))
        return [round(min(case["samples_ns"]) / 1e6, 3) for case in found]

    def _run(self, length: int, *options: str) -> Any:
        command = [*self._command, "-d", str(length), *options]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return json.loads(done.stdout)


PARTS: Final[dict[str, Callable[[Path, Dtype], tuple[Tasks, Said]]]] = {
    "reading": read_files,
    "first": ours,
    "again": ours,
    "transformers": theirs,
    "autotune": autotuned,
}


class Process:
    """A measuring process, and the memory that its first task takes."""

    def __init__(self, part: str, folder: Path, dtype: Dtype, num_threads: int, home: str) -> None:
        command = [sys.executable, "-m", "benchmarks.opening", "--serve", part, str(folder), dtype, str(num_threads)]
        environment = {**os.environ, "DRAFTSMITH_HOME": home}
        self._child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def opened(self) -> dict[str, Any]:
        """Let it do its part: seconds, and bytes of memory over what it had before."""
        (self._folder / "clear_refs").write_text("5", encoding="ascii")  # the kernel's peak begins here
        before, anonymous, ended = self._memory(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(0.005):
                anonymous.append(self._memory()["RssAnon"])

        watching = threading.Thread(target=watch)
        watching.start()
        said = self.ask("open")
        after = self._memory()
        ended.set()
        watching.join()
        return {
            **said,
            "peak": after["VmHWM"] - before["VmRSS"],
            "peak_anonymous": max(anonymous) - before["RssAnon"],
            "held_anonymous": after["RssAnon"] - before["RssAnon"],
            "held_of_files": after["RssFile"] - before["RssFile"],
        }

    def ask(self, task: str) -> Any:
        """Its answer to one line."""
        assert self._child.stdin is not None
        self._child.stdin.write(f"{task}\n")
        self._child.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Close its stdin, at which it ends."""
        self._child.communicate()

    def _answer(self) -> Any:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        assert line, "a measuring process ended; its own message is above"
        return json.loads(line)

    @property
    def _folder(self) -> Path:
        return Path("/proc") / str(self._child.pid)

    def _memory(self) -> dict[str, int]:
        lines = (self._folder / "status").read_text(encoding="ascii").splitlines()
        return {name: int(rest.split()[0]) << 10 for name, _, rest in (x.partition(":") for x in lines) if "kB" in rest}


def weights_looked_up(folder: Path) -> int:
    """Weights of an input embedding that is no head as well: a token reads one row of them."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
    return 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size


@functools.cache
def numbers_to_stream() -> torch.Tensor:
    """Held to the end: memory that is given back costs the next turn what the system then does with it."""
    return torch.ones(STREAMED_BYTES // 8, dtype=torch.int64)


def memory_rate(threads: int) -> float:
    """GB a second in which a sum reads memory, on so many threads."""
    torch.set_num_threads(threads)
    numbers = numbers_to_stream()
    numbers.sum()
    began = time.perf_counter()
    for _ in range(PASSES):
        numbers.sum()
    return PASSES * numbers.nbytes / (time.perf_counter() - began) / 1e9


def measure_case(folder: Path, dtype: Dtype, turns: int, home: str, llama_cpp: Sequence[Path]) -> dict[str, Any]:
    """One model in one dtype: openings, then decoding in turns. llama_cpp: llama-bench and the sources, or neither."""
    num_params = int(target_facts(Target(key="", path=folder))["num_params"])
    threads = threads_for(num_params, num_usable_cores())
    case: dict[str, Any] = {"num_threads": threads, "weights": num_params * getattr(torch, dtype).itemsize}
    case["read_for_a_token"] = case["weights"] - weights_looked_up(folder) * getattr(torch, dtype).itemsize
    running: dict[str, Process] = {}
    for part in ("reading", "first", "again", "transformers"):
        process = Process(part, folder, dtype, threads, home)
        case[part] = process.opened()
        if part in ("reading", "first"):
            process.end()
        else:
            running[part] = process
    with tempfile.TemporaryDirectory() as work:
        other = LlamaCpp(*llama_cpp, folder, dtype, threads, work) if llama_cpp else None
        decoding: dict[str, Callable[[], float]] = {
            part: lambda process=process: process.ask("tokens")["tokens_per_s"]  # type: ignore[misc]
            for part, process in running.items()
        } | ({"llama.cpp": other.tokens} if other else {})
        streams: list[float] = []
        rates: dict[str, list[float]] = {part: [] for part in decoding}
        for turn in range(turns + 1):
            for part, measure in decoding.items():
                time.sleep(SETTLE_S)
                rate = measure()
                if turn:  # the first one warms up
                    rates[part].append(round(rate, 2))
            if turn:
                time.sleep(SETTLE_S)
                streams.append(round(memory_rate(threads), 2))
        case["tokens_per_s"], case["memory_gb_s"] = rates, streams
        case["rows_ms"] = running["again"].ask("rows")["rows_ms"]
        case["long_ms"] = running["again"].ask("long")["rows_ms"]
        if other:
            case["llama_cpp_rows_ms"] = other.rows(len(CONTEXT), range(1, MOST_ROWS + 1))
            case["llama_cpp_long_ms"] = other.rows(LONG, LONG_ROWS)
    for process in running.values():
        process.end()
    return case


def share_of_memory(case: dict[str, Any]) -> str:
    """GB of weights that our decoding reads in a second, and what memory streamed in the same turns."""
    if "memory_gb_s" not in case:
        return "-"
    ours, streams = fmean(case["tokens_per_s"]["again"]) * case["read_for_a_token"] / 1e9, fmean(case["memory_gb_s"])
    return f"{ours:.1f} / {streams:.1f} ({ours / streams:.0%})"


def table_of(found: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """What the record says, as docs/benchmarks.md has it: a paragraph, a head and rows."""
    rows = []
    opened = ["reading"] * any("reading" in case for case in found["cases"].values())
    opened += ["first", "again", "transformers"]
    for name, case in found["cases"].items():
        first, again, other, rate = case["first"], case["again"], case["transformers"], case["tokens_per_s"]
        of_weights = lambda part, which="peak": f"{part[which] / case['weights']:.2f}"  # noqa: B023, E731
        rows.append(
            (
                name,
                f"{case['num_threads']}",
                f"{case['weights'] / 1e9:.2f}",
                " / ".join(f"{case[part]['seconds']:.1f}" for part in opened),
                f"{of_weights(first)} / {of_weights(again)} / {of_weights(other)}",
                f"{of_weights(first, 'peak_anonymous')} / {of_weights(other, 'peak_anonymous')}",
                " / ".join(f"{fmean(rates):.1f}" for rates in rate.values()),
                share_of_memory(case),
                " / ".join(
                    ", ".join(f"{spent / case[part][0]:.2f}" for spent in case[part][1:])
                    for part in ("rows_ms", "llama_cpp_rows_ms")
                    if part in case
                ),
                " / ".join(
                    ", ".join(f"{spent:.3g}" for spent in case[part])
                    for part in ("long_ms", "llama_cpp_long_ms")
                    if part in case
                )
                or "-",
            )
        )
    choices = "; ".join(
        f"{name} {chosen['said'] / 1e9:.2f} GB said, {chosen['peak'] / 1e9:.2f} taken in {chosen['seconds']:.0f} s"
        for name, chosen in found["autotune"].items()
    )
    tuned = f" `bench.autotune`: {choices}." if choices else ""
    loaded = ""
    if release := found["release"]:
        loaded = (
            f" A released drafter of the built-in target: `mlflow.pyfunc.load_model` "
            f"{release['first']['load_seconds']:.1f} s, again {release['again']['load_seconds']:.1f} s, after "
            f"{release['again']['import_seconds']:.1f} s of imports."
        )
    with_llama_cpp = " / llama.cpp" if any("llama_cpp_rows_ms" in case for case in found["cases"].values()) else ""
    engines = f"ours / transformers{with_llama_cpp}"
    return (
        "Opening a target in a new process: the first time, when kernels are timed; again, when their times are "
        "remembered; reading its files alone, where that was measured; and with `transformers`, which leaves weights "
        "of the stored dtype in the file until a pass reads them. Peaks are multiples of the weights in that dtype, "
        "over a process that has imported everything; that of 15 MB is mostly what libraries take at first use. They "
        "count pages of the file; the next column does not (ours the first time, and `transformers`). Then plain "
        "decoding after "
        f"{len(CONTEXT)} tokens in turns (llama.cpp: its llama-bench on the same weights, converted), how much of "
        "the weights that is in a second beside what a sum reads of memory in the same turns, and what 2 to "
        f"{MOST_ROWS} rows of one pass cost in rows. 125M and 0.6B (Qwen3's shape, tied) have random weights, stored "
        f"in bfloat16.{tuned}{loaded}{found.get('note', '')}",
        (
            "target",
            "threads",
            "weights, GB",
            f"seconds: {' / '.join(opened)}",
            "peak: first / again / transformers",
            "without the file: ours / transformers",
            f"tokens a second: {engines}",
            "GB/s: ours / memory",
            f"cost of 2 to 8 rows: ours{with_llama_cpp}",
            f"ms of {LONG_ROWS[0]} and {LONG_ROWS[1]} rows after {LONG:,} tokens: ours{with_llama_cpp}",
        ),
        rows,
    )


def main() -> None:
    """Measure every case, print a line for each, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FOLDER", help="beside the built-in one")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=5, help="of decoding")
    parser.add_argument("--autotune", nargs="*", default=[], metavar="NAME", help="models to choose an engine for")
    parser.add_argument("--release", type=Path, metavar="FOLDER", help="of a version, with its MLmodel")
    parser.add_argument("--random-qwen3", type=Path, metavar="FOLDER", help="write that model there, and end")
    parser.add_argument(
        "--llama-cpp", nargs=2, type=Path, default=[], metavar=("PROGRAM", "SOURCES"), help="llama-bench; the converter"
    )
    parser.add_argument("--serve", nargs=4, metavar=("PART", "FOLDER", "DTYPE", "THREADS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve[0], Path(asked.serve[1]), asked.serve[2], int(asked.serve[3]))
        return
    if asked.random_qwen3:
        random_qwen3(asked.random_qwen3)
        return
    models = {"built-in": BUILTIN, **{name: Path(at) for name, _, at in (one.partition("=") for one in asked.model)}}
    load, cases, choices, release = os.getloadavg()[0], {}, {}, {}
    with tempfile.TemporaryDirectory() as home:
        for name, folder in models.items():
            for dtype in asked.dtypes:
                case = cases[f"{name} {dtype}"] = measure_case(folder, dtype, asked.turns, home, asked.llama_cpp)
                print(name, dtype, json.dumps(case), flush=True)
                if name in asked.autotune:
                    process = Process("autotune", folder, dtype, num_usable_cores(), home)
                    choices[f"{name} {dtype}"] = process.opened()
                    process.end()
                    print("autotune", json.dumps(choices[f"{name} {dtype}"]), flush=True)
        if asked.release:
            for part in ("first", "again"):
                release[part] = released(asked.release, f"{home}/of-release")
            print("release", json.dumps(release), flush=True)
    has_avx512 = "AVX512" in torch.backends.cpu.get_cpu_capability()
    note = f" The processor has {'' if has_avx512 else 'no '}AVX-512, and our functions were "
    note += "not compiled." if compiled_functions() is None else "compiled."
    note += " llama.cpp's passes read the logits of the last row only." if asked.llama_cpp else ""
    numbers = {"load_average": load, "cases": cases, "autotune": choices, "release": release, "note": note}
    print(write_record("opening", numbers))


if __name__ == "__main__":
    main()
