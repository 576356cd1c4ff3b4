"""How fast is the history with ten thousand runs in it, and does anybody who reads it notice what others write?

Fills a home of its own with runs like those of `quickstart`, each of which registers a version, asks every named query
after `draftsmith compact`, then lets readers in processes of their own ask while runs are appended and compacted. Ends
with exit code 1 when a query takes 200 ms or more after compaction, a reader fails, or a row is missing or there twice.

    python -m benchmarks.history [--runs 10000] [--readers 20] [--appends 50] [--no-record]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import tempfile
import time
from datetime import datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any, get_origin

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.record import ROOT, write_record
from components.rows import TABLES
from storage.history.files import compact, files_of, history_dir, write_table
from storage.history.query import named_queries, query, run_named_query
from storage.history.records import RECORDS, columns_of
from storage.history.schema import plain_type, schema_of

LIMIT_MS, FULL_SIZE = 200.0, 1000  # the limit holds for histories that are large enough to tell
REPETITIONS, A_FILE = 5, 100
START = datetime(2026, 1, 1)
PROMPTS, ARMS, ROUNDS, DEPTHS = 12, 4, 30, 7  # of one run
MADE_BY = {  # table -> the artifact of a run whose rows they are, and how many
    "acceptance_map": ("acceptance", PROMPTS),
    "cost_cell": ("cost", 6 * (2 * DEPTHS + 1)),
    "request": ("end_to_end", PROMPTS * ARMS),
    "round": ("end_to_end", PROMPTS * ARMS * ROUNDS),
    "depth_eval": ("verdict", 3 * (DEPTHS + 1)),
    "depth_choice": ("verdict", 3),
    "quality_flag": ("verdict", 3),
    "paired_comparison": ("verdict", 2),
}

ARTIFACTS = {  # step of a run -> kind, facts, and the steps whose artifacts it was made from, by parameter
    "target": ("Target", {"model": "builtin", "digest": "ab12cd34"}, {}),  # made once, by the first run
    "prompts": ("Prompts", {"source": "traffic", "found": 900, "num_train": 640}, {}),
    "draft": ("Draft", {"method": "mtp"}, {"target": "target", "features": "prompts"}),  # and start_from
    "acceptance": ("Measurements", {}, {"target": "target", "draft": "draft", "prompts": "prompts"}),
    "cost": ("Measurements", {}, {"target": "target", "drafts": "draft"}),
    "end_to_end": ("Measurements", {}, {"target": "target", "drafts": "draft", "prompts": "prompts"}),
    "verdict": ("DepthPolicy", {}, {"acceptance": "acceptance", "cost": "cost", "end_to_end": "end_to_end"}),
    "release": ("Release", {}, {"target": "target", "drafts": "draft", "policy": "verdict"}),
}
PROMOTED_EVERY = 100
"""Runs from one new champion to the next; every run's drafter goes on from the champion's."""
TOLD = {"settings": '{"num_steps": 400, "method": "mtp"}', "inputs": '{"target": "t", "drafts": ["d", "e"]}'}
MADE = {
    "machine": '{"device_name": "CPU", "num_cores": 2, "ram_gib": 8.0}',
    "versions": '{"torch": "2.13.0", "numpy": "2.4.6", "python": "3.11.7"}',
    "num_bytes": 1_000_000,
    "peak_rss_mib": 500.0,
}


def main() -> int:
    """Measure, print, write the record; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=20)
    parser.add_argument("--appends", type=int, default=50, help="runs appended while the readers ask")
    parser.add_argument("--no-record", action="store_true", help="write no file under benchmarks/results")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-history-") as folder:
        numbers, fine = measure(Path(folder), asked.runs, asked.readers, asked.appends)
    if not asked.no_record:
        print(f"written: {write_record('history', numbers).relative_to(ROOT)}")
    return 0 if fine else 1


