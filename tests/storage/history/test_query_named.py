"""The named queries: each says what it answers, all of them work, and their parameters are typed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from history_rows import choice, counted, depth_eval, rounds

from components.contract import UserError
from components.rows import AcceptanceMap, CostCell
from storage.history.query import find_query, is_name, list_rows, named_queries, run_named_query
from storage.history.write import record_artifact


@pytest.mark.parametrize("name", named_queries())
def test_every_query_answers_on_an_empty_history_and_says_what_it_is(home: Path, name: str) -> None:
    query = named_queries()[name]
    assert is_name(name) and query.about.endswith(".") and all(parameter.about for parameter in query.parameters)
    columns, rows = run_named_query(home, name, {})
    assert (name == "columns" or rows == []) and len(columns) == len(set(columns)) > 2


def test_answers_are_those_of_the_newest_measurements(home: Path, make: Any) -> None:
    for number in range(3):
        rows = [counted(f"r{number}", 4, 12, number, tokens_kept=5 + number), *rounds(f"r{number}", (3, 1))]
        record_artifact(home, make(f"m{number}", rows=rows).path)
    columns, found = run_named_query(home, "acceptance", {"newest": "2"})
    at = columns.index("al")
    assert [row[at] for row in found] == [1.5, 1.25]
    assert [row[5] for row in run_named_query(home, "positions", {"artifact": "m0", "workload": ""})[1]] == [
        1,
        2,
        3,
    ] * 2
    assert run_named_query(home, "acceptance", {"method": "mtp"})[1] == []


def test_three_and_seven_drafts_stand_beside_the_chosen_depth(home: Path, make: Any) -> None:
    evals = [depth_eval(depth_k=k, speedup_pred=1 + k / 10) for k in (2, 3, 7)]
    record_artifact(home, make("a", rows=[choice(), *evals]).path)
    columns, rows = run_named_query(home, "edge", {})
    assert [rows[0][columns.index(f"pred_{name}")] for name in ("chosen", "3", "7")] == [1.2, 1.3, 1.7]


def test_what_is_no_query_or_parameter_costs_one_line(home: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'depths'"):
        find_query("depth")
    with pytest.raises(UserError, match="no parameter 'metod'; it has: method"):
        run_named_query(home, "depths", {"metod": "mtp"})
    with pytest.raises(UserError, match="limit is 'many', expected int"):
        run_named_query(home, "depths", {"limit": "many"})


def test_the_list_names_every_query_with_its_defaults() -> None:
    columns, rows = list_rows()
    assert list(columns) == ["name", "parameters", "about"]
    assert ("depths", "method, workload=all, limit=60") in [row[:2] for row in rows]


def asked(home: Path, name: str, *wanted: str, **given: str) -> list[tuple[Any, ...]]:
    columns, rows = run_named_query(home, name, given)
    return [tuple(row[columns.index(column)] for column in wanted) for row in rows]


def test_machines_tell_depth_and_speed_of_one_choice(home: Path, make: Any) -> None:
    short = choice(depth_k=6, speedup_meas=9.0, kv_len=64)
    record_artifact(home, make("a", rows=[choice(depth_k=2, speedup_meas=1.4), short]).path)
    record_artifact(home, make("b", rows=[choice(selection_id="sel2", depth_k=5)]).path)
    assert asked(home, "machines", "depth_k", "speedup_meas", "speedup_meas_max") == [(2, 1.4, 1.4)]
    assert asked(home, "versions", "choices", "speedup_meas_p50") == [(2, 1.4)]


def test_positions_are_of_the_newest_measurement_that_has_rounds(home: Path, make: Any) -> None:
    record_artifact(home, make("a", rows=[counted("r", 1, 3, 1), *rounds("r", (3, 1))]).path)
    record_artifact(home, make("b", rows=[counted("q", 0, 0, 0)]).path)
    assert asked(home, "positions", "position") == [(1,), (2,), (3,)]


def test_positions_of_a_method_are_of_the_newest_measurement_of_that_method(home: Path, make: Any) -> None:
    record_artifact(home, make("a", rows=[counted("r", 1, 3, 1, method="mtp"), *rounds("r", (3, 1))]).path)
    record_artifact(home, make("b", rows=[counted("q", 1, 2, 1, method="eagle3"), *rounds("q", (2, 1))]).path)
    assert asked(home, "positions", "method", "position", method="mtp") == [("mtp", 1), ("mtp", 2), ("mtp", 3)]


def test_the_throughput_of_a_batch_is_all_its_tokens_until_the_last_is_done(home: Path, make: Any) -> None:
    def served(name: str, ns: int, **changes: Any) -> Any:
        return dataclasses.replace(counted(name, 1, 3, 1), tokens_kept=11, decode_ns=ns, **changes)

    plain: Any = {"method": "none", "draft_key": "", "depth_k": 0}
    pair = [served("a", 10**9, batch_size=2, batch_id="b1"), served("b", 2 * 10**9, batch_size=2, batch_id="b1")]
    slow = [
        served("c", 4 * 10**9, batch_size=2, batch_id="b2", **plain),
        served("d", 1, batch_size=2, batch_id="b2", **plain),
    ]
    one = [served("e", 10**9), served("f", 2 * 10**9, **plain)]
    of_a_server = [served("g", 10**9, batch_size=8)]
    record_artifact(home, make("a", rows=[*pair, *slow, *one, *of_a_server]).path)
    found = asked(
        home,
        "throughput",
        "batch_size",
        "method",
        "batches",
        "requests",
        "throughput_tokens_per_s",
        "throughput_speedup",
    )
    assert [row for row in found if row[1] != "none"] == [
        (1, "eagle3", 1, 1, 10.0, 2.0),
        (2, "eagle3", 1, 2, 10.0, 2.0),
    ]


def test_a_gap_that_a_newer_measurement_has_settled_is_none(home: Path, make: Any) -> None:
    record_artifact(home, make("a", rows=[depth_eval(speedup_meas=1.1), depth_eval(depth_k=4, speedup_meas=1.1)]).path)
    record_artifact(home, make("b", rows=[depth_eval(speedup_meas=1.53), depth_eval(depth_k=4)]).path)
    assert asked(home, "gaps", "depth_k", "speedup_meas") == [(4, 1.1)]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("depths", "limit"),
        ("edge", "limit"),
        ("acceptance", "newest"),
        ("speedups", "newest"),
        ("costs", "newest"),
        ("training-gap", "newest"),
    ],
)
def test_the_newest_rows_are_the_newest_of_the_method_asked_for(home: Path, make: Any, name: str, limit: str) -> None:
    for key, method in (("old", "mtp"), ("new", "eagle3")):
        rows = [
            depth_eval(method=method),
            choice(method=method),
            counted(key, 2, 6, 2, method=method),
            AcceptanceMap("t", "d", method, "p", "code", 2, 3, 4, [2, 0, 1], [2, 1, 1], 0.1, "float32"),
            CostCell("t", "d", method, "verify", 2, 1, 3, 64, 0, 9, 1e6, 0.0, "float32", "plain", 1),
        ]
        record_artifact(home, make(key, rows=rows).path)
    assert {row[0] for row in asked(home, name, "method", method="mtp", **{limit: "1"})} == {"mtp"}
