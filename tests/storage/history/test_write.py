"""Measuring again adds to the history and takes nothing away: tables hold every session, views the newest valid one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history_rows import choice, depth_eval
from paired_runs import timed

from components.rows import CostCell, QualityFlag
from storage.artifacts.store import RECORD_FILE, Store
from storage.history import write as results
from storage.history.files import compact, history_dir
from storage.history.query import open_history, query, view_names
from storage.history.schema import all_tables
from storage.history.write import rebuild, record_artifact, record_key

Make = Callable[..., Any]
COST = {"method": "mtp", "phase": "verify", "depth_k": 1, "batch_size": 1, "num_rows": 2, "kv_len": 9, "mad_ns": 0.0}
COST |= {"target_key": "t", "draft_key": "d", "dtype": "float32", "kernel": "plain", "num_threads": 1}


def cost(median_ns: float) -> CostCell:
    return CostCell(**COST, block=0, reps_in_block=1, median_ns=median_ns)  # type: ignore[arg-type]


def ask(home: Path, sql: str, **options: Any) -> list[tuple[Any, ...]]:
    return query(sql, home, **options)[1]


def everything(home: Path) -> dict[str, list[Any]]:
    """Every table and every view, of the newest sessions and of all."""
    found: dict[str, list[Any]] = {}
    names = view_names()
    for every in (False, True):
        with open_history(home, all_sessions=every) as run_query:
            for name in names:
                found[f"{name} {every}"] = sorted(run_query(f"FROM {name}", {})[1], key=repr)
    return found


def measure(home: Path, make: Make, decode_ms: float, cost_ns: float, speedup: float, run_id: str) -> None:
    """One measurement of a drafter: costs, timed requests, the choice and its confirmation, always under these keys."""
    for key, rows in {
        "cost": [cost(cost_ns)],
        "end_to_end": timed([("d1", 3, decode_ms, 20)]),
        "depth": [depth_eval(depth_k=k) for k in (1, 2)] + [choice()],
        "verdict": [depth_eval(depth_k=1, speedup_meas=speedup), choice(speedup_meas=speedup)],
    }.items():
        record_artifact(home, make(key, rows=rows, run_id=run_id).path)


def test_views_take_the_newest_session_tables_hold_all_and_either_can_be_asked_of_every_view(home, make):
    measure(home, make, 5.0, 1e6, 1.5, "r1")
    first = everything(home)
    measure(home, make, 4.0, 2e6, 1.8, "r2")
    now = everything(home)
    for table in all_tables():
        rows = 2 * len(first[f"{table} False"]) if table != "superseded" else 4
        assert len(now[f"{table} False"]) == rows, table
    assert ask(home, "SELECT ms_p50, blocks FROM v_cost") == [(2.0, 1)]
    speedup = "SELECT round(speedup, 2) FROM v_speedup WHERE workload = 'all'"
    assert ask(home, speedup) == [(2.51,)]
    assert ask(home, f"{speedup} ORDER BY 1", all_sessions=True) == [(2.01,), (2.51,)]
    assert len(ask(home, "FROM v_arm_prompt WHERE method <> 'none'")) == 12
    assert ask(home, "SELECT ms_p50, blocks FROM v_cost ORDER BY 1", all_sessions=True) == [(1.0, 1), (2.0, 1)]
    assert ask(home, "SELECT speedup_meas FROM v_choice") == [(1.8,)]
    assert ask(home, "SELECT speedup_meas FROM v_choice ORDER BY 1", all_sessions=True) == [(1.5,), (1.8,)]
    depths = "SELECT run_id, depth_k, speedup_meas FROM v_depth ORDER BY ALL"
    assert ask(home, depths) == [("r2", 1, 1.8), ("r2", 2, None)]
    assert ask(home, depths, all_sessions=True) == [("r1", 1, 1.5), ("r1", 2, None), ("r2", 1, 1.8), ("r2", 2, None)]
    for name, rows in first.items():
        if name.endswith("True") and not name.startswith(("superseded", "v_session", "v_left_out", "v_machine")):
            assert set(map(repr, rows)) <= set(map(repr, now[name])), f"{name} has lost rows"
    told = "SELECT is_newest, count(*), count(DISTINCT session) FROM v_session GROUP BY 1 ORDER BY 1"
    assert ask(home, told) == [(False, 4, 4), (True, 4, 4)]


def test_a_depth_that_was_measured_the_first_time_alone_does_not_mix_into_the_second(home, make):
    for run, measured in (("r1", 3), ("r2", 1)):
        evals = [depth_eval(depth_k=k, speedup_meas=1.5 if k == measured else None) for k in (1, 3)]
        record_artifact(home, make("verdict", rows=evals, run_id=run).path)
    assert ask(home, "SELECT depth_k, speedup_meas FROM v_depth ORDER BY 1") == [(1, 1.5), (3, None)]


def test_a_deleted_history_comes_back_with_every_session_compacted_or_not(home, make):
    for number in (1, 2, 3):
        measure(home, make, 4.0 + number, number * 1e6, 1.0 + number, f"r{number}")
        compact(home, 0, whole=number == 2)
    before = everything(home)
    assert len(ask(home, "FROM cost_cell")) == 3
    shutil.rmtree(history_dir(home))
    rebuild(home, Store(home))
    assert everything(home) == before
    for key in ("cost", "end_to_end", "depth", "verdict"):
        record_key(home, Store(home), key)
    assert everything(home) == before, "it is said once"


def test_sessions_may_come_in_any_order(home, make):
    for value in (1e6, 2e6, 3e6):
        make("cost", rows=[cost(value)])
    paths = [session.path for session in Store(home).sessions("cost")]
    for order in itertools.permutations(paths):
        shutil.rmtree(history_dir(home), ignore_errors=True)
        for path in order:
            record_artifact(home, path)
        assert ask(home, "SELECT ms_p50 FROM v_cost") == [(3.0,)]
        assert len(ask(home, "FROM superseded")) == 2


def test_an_invalid_session_does_not_take_the_place_of_a_valid_one(home, make):
    def decide(verdict: str, speedup: float) -> list[tuple[Any, ...]]:
        rows = [choice(verdict=verdict, speedup_meas=speedup)]
        made = make("verdict", rows=rows, info={"verdict": verdict}, run_id=str(speedup))
        record_artifact(home, made.path)
        return ask(home, "SELECT verdict, speedup_meas FROM v_choice")

    assert decide("invalid", 9.0) == [("invalid", 9.0)], "there is no other"
    assert decide("invalid", 8.0) == [("invalid", 8.0)]
    assert decide("use", 1.5) == [("use", 1.5)]
    assert decide("invalid", 7.0) == [("use", 1.5)]
    assert decide("do_not_speculate", 0.9) == [("do_not_speculate", 0.9)], "that is a valid answer"
    assert len(ask(home, "FROM v_choice", all_sessions=True)) == len(ask(home, "FROM depth_choice")) == 5


def test_rows_from_before_there_were_sessions_are_those_of_the_first_session(home, make, monkeypatch):
    def forget(path: Path) -> None:
        record = path / RECORD_FILE
        content = json.loads(record.read_text())
        del content["session"], content["digest"]
        record.write_text(json.dumps(content))

    old = make("cost", rows=[cost(1e6)])
    forget(old.path)
    record_artifact(home, old.path)
    assert (history_dir(home) / "cost_cell" / "cost.parquet").is_file(), "the file that earlier versions wrote"
    assert ask(home, "SELECT session, ms_p50 FROM v_cost JOIN artifact USING (artifact_key)") == [("", 1.0)]
    record_artifact(home, make("cost", rows=[cost(2e6)]).path)
    assert ask(home, "SELECT ms_p50 FROM v_cost") == [(2.0,)] and len(ask(home, "FROM cost_cell")) == 2
    before = everything(home)
    rebuild(home, Store(home))
    assert everything(home) == before


def test_a_session_whose_end_was_not_noted_is_noted_by_whoever_comes_next(home, make, monkeypatch):
    record_artifact(home, make("cost", rows=[cost(1e6)]).path)
    again = make("cost", rows=[cost(2e6)])
    with monkeypatch.context() as killed:
        killed.setattr(results, "_mark_superseded", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            record_artifact(home, again.path)
    assert len(ask(home, "FROM v_cost")) == 2
    record_key(home, Store(home), "cost")
    assert ask(home, "SELECT ms_p50 FROM v_cost") == [(2.0,)]


def test_rows_that_another_artifact_has_at_the_same_moment_are_no_older_session_s(home, make):
    flag = QualityFlag("s", "d", "mtp", "c", "info", 1.0, "")
    for key in ("a", "b", "a"):
        made = make(key, rows=[dataclasses.replace(flag, draft_key=key)])
        record = made.path / RECORD_FILE  # a clock that stands still for two of them
        if key == "b":
            at = json.loads((Store(home).path_of("a") / RECORD_FILE).read_text())["finished_at"]
            record.write_text(json.dumps(json.loads(record.read_text()) | {"finished_at": at}))
        record_artifact(home, made.path)
    assert ask(home, "SELECT draft_key FROM v_flags ORDER BY 1") == [("a",), ("b",)]