def measure(home: Path, runs: int, readers: int, appends: int) -> tuple[dict[str, Any], bool]:
    """The numbers of the record, and whether every promise was kept."""
    fill(home, runs)
    expected = {table: runs * count for table, (_, count) in MADE_BY.items()} | {"run": runs}
    compact(home, 0, whole=True)
    counts = count_rows(home)
    size = sum(path.stat().st_size for path in history_dir(home).rglob("*.parquet"))
    print(f"{runs} runs in {files_now(home)} files of {size / 1e6:.0f} MB")
    times = REPETITIONS if runs >= FULL_SIZE else 1
    queries: dict[str, float] = {}
    for name in named_queries():
        queries[name] = median([_timed(lambda name=name: ask(home, name)) * 1e3 for _ in range(times)])
    for name, ms in sorted(queries.items(), key=lambda item: -item[1]):
        print(f"  {name:14} {ms:6.1f} ms")
    whole = all(counts[table] == rows for table, rows in expected.items())
    crowd = readers_and_writer(home, runs, readers, appends)
    print(f"{crowd['questions']} questions of {readers} readers, {crowd['errors']} errors, {appends} runs appended")
    numbers = {
        "runs": runs,
        "rows": counts,
        "megabytes": round(size / 1e6, 1),
        "limit_ms": LIMIT_MS,
        "query_ms_p50": {name: round(ms, 1) for name, ms in queries.items()},
        "slowest_query_ms": round(max(queries.values()), 1),
        "no_row_lost_or_doubled": whole,
        "crowd": crowd,
    }
    kept = whole and not crowd["errors"] and crowd["rows_as_expected"]
    return numbers, kept and (runs < FULL_SIZE or max(queries.values()) < LIMIT_MS)


def files_now(home: Path) -> int:
    """Files that a question opens, over all tables."""
    return sum(len(files_of(home, table)) for table in [*TABLES, *RECORDS])


def fill(home: Path, runs: int) -> None:
    """Files of a hundred runs each; the rows of one run stand for all, under other keys and times."""
    templates = {table: pa.Table.from_pylist(rows, schema=schema_of(table)) for table, rows in one_run().items()}
    for table, rows in templates.items():
        (history_dir(home) / table).mkdir(parents=True, exist_ok=True)
        for first in range(0, runs, A_FILE):
            parts = [part for number in range(first, min(first + A_FILE, runs)) for part in stamp(table, rows, number)]
            content = pa.concat_tables([part for _, part in parts])
            pq.write_table(content, history_dir(home) / table / f"{parts[0][0]}.parquet", compression="zstd")


def stamp(table: str, rows: pa.Table, number: int) -> list[tuple[str, pa.Table]]:
    """(key, rows) of one table of one run."""
    at = START + timedelta(minutes=30 * number)
    new: dict[str, Any] = {
        "run_id": run_id(number),
        "created_at": at,
        "ended_at": at,
        "started_at": at,
        "draft_key": key_of("draft", number),
        "target_key": key_of("target", 0),
        "selection_id": key_of("verdict", number)[:16],
    }
    if table in MADE_BY:
        new["artifact_key"] = key_of(MADE_BY[table][0], number)
    if table == "training_metric":
        new["artifact_key"] = new["draft_key"]
    if table == "artifact":
        return [_artifact(rows, name, number, new) for name in ARTIFACTS if name != "target" or number == 0]
    if table == "promotion":
        facts = {"key": key_of("release", number), "draft_key": new["draft_key"], "run_id": run_id(number)}
        numbers = json.dumps({f"draftsmith.{name}": value for name, value in facts.items()})
        moves = rows.slice(0, 3 if number % PROMOTED_EVERY == 0 else 2)
        new |= {"to_version": number + 1, "promoted_at": at, "numbers": numbers}
        return [(run_id(number), _with(moves, new))]
    key = run_id(number) if table in RECORDS else new["artifact_key"]
    return [(key, _with(rows, new))]


