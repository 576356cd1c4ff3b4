"""The history: typed files, exact views, one locked question, and nothing that cannot be rebuilt."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from history_rows import choice, counted, depth_eval, request, rounds

from components.contract import UserError
from components.rows import (
    AcceptanceMap,
    EngineAcceptance,
    Round,
)
from storage.artifacts.store import Store
from storage.history.files import history_dir
from storage.history.query import open_history, query, view_names
from storage.history.schema import all_tables
from storage.history.write import rebuild, record_artifact


def one(home: Path, sql: str) -> tuple[Any, ...]:
    """The only row of a question."""
    rows = query(sql, home)[1]
    assert len(rows) == 1, rows
    return rows[0]


def ask(home: Path, make: Any, *rows: Any, key: str = "k1") -> None:
    record_artifact(home, make(key, rows=rows).path)


def test_each_convention_of_acceptance_gives_its_own_hand_worked_number(home, make):
    # A: 3 rounds, drafted 3 3 3, accepted 3 0 3, the last one cut by one: 8 kept, prefill's among the 9.
    # B: 1 round, drafted 2, accepted 0: 1 kept.
    counts = {"A": (3, 9, 6), "B": (1, 2, 0)}
    kept = {"A": 9, "B": 2}
    ask(home, make, *(counted(name, *three, prompt_id=name, tokens_kept=kept[name]) for name, three in counts.items()))
    columns = "al, al_macro, al_with_overshoot, accepted_per_round, accepted_per_round_macro"
    columns += ", draft_acceptance_rate, draft_acceptance_rate_macro, requests, rounds"
    found = one(home, f"SELECT {columns} FROM v_acceptance WHERE workload = 'code'")
    means = (9 / 4, (8 / 3 + 1) / 2, 1 + 6 / 4, 6 / 4, (2 + 0) / 2, 6 / 11, (6 / 9 + 0) / 2, 2, 4)
    assert found == pytest.approx(means)
    each = "request_id, al, accepted_per_round, draft_acceptance_rate"
    assert query(f"SELECT {each} FROM v_acceptance_request ORDER BY 1", home)[1] == [
        ("A", pytest.approx(8 / 3), 2.0, pytest.approx(6 / 9)),
        ("B", 1.0, 0.0, 0.0),
    ]
    assert one(home, f"SELECT {columns} FROM v_acceptance WHERE workload = 'all'") == found


def test_positions_are_null_where_no_round_reached_them_and_zero_where_all_failed(home, make):
    # position 1 passes 2 of 3; position 2 was reached twice and failed twice; nobody reached position 3
    ask(home, make, request("A"), *rounds("A", (3, 1), (3, 0), (2, 1)))
    columns = "position, drafted, reached, accepted, accept_uncond, accept_cond, accept_joint, accept_of_rounds"
    third = pytest.approx(2 / 3)
    assert query(f"SELECT {columns} FROM v_position WHERE workload = 'all' ORDER BY position", home)[1] == [
        (1, 3, 3, 2, third, third, third, third),
        (2, 3, 2, 0, 0.0, 0.0, 0.0, 0.0),
        (3, 2, 0, 0, 0.0, None, None, 0.0),
    ]
    ask(home, make, request("B"), *rounds("B", (1, 0)), key="k2")
    where = "artifact_key = 'k2' AND workload = 'all'"
    rates = "accept_uncond, accept_cond, accept_joint, accept_of_rounds"
    sql = f"SELECT {rates} FROM v_position WHERE {where} ORDER BY position"
    assert query(sql, home)[1] == [(0.0, 0.0, 0.0, 0.0), (None,) * 4, (None,) * 4]


def test_repetitions_of_a_prompt_are_one_prompt_in_a_mean_over_prompts(home, make):
    of_p, of_q = counted("A", 2, 6, 2, tokens_kept=5), counted("Q", 1, 3, 0, prompt_id="q", tokens_kept=2)
    ask(home, make, of_p, dataclasses.replace(of_p, request_id="B", rep=1), of_q)
    assert one(home, "SELECT al_macro, al FROM v_acceptance WHERE workload = 'all'") == ((2 + 1) / 2, 9 / 5)


def test_where_an_engine_left_rounds_out_there_is_no_acceptance_length(home, make):
    # 9 tokens of 2 rounds that accepted 2: at least five came from rounds without a guess, which nobody counted
    ask(home, make, counted("A", 2, 4, 2, tokens_kept=10, engine="vllm"), counted("B", 2, 4, 2, tokens_kept=5))
    columns = "kernel, al, al_macro, al_with_overshoot"
    assert one(home, f"SELECT {columns} FROM v_acceptance WHERE workload = 'all'") == ("plain", None, None, 2.0)


def test_positions_are_pooled_over_rounds_and_as_means_over_prompts(home, make):
    # A: 3 rounds, 1 passes.  B: 1 round, passes.
    ask(
        home,
        make,
        request("A"),
        request("B", prompt_id="q"),
        *rounds("A", (1, 1), (1, 0), (1, 0)),
        *rounds("B", (1, 1)),
    )
    sql = "SELECT accept_uncond, accept_uncond_macro, accept_cond, accept_cond_macro FROM v_position"
    macro = pytest.approx((1 / 3 + 1) / 2)
    assert one(home, f"{sql} WHERE workload = 'code' AND position = 1") == (0.5, macro, 0.5, macro)


def test_one_plus_the_sum_of_joint_rates_is_the_acceptance_length(home, make):
    pairs = [(3, 3), (3, 0), (3, 1), (3, 2), (3, 3), (3, 1)]
    accepted = sum(a for _, a in pairs)
    row = counted("A", len(pairs), 3 * len(pairs), accepted, tokens_kept=1 + len(pairs) + accepted)
    ask(home, make, row, *rounds("A", *pairs))
    where = "WHERE workload = 'all'"
    joint = one(home, f"SELECT sum(accept_joint), sum(accept_of_rounds) FROM v_position {where}")
    al, with_overshoot = one(home, f"SELECT al, al_with_overshoot FROM v_acceptance {where}")
    assert joint == pytest.approx((al - 1, al - 1)) and with_overshoot == pytest.approx(al)


def test_a_cut_round_counts_in_what_engines_report_and_in_no_rate_of_uncut_rounds(home, make):
    # the second round accepted 3 and kept 1: the end of the answer cut it
    cut = Round("A", 1, 0, 3, 3, 1, 0)
    ask(home, make, counted("A", 2, 6, 4, tokens_kept=4), *rounds("A", (3, 1)), cut)
    columns = "position, rounds, drafted, reached, accepted, accepted_in_all, accept_cond, accept_of_rounds"
    assert query(f"SELECT {columns} FROM v_position WHERE workload = 'all' ORDER BY position", home)[1] == [
        (1, 2, 1, 1, 1, 2, 1.0, 1.0),
        (2, 2, 1, 1, 0, 1, 0.0, 0.5),
        (3, 2, 1, 0, 0, 1, None, 0.5),
    ]
    assert one(home, "SELECT al, al_with_overshoot FROM v_acceptance WHERE workload = 'all'") == (1.5, 3.0)


def test_warm_up_errors_and_plain_decoding_do_not_count_as_drafting(home, make):
    ask(
        home,
        make,
        counted("A", 1, 3, 1, tokens_kept=3),
        counted("W", 1, 3, 3, is_warmup=True),
        counted("E", 1, 3, 3, status="error"),
        counted("P", 9, 0, 0, method="none", depth_k=0),
        counted("L", 9, 0, 0, depth_k=0),
        *rounds("A", (3, 1)),
        *rounds("W", (3, 3)),
        *rounds("E", (3, 3)),
        *rounds("P", (0, 0)),
    )
    assert one(home, "SELECT al, requests FROM v_acceptance WHERE workload = 'all'") == (2.0, 1)
    assert one(home, "SELECT rounds, accept_cond FROM v_position WHERE workload = 'all' AND position = 1") == (1, 1.0)


def test_what_an_engine_counted_is_told_by_the_same_names(home, make):
    counts = EngineAcceptance(
        "s", "t", "d", "eagle3", 3, "chat", 4, "vllm", "1", "prometheus", 9, 10, 30, 12, [7, 4, 1], None
    )
    empty = dataclasses.replace(counts, workload="code", num_rounds=0, num_drafted=0, num_accepted=0)
    ask(home, make, counts, empty)
    columns = "al_with_overshoot, accepted_per_round, draft_acceptance_rate, accept_of_rounds"
    found = query(f"SELECT {columns} FROM v_engine_acceptance ORDER BY workload", home)[1]
    assert found == [(2.2, 1.2, 0.4, [0.7, 0.4, 0.1]), (None, None, None, [None] * 3)]


def test_a_tree_and_a_chain_of_one_depth_are_two_arms(home, make):
    ask(home, make, counted("A", 1, 3, 1, tokens_kept=3), counted("B", 1, 12, 3, tree_budget=12, tokens_kept=5))
    sql = "SELECT tree_budget, al FROM v_acceptance WHERE workload = 'all' ORDER BY 1 NULLS FIRST"
    assert query(sql, home)[1] == [(None, 2.0), (12, 4.0)]


def test_speed_and_speedup_are_named_by_their_base_and_taken_against_the_best_plain_arm(home, make):
    plain = {"method": "none", "draft_key": "", "depth_k": 0, "identical": None}
    ask(
        home,
        make,
        request("S", decode_ns=500_000_000),
        request("P", kernel="plain", **plain),
        request("Q", kernel="prepacked", decode_ns=800_000_000, **plain),
    )
    assert one(
        home,
        "SELECT tokens_per_s, tokens_per_s_e2e, ttft_ms_p50, tpot_ms_p50 FROM v_speed"
        " WHERE method = 'eagle3' AND workload = 'code'",
    ) == (pytest.approx((10 / 0.5, 11 / 0.6, 100.0, 50.0)))
    found = one(
        home,
        "SELECT plain_kernel, speedup, speedup_e2e FROM v_speedup WHERE workload = 'all'",
    )
    assert found == ("prepacked", pytest.approx(0.8 / 0.5), pytest.approx(0.9 / 0.6))


def test_an_engines_speedup_is_taken_against_plain_decoding_of_that_engine(home, make):
    plain = {"method": "none", "draft_key": "", "depth_k": 0, "identical": None}
    vllm, sglang = ({"engine": name, "kernel": f"{name} 1", "num_threads": 0} for name in ("vllm", "sglang"))
    rows = [
        request("V", decode_ns=500_000_000, **vllm),
        request("P", decode_ns=800_000_000, **plain, **vllm),
        request("S", decode_ns=500_000_000, **sglang),
        request("Q", decode_ns=400_000_000, **plain, **sglang),
        request("L", decode_ns=500_000_000, engine="llama.cpp", kernel="llama.cpp 1", num_threads=0),
    ]
    ask(home, make, *rows)
    sql = "SELECT engine, plain_kernel, speedup FROM v_speedup WHERE workload = 'all' ORDER BY 1"
    assert query(sql, home)[1] == [
        ("llama.cpp", None, None),
        ("sglang", "sglang 1", pytest.approx(0.4 / 0.5)),
        ("vllm", "vllm 1", pytest.approx(0.8 / 0.5)),
    ]


def test_parity_counts_ties_apart_from_divergences(home, make):
    diverged = {"identical": False, "first_divergence": 7, "divergence_shortfall": 0.5}
    ask(home, make, request("A"), request("B", tie=True, **diverged), request("C", tie=False, **diverged))
    assert one(home, "SELECT compared, identical, ties, divergences, earliest_divergence FROM v_parity") == (
        3,
        1,
        1,
        1,
        7,
    )


def test_a_confirmed_depth_replaces_its_prediction_and_shows_the_gap(home, make):
    ask(home, make, depth_eval(speedup_meas=1.4), key="confirmed")
    ask(home, make, depth_eval(), key="predicted-later")
    assert one(home, "SELECT artifact_key, pred_error FROM v_depth") == ("confirmed", pytest.approx(1.54 / 1.4 - 1))


def test_the_latest_choice_is_the_newest_of_each_pipeline_and_method(home, make):
    ask(home, make, choice(), choice(method="mtp", depth_k=1), key="a")
    ask(home, make, choice(selection_id="sel2", depth_k=4, reasons=[]), key="b")
    assert query("SELECT method, depth_k FROM v_latest ORDER BY method", home)[1] == [("eagle3", 4), ("mtp", 1)]


def test_the_map_counts_every_position_once(home, make):
    ask(home, make, AcceptanceMap("t", "d", "mtp", "p", "code", 2, 3, 4, [2, 0, 1], [2, 1, 1], 0.1, "float32"))
    assert query(
        "SELECT position, positions, accept_joint_everywhere, accept_joint_teacher_forced FROM v_map"
        " WHERE workload = 'all' ORDER BY 1",
        home,
    )[1] == [(1, 3, pytest.approx(2 / 3), 1.0), (2, 3, pytest.approx(1 / 3), pytest.approx(1 / 3))]


@pytest.mark.parametrize(
    "sql",
    [
        "COPY (SELECT 1) TO 'x.parquet'",
        "CREATE TABLE x AS SELECT 1",
        "SELECT 1; SELECT 2",
        "SET enable_external_access = true",
        "ATTACH 'x.db'",
        "EXPORT DATABASE '{home}/history/x'",
        "EXPLAIN ANALYZE COPY (SELECT 1) TO '{home}/history/x.csv'",
        "WITH a AS (COPY (SELECT 1) TO '{home}/history/x.csv') SELECT 1",
        "WITH a AS (INSERT INTO run SELECT * FROM run RETURNING *) SELECT * FROM a",
        "SELECT * FROM enable_logging(storage='file', storage_path='{home}/history/logs')",
        "SELECT * FROM query('COPY (SELECT 1) TO ''{home}/history/x.csv''')",
        "SELECT * FROM read_duckdb('{home}/history/x.db')",
        "SELECT * FROM sql",
        "SELECT getenv('HOME')",
        "LOAD httpfs",
        "PRAGMA database_list",
        "CALL checkpoint()",
        "PREPARE p AS SELECT 1",
        "INSTALL httpfs",
        "",
        "SELECT * FROM read_text('/etc/hostname')",
        "SELECT * FROM '/etc/hostname'",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM read_text('{home}/../secret.txt')",
        "SELECT * FROM read_text('{home}/history/../../secret.txt')",
    ],
)
def test_a_question_reads_and_stays_inside_the_history(home, tmp_path, sql):
    (tmp_path / "secret.txt").write_text("secret")
    with pytest.raises(UserError) as refused:
        query(sql.format(home=home), home)
    assert "\n" not in str(refused.value) and "v_speedup" in str(refused.value)
    assert not [path for path in home.rglob("*") if path.is_file() and path.suffix not in (".parquet", ".lock")]


@pytest.mark.parametrize(
    "sql",
    [
        "SHOW TABLES",
        "DESCRIBE run",
        "SUMMARIZE run",
        "VALUES (1)",
        "WITH a AS (FROM v_run) FROM a",
        "EXPLAIN FROM v_run",
        "FROM newest('arti' || 'fact')",
        "FROM query_table($table)",
    ],
)
def test_whatever_reads_is_a_question(home, sql):
    assert query(sql, home, {"table": "v_choice"} if "$table" in sql else None)[0]


@pytest.mark.parametrize("catalog", ["(SHOW TABLES)", "duckdb_views() WHERE NOT internal"])
def test_a_statement_makes_what_it_names_and_lists_of_names_are_whole(home, catalog):
    """Tables and views are made when they are first named."""
    with open_history(home) as run_query:
        assert run_query("FROM v_speedup", {})[0]
        _, listed = run_query(f"FROM {catalog}", {})
    names = {value for row in listed for value in row if isinstance(value, str)}
    assert set(view_names()) <= names


def test_wrong_sql_costs_one_line_that_names_what_there_is(home):
    with pytest.raises(UserError, match=r"^query: .*nosuch.*Views: .*v_acceptance") as refused:
        query("SELECT nosuch FROM v_run", home)
    assert "\n" not in str(refused.value)


def test_every_view_answers_on_an_empty_history(home):
    views = view_names()
    with open_history(home) as run_query:
        for view in views:
            assert run_query(f"SELECT * FROM {view}", {})[1] == []


def everything(home: Path, *views: str) -> dict[str, list[Any]]:
    views = views or (*all_tables(), "v_acceptance", "v_depth")
    with open_history(home) as run_query:
        return {view: sorted(run_query(f"SELECT * FROM {view}", {})[1], key=repr) for view in views}


def test_a_deleted_history_is_rebuilt_from_the_store_as_it_was(home, make):
    ask(home, make, request("A"), *rounds("A", (3, 2), (3, 0)), key="a")
    ask(home, make, depth_eval(), choice(), key="b")
    before = everything(home)
    assert before["v_depth"] and before["artifact"]
    shutil.rmtree(history_dir(home))
    counts = rebuild(home, Store(home))
    assert counts["artifacts"] == 2 and counts["refused"] == 0
    assert everything(home) == before


def test_remembering_twice_changes_nothing(home, make):
    artifact = make("a", rows=[request("A"), *rounds("A", (3, 2))])
    record_artifact(home, artifact.path)
    before = everything(home, "request", "artifact")
    record_artifact(home, artifact.path)
    assert everything(home, "request", "artifact") == before and len(before["request"]) == 1


def test_tokens_of_an_engine_s_first_chunk_are_not_those_of_decoding(home, make):
    # 5 of 11 tokens came at once, 6 in 0.5 s; the other answer came in one chunk, without a time of decoding
    chunk = request("A", first_chunk_tokens=5, decode_ns=500_000_000)
    ask(home, make, chunk, request("B", first_chunk_tokens=11, decode_ns=0))
    sql = "SELECT tokens_per_s, tpot_ms_p50, tpot_ms_p99, requests FROM v_speed WHERE workload = 'all'"
    assert one(home, sql) == pytest.approx((12.0, 500 / 6, 500 / 6, 2))
    assert one(home, "SELECT tokens, decode_ns, requests FROM v_arm_prompt") == (6, 500_000_000, 1)
