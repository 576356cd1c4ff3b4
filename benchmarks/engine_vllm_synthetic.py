"""Does the speedup model hold on vLLM? Its acceptance is imposed, so that nothing but the cost of rounds is asked.

    python -m benchmarks.engine_vllm_synthetic [--depths 1,2,4,8] [--prompts 4] [--reps 8] [--work DIR]

For each depth five servers stand side by side and take turns: plain, and four whose acceptance is imposed at 0, 0.3,
0.6 and 0.9 a draft (given those before it). The plain one gives T_target, that at 0 the cost of a round; the model
predicts the other three, bench.measure_server measures them and speedup.compare_engines holds the two together. The
drafter is our EAGLE-3 after one step of training: what it says does not matter.

vLLM's CPU build takes the option and fails at its first round; that is tried first, and written down. Then
vllm_imposed_worker.py puts the missing branch into that build as a plugin.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.engine_cases import EngineCases, make_context
from benchmarks.engine_vllm import VERSION, vllm
from benchmarks.record import write_record
from components.bench import measure_server
from components.bench.settings import EngineServer
from components.contract import Measurements, UserError
from components.definitions import has_decoding
from components.rows import ALL, EngineComparison, Request, read_rows
from components.speedup import compare_engines
from components.speedup.imposed_acceptance import predicted_speedup, speed_ratio

RATES = (0.3, 0.6, 0.9)
CONCURRENCY = (1, 4)
MAX_NEW_TOKENS = 48


def rates_of(rate: float, depth: int) -> tuple[float, ...]:
    """The share of rounds that accept draft 1, 2, ..., each accepted at `rate` given those before it."""
    return tuple(rate**place for place in range(1, depth + 1))


def speculation(cases: EngineCases, rates: Sequence[float]) -> dict[str, Any]:
    """vLLM's speculative config."""
    return {
        "method": "eagle3",
        "model": str(cases.exported("eagle3", "eagle3")),
        "num_speculative_tokens": len(rates),
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": list(rates),
    }


@contextmanager
def plugin(folder: Path) -> Iterator[None]:
    """Servers started meanwhile load vllm_imposed_worker.py, which lies installed in `folder`."""
    module = Path(__file__).with_name("vllm_imposed_worker.py")
    record = folder / "vllm_imposed_worker-1.dist-info"
    record.mkdir(parents=True)
    shutil.copy(module, folder)
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-imposed-worker\nVersion: 1\n", encoding="utf-8")
    entry = f"[vllm.general_plugins]\n{module.stem} = {module.stem}:register\n"
    (record / "entry_points.txt").write_text(entry, encoding="utf-8")
    with patch.dict(os.environ, {"PYTHONPATH": str(folder)}):
        yield


def without_plugin(cases: EngineCases) -> str:
    """What the build does by itself when acceptance is imposed: "" where it serves, else its last error."""
    log = cases.work / "without-plugin.log"
    try:
        with vllm(cases.target_folder, log, speculation(cases, rates_of(0.6, 2))) as address:
            measure(cases, [EngineServer(base_url=address, imposed=rates_of(0.6, 2))], "without-plugin", 1, 1)
    except UserError as error:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons = [line for line in lines if "AssertionError: " in line] or [str(error)]
        return reasons[0].rpartition("] ")[2][:200]
    return ""


def measure(
    cases: EngineCases, servers: Sequence[EngineServer], name: str, num_prompts: int, reps: int
) -> Measurements:
    """All servers on the same prompts, in turns."""
    return measure_server(
        cases.target,
        cases.prompts,
        servers=list(servers),
        num_prompts=num_prompts,
        max_new_tokens=MAX_NEW_TOKENS,
        concurrency=list(CONCURRENCY),
        reps=reps,
        wait_s=600,
        dtype="float32",
        ctx=make_context(cases.work / f"measured-{name}"),
        machine=cases.machine,
    )