def _artifact(rows: pa.Table, name: str, number: int, new: dict[str, Any]) -> tuple[str, pa.Table]:
    """(key, row) of an artifact of one run."""
    kind, info, made_from = ARTIFACTS[name]
    inputs = {parameter: key_of(step, 0 if step == "target" else number) for parameter, step in made_from.items()}
    if name == "draft" and number:
        inputs["start_from"] = key_of("draft", (number - 1) // PROMOTED_EVERY * PROMOTED_EVERY)
    uses = {"target": "targets.load_target", "prompts": "data.collect_traffic"}.get(name, "toy")
    key = key_of(name, number)
    told = {"artifact_key": key, "kind": kind, "step": name, "uses": uses, "info": json.dumps(info)}
    return key, _with(rows, new | told | {"inputs": json.dumps(inputs)})


def one_run() -> dict[str, list[dict[str, Any]]]:
    """The rows of one run: plausible where a query looks, constant elsewhere."""
    rows: dict[str, list[dict[str, Any]]] = {}
    for table, (_, count) in MADE_BY.items():
        rows[table] = [{**_blank(table), **_facts(table, i)} for i in range(count)]
    rows["run"] = [_blank("run") | {"params": "{}", "pipeline": "quickstart", "status": "completed", "reason": None}]
    rows["step"] = [
        _blank("step") | TOLD | {"step": f"s{i}", "status": "completed" if i % 3 else "reused", "seconds": 1.5 * i}
        for i in range(15)
    ]
    rows["artifact"] = [_blank("artifact") | TOLD | MADE | {"pipeline": "quickstart"}]
    moves = {"candidate": "publish", "challenger": "publish", "champion": "promote"}
    rows["promotion"] = [_blank("promotion") | {"name": "builtin", "alias": a, "action": moves[a]} for a in moves]
    curve = {"at_steps": list(range(1, 401)), "values": [1.0 + 1 / step for step in range(1, 401)]}
    rows["training_metric"] = [_blank("training_metric") | curve | {"name": "loss"}]
    return rows


def _facts(table: str, i: int) -> dict[str, Any]:
    """What makes the i-th row of a table differ."""
    prompt, arm = f"p{i % PROMPTS}", i // PROMPTS % ARMS
    workload = ("code", "chat", "maths")[i % 3]
    made: dict[str, dict[str, Any]] = {
        "acceptance_map": {
            "prompt_id": prompt,
            "workload": workload,
            "k_max": DEPTHS,
            "accepted": [(i * 7 + j * j) % 8 for j in range(95)],
            "proxy_accepted": [(i * 5 + j * j) % 8 for j in range(95)],
        },
        "cost_cell": {
            "phase": ("target_step", "verify", "draft")[min(i % 15, 2)],
            "depth_k": i % 15 // 2,
            "block": i // 15,
            "median_ns": 1e6 + i,
        },
        "request": {
            "request_id": f"r{i}",
            "prompt_id": prompt,
            "workload": workload,
            "method": "mtp" if arm else "none",
            "depth_k": arm,
            "num_rounds": ROUNDS,
            "num_drafted": ROUNDS * arm,
            "num_accepted": ROUNDS * arm // 2,
            "tokens_kept": 96,
            "decode_ns": 10**8 + i,
            "ttft_ns": 10**6,
            "status": "ok",
            "batch_size": 1,
        },
        "round": {"request_id": f"r{i // ROUNDS}", "round_no": i % ROUNDS, "drafted": 3, "accepted": i * i % 4},
        "depth_eval": {
            "workload": ("all", "code", "chat")[i % 3],
            "depth_k": i // 3,
            "speedup_meas": 1.1,
            "batch_size": 1,
        },
        "depth_choice": {
            "workload": ("all", "code", "chat")[i % 3],
            "depth_k": 3,
            "verdict": "use",
            "speedup_meas": 1.2,
        },
        "quality_flag": {"code": f"c{i}", "severity": "warning"},
        "paired_comparison": {"quantity": ("decode_speed", "acceptance_length")[i % 2]},
    }
    return {"method": "mtp"} | made[table] if "method" in columns_of(table) else made[table]


def _blank(table: str) -> dict[str, Any]:
    """A row of nothing in particular."""
    zero: dict[Any, Any] = {str: "", int: 0, float: 1.0, bool: False, datetime: START}
    kinds = {name: plain_type(hint) for name, hint in columns_of(table).items()}
    return {
        name: None if nullable else [] if get_origin(kind) is list else zero[kind]
        for name, (kind, nullable) in kinds.items()
    }


def _with(rows: pa.Table, new: dict[str, Any]) -> pa.Table:
    """The rows with some columns set to one value each."""
    for name, value in new.items():
        if name in rows.column_names:
            place = rows.column_names.index(name)
            rows = rows.set_column(
                place, rows.schema.field(place), pa.repeat(pa.scalar(value, rows.schema.field(place).type), len(rows))
            )
    return rows


def key_of(name: str, number: int) -> str:
    """A key as the store makes them: a hash, so that keys say nothing of their age."""
    return hashlib.sha256(f"{name} {number}".encode()).hexdigest()


def run_id(number: int) -> str:
    """The id of a run: its time first."""
    return f"{START + timedelta(minutes=30 * number):%Y%m%d-%H%M%S}-{number:08x}"


def ask(home: Path, name: str) -> int:
    """Ask a named query as the command does; the number of rows."""
    return len(run_named_query(home, name, {})[1])


def count_rows(home: Path) -> dict[str, int]:
    """Rows of every table."""
    tables = [*TABLES, *RECORDS]
    sql = " UNION ALL ".join(f"SELECT '{table}', count(*) FROM {table}" for table in tables)
    return dict(query(sql, home)[1])


def readers_and_writer(home: Path, runs: int, readers: int, appends: int) -> dict[str, Any]:
    """Readers that ask without a pause, while this process appends runs and compacts again and again."""
    context = multiprocessing.get_context("spawn")
    stop, ready, answers = context.Event(), context.Barrier(readers + 1), context.Queue()
    crowd = [context.Process(target=_read, args=(home, stop, ready, answers)) for _ in range(readers)]
    for process in crowd:
        process.start()
    ready.wait()
    times = []
    templates = one_run()
    for number in range(runs, runs + appends):
        started = time.perf_counter()
        append(home, templates, number)
        times.append((time.perf_counter() - started) * 1e3)
        if number % 10 == 9:
            compact(home, 5)
    stop.set()
    found = [answers.get() for _ in crowd]
    for process in crowd:
        process.join()
    after = count_rows(home)
    whole = all(after[table] == (runs + appends) * count for table, (_, count) in MADE_BY.items())
    errors = [error for _, error in found if error]
    return {
        "readers": readers,
        "questions": sum(count for count, _ in found),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "appends": appends,
        "append_ms_p50": round(median(times), 1),
        "append_ms_max": round(max(times), 1),
        "rows_as_expected": whole,
    }


def append(home: Path, templates: dict[str, list[dict[str, Any]]], number: int) -> None:
    """One run, through the functions that runs use: every row is checked."""
    for table, rows in templates.items():
        typed = pa.Table.from_pylist(rows, schema=schema_of(table))
        for key, part in stamp(table, typed, number):
            write_table(home, table, key, part.to_pylist(), key)


def _read(home: Path, stop: Any, ready: Any, answers: Any) -> None:
    """One reader: a count that never falls and the latest choices, until told to stop."""
    asked, seen, error = 0, 0, ""
    query("SELECT 1", home)
    ready.wait()
    try:
        while not asked or not stop.is_set():
            rows, keys = query("SELECT count(*), count(DISTINCT artifact_key) FROM depth_choice", home)[1][0]
            assert rows == 3 * keys and rows >= seen, f"{rows} rows of {keys} keys after {seen}"
            seen = rows
            ask(home, "latest")
            asked += 2
    except Exception as failure:  # whatever it is, it is the result
        error = f"{type(failure).__name__}: {failure}"
    answers.put((asked, error))


def _timed(action: Any) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


if __name__ == "__main__":
    raise SystemExit(main())
