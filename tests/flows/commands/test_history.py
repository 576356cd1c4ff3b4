"""What changed between two runs, what a version was made from, and a copy of all, told of nights that are known."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from toy_garden import Cli
from two_nights import NIGHTS, key_of, two_nights

from components.publish.card.lineage import ArtifactRecord, sources_of
from storage.artifacts.store import Store
from storage.history.files import compact
from storage.history.query import query, run_named_query


@pytest.fixture
def nights(home: Path) -> Path:
    two_nights(home)
    return home


def test_diff_names_what_changed_and_nothing_else(nights: Path, draftsmith: Cli) -> None:
    code, out, err = draftsmith("diff", "builtin@previous", "builtin@champion", "--json")
    assert (code, err) == (0, "")
    told = json.loads(out)
    assert (told["before"]["run_id"], told["after"]["run_id"]) == (NIGHTS[1], NIGHTS[2])
    changes = {(row["what"], row["name"]): (row["before"], row["after"], row["steps"]) for row in told["changes"]}
    made = "answers, draft, end_to_end, prompts, release, verdict"
    assert changes.pop(("parameter", "limit")) == ("10", "20", "")
    assert changes.pop(("setting", "num_steps")) == ("100", "200", "draft")
    assert changes.pop(("setting", "num_train")) == ("40", "50", "prompts")
    assert changes.pop(("data", "num_train")) == ("40", "50", "prompts")
    assert changes.pop(("data", "key"))[2] == "prompts"
    assert changes.pop(("library", "torch")) == ("2.12.0", "2.13.0", made)
    for step in made.split(", "):
        assert changes.pop(("code", f"{step}.py: {step}")) == ("1" * 12, "2" * 12, step), (
            "what is shared did not change"
        )
    assert changes == {}
    assert [(row["side"], row["depth_k"], row["al"], row["speedup_meas"]) for row in told["outcomes"]] == [
        ("before", 2, 2.39, pytest.approx(1.2)),
        ("after", 2, 2.39, pytest.approx(1.3)),
    ]
    of_target = next(row for row in told["times"] if row["step"] == "target")
    assert (of_target["seconds_before"], of_target["seconds_after"], of_target["making_seconds_after"]) == (
        11,
        None,
        11,
    )


def test_diff_takes_runs_pipelines_keys_and_versions_and_says_it_in_words(nights: Path, draftsmith: Cli) -> None:
    by_version = draftsmith("diff", "builtin@1", "builtin@2")
    assert by_version[0] == 0 and "1.20x [1.05, 1.40]" in by_version[1] and "(11 s) reused" in by_version[1]
    for a, b in (("20261125", "20261126"), (key_of("draft 1")[:8], key_of("release 2")[:10]), (NIGHTS[2], "")):
        assert draftsmith("diff", *filter(None, (a, b)))[1] == by_version[1]
    code, out, _ = draftsmith("diff")  # the newest run was never planned: nothing to compare but its end
    assert code == 0 and NIGHTS[3] in out and "failed" in out
    assert "are the same run" in draftsmith("diff", NIGHTS[1], "builtin@1")[2]
    assert "several runs" in draftsmith("diff", "2026", "nightly")[2]
    assert "diff: nobody@champion means no run that has ended" in draftsmith("diff", "nobody@champion", NIGHTS[1])[2]
    assert "is the first run of nightly" in draftsmith("diff", NIGHTS[1])[2]


def test_lineage_draws_what_a_version_was_made_from_once_each(nights: Path, draftsmith: Cli) -> None:
    code, out, err = draftsmith("lineage", "builtin@champion")
    assert (code, err) == (0, "")
    assert out.startswith(
        "builtin version 2: eagle3 at depth 2, measured 1.30x [1.05, 1.40], verdict use\npublish.export"
    )
    assert "source chats.jsonl: 50 rows read, 20 kept, MIT" in out and "num_steps=200" in out
    assert "source python-stdlib: 100 rows read, 55 kept, PSF-2.0" in out and "method=eagle3" not in out
    assert "1 other drafter was measured beside it" in out and key_of("draft 1")[:12] not in out
    whole = [line for line in out.splitlines() if "(above)" not in line]
    for name in ("release 2", "draft 2", "target", "chats", "prompts 2", "answers 2", "verdict 2", "end_to_end 2"):
        assert sum(key_of(name)[:12] in line for line in whole) == 1, name
    assert f"Draft {key_of('draft 1')[:12]}" in draftsmith("lineage", key_of("release 2")[:12])[1]
    told = json.loads(draftsmith("lineage", "builtin@1", "--json")[1])
    assert {row["version"] for row in told["artifacts"]} == {1}
    code, _, err = draftsmith("lineage", "builtin@nowhere")
    assert code == 2 and "the history has none; `draftsmith query champions` lists the versions" in err


def test_sources_are_those_that_cards_tell(nights: Path) -> None:
    for name in ("prompts 2", "chats"):
        content = Store(nights).record_of(key_of(name))
        record = ArtifactRecord(key_of(name), True, content["kind"], content["record"]["uses"], content["info"])
        told = [(one.name, one.licence, one.rows_read, one.rows_kept) for one in sources_of(record)]
        sql = "SELECT source, licence, rows_read, rows_kept FROM v_source WHERE artifact_key = $key"
        assert query(sql, nights, {"key": key_of(name)})[1] == told
    _, rows = run_named_query(nights, "sources", {"model": "builtin"})
    assert [row[:4] for row in rows] == [
        ("builtin", 2, "python-stdlib", "PSF-2.0"),
        ("builtin", 2, "chats.jsonl", "MIT"),
    ]


def test_machines_of_one_name_are_told_apart(nights: Path) -> None:
    names = query("SELECT machine_name FROM v_machine ORDER BY 1", nights)[1]
    assert names == [("Toy CPU, 2 cores, 8 GiB beefbe",), ("Toy CPU, 2 cores, 8 GiB f00df0",)]


def test_a_curve_is_thinned_evenly_and_keeps_its_end(nights: Path) -> None:
    asked = {"artifact": key_of("draft 2")[:12], "points": "4"}
    _, rows = run_named_query(nights, "losses", asked)
    assert [row[3:5] for row in rows] == [(50, 8.5), (100, 8.0), (150, 7.5), (200, 7.0)]
    _, rows = run_named_query(nights, "losses", {"run": NIGHTS[1], "name": "", "points": "1000"})
    assert len(rows) == 200 and {row[2] for row in rows} == {"loss", "held_out_al"}


def test_an_exported_history_is_opened_by_duckdb_alone_and_answers_the_same(nights: Path, draftsmith: Cli) -> None:
    file = nights.parent / "out.duckdb"
    for _ in (1, 2):
        code, out, err = draftsmith("history", "export", file)
        assert (code, err) == (0, "") and out.endswith(f"and the views over them: {file}\n")
    with duckdb.connect(str(file), read_only=True) as plain:
        for name in ("run", "v_choice", "v_step", "v_alias", "v_acceptance", "v_training", "v_source"):
            ours = sorted(map(repr, query(f"FROM {name}", nights)[1]))
            assert sorted(map(repr, plain.execute(f"FROM {name}").fetchall())) == ours != []
        silent = "SELECT count(*) FROM duckdb_columns() WHERE NOT internal AND comment IS NULL"
        assert plain.execute(silent).fetchall() == [(0,)]
        key = f"lineage_of(['{key_of('release 2')}'], [])"
        assert len(plain.execute(f"FROM {key}").fetchall()) > 7
    (nights.parent / "mine.txt").write_text("mine")
    assert "is no DuckDB database" in draftsmith("history", "export", nights.parent / "mine.txt")[2]


def test_the_parquet_files_are_read_by_duckdb_alone_as_the_docs_say(nights: Path) -> None:
    for _ in (1, 2):
        with duckdb.connect() as plain:
            for table in ("step", "artifact", "depth_choice", "training_metric"):
                files = f"{nights}/history/{table}/*.parquet"
                sql = f"SELECT count(*) FROM read_parquet('{files}', union_by_name = true)"
                assert plain.execute(sql).fetchall() == query(f"SELECT count(*) FROM {table}", nights)[1] != [(0,)]
        compact(nights, 0, whole=True)