def at_depth(cases: EngineCases, plain: EngineServer, depth: int, num_prompts: int, reps: int) -> list[dict[str, Any]]:
    """One line for each concurrency and imposed rate."""
    imposed = [rates_of(rate, depth) for rate in (0.0, *RATES)]
    starting = [
        vllm(cases.target_folder, cases.work / f"vllm-{depth}-{rates[0]}.log", speculation(cases, rates))
        for rates in imposed
    ]
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        addresses = list(pool.map(stack.enter_context, starting))  # at once: each takes a minute
        servers = [
            plain,
            *(EngineServer(base_url=at, imposed=rates) for at, rates in zip(addresses, imposed, strict=True)),
        ]
        made = measure(cases, servers, str(depth), num_prompts, reps)
    compared = compare_engines([made], ctx=make_context(cases.work / f"compared-{depth}"))
    requests = [row for row in read_rows(made.path, Request) if not row.is_warmup]
    rows = {
        (row.concurrency, row.method): row for row in read_rows(compared.path, EngineComparison) if row.workload == ALL
    }
    return [
        line_of(rows[concurrency, server.arm_method], server.imposed, servers[1].arm_method, requests)
        for concurrency in CONCURRENCY
        for server in servers[1:]
    ]


def line_of(
    row: EngineComparison, rates: Sequence[float], method_at_zero: str, requests: Sequence[Request]
) -> dict[str, Any]:
    """One arm: predicted beside measured, over all repetitions and in each."""
    at = [one for one in requests if one.concurrency == row.concurrency]
    errors = []
    for rep in sorted({one.rep for one in at}):
        arm, at_zero, plain = (
            [one for one in at if (one.rep, one.method) == (rep, method)]
            for method in (row.method, method_at_zero, "none")
        )
        errors.append(_error(predicted_speedup(rates, arm, at_zero, plain), speed_ratio(arm, plain)))
    arm, at_zero, plain = ([one for one in at if one.method == name] for name in (row.method, method_at_zero, "none"))
    return {
        "depth_k": row.depth_k,
        "rate": rates[0],
        "concurrency": row.concurrency,
        "num_answers": len(arm),
        "t_target_ms": _round_ms(plain),
        "t_round_at_zero_ms": _round_ms(at_zero),
        "t_round_ms": _round_ms(arm),
        "al_pred": row.al_pred,
        "al_engine": row.al_engine,
        "speedup_pred": row.speedup_pred,
        "speedup_engine": row.speedup_engine,
        "error": _error(row.speedup_pred, row.speedup_engine),
        "error_by_rep": errors,
        "verdict": row.verdict,
    }


def _error(predicted: float | None, measured: float | None) -> float | None:
    return predicted / measured - 1.0 if predicted and measured else None


def _round_ms(requests: Sequence[Request]) -> float:
    """The median time of a round; plain decoding has one for each token."""
    return statistics.median(
        row.decode_ns / 1e6 / (row.num_rounds or row.timed_tokens) for row in requests if has_decoding(row)
    )


def run(work: Path, depths: Sequence[int], num_prompts: int, reps: int) -> Path:
    """Measure, and write the record anew after each depth, since all of them take half an hour."""
    cases = EngineCases(work / "cases", num_prompts=num_prompts)
    cases.draft("eagle3", num_steps=1)
    alone, lines = without_plugin(cases), list[dict[str, Any]]()
    with plugin(work / "plugin"), vllm(cases.target_folder, cases.work / "vllm-plain.log", None) as address:
        for depth in depths:
            lines += at_depth(cases, EngineServer(base_url=address, method="none"), depth, num_prompts, reps)
            facts = {"max_new_tokens": MAX_NEW_TOKENS, "reps": reps, "without_plugin": alone, "lines": lines}
            file = write_record("engine-vllm-synthetic", {"engine": f"vLLM {VERSION}", **facts})
    return file


def main() -> None:
    """Measure, write the record and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="1,2,4,8")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--reps", type=int, default=8)
    parser.add_argument("--work", type=Path, default=None, help="an empty folder to work in, kept afterwards")
    asked = parser.parse_args()
    depths = [int(depth) for depth in asked.depths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        file = run(asked.work or Path(folder), depths, asked.prompts, asked.reps)
    print(f"{file}\n{file.read_text(encoding='utf-8')}")


if __name__ == "__main__":
    main()
