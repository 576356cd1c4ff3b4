"""A number over time: found in whatever view has it, in series that differ in what the view tells apart."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import re
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from components.contract import UserError
from components.rows import DepthChoice, EngineAcceptance, write_rows
from flows.cli import main
from flows.commands.trend import find_trend, spark_lines, table
from storage.artifacts.store import Store
from storage.history.files import write_record
from storage.history.query import open_history
from storage.history.records import RunRow, StepRow
from storage.history.write import record_artifact

CHOICE = DepthChoice("sel", "t", "d", "mtp", "all", 1, 3, "r", 0.01, 1.0, 1.2, 1.1, 1.3, 1.25, 1.2, 1.3, 0.0, "use", [])


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A history of three choices of mtp at other depths, on two machines, and one of eagle3."""
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path))
    store = Store(tmp_path)
    for number, (method, depth, speed) in enumerate(
        [("mtp", 3, 1.2), ("mtp", 2, 1.3), ("eagle3", 1, 1.1), ("mtp", 3, 1.5)]
    ):
        out, _ = store.open_staging(f"k{number}")
        write_rows(
            out,
            [dataclasses.replace(CHOICE, selection_id=f"s{number}", method=method, depth_k=depth, speedup_meas=speed)],
        )
        record = {
            "pipeline": "p",
            "step": "verdict",
            "run_id": f"r{number}",
            "machine": {"machine_id": f"m{number % 2}"},
        }
        record_artifact(tmp_path, store.commit(f"k{number}", "DepthPolicy", {"score": number / 2}, record).path)
    return tmp_path


def test_the_chosen_depth_may_differ_from_run_to_run_in_one_series(home: Path) -> None:
    found = find_trend(home, "speedup_meas", {}, 50)
    assert found.metric == "v_choice.speedup_meas" and found.series() == ["mtp", "eagle3"]
    columns, rows = table(found, "runs")
    assert [(row[0], row[2]) for row in rows] == [("mtp", 1.2), ("mtp", 1.3), ("mtp", 1.5), ("eagle3", 1.1)]
    assert rows[1][columns.index("change")] == pytest.approx(1.3 / 1.2 - 1) and rows[0][columns.index("lo")] == 1.2
    assert spark_lines(found)[0].startswith("▁▃█  1.2 -> 1.5")


def test_machines_and_versions_are_summed_up(home: Path) -> None:
    found = find_trend(home, "v_choice.speedup_meas", {"method": "mtp"}, 50)
    assert table(found, "machines")[1] == [["all", "m0", 1, 1.2, 1.2, 1.2, 1.2], ["all", "m1", 2, 1.5, 1.4, 1.3, 1.5]]
    assert len(table(found, "versions")[1]) == 1
    assert len(find_trend(home, "speedup_meas", {"method": "mtp"}, 2).dots) == 2, "the last two"


def test_facts_of_artifacts_are_metrics_too(home: Path) -> None:
    assert [dot.value for dot in find_trend(home, "info.score", {}, 50).dots] == [0.0, 0.5, 1.0, 1.5]


@pytest.mark.parametrize(
    ("metric", "where", "says"),
    [
        ("speedup_maes", {}, "did you mean 'speedup_meas'"),
        ("v_choice.verdict", {}, "no view has a number 'v_choice.verdict'"),
        ("info.x') FROM run --", {}, "a fact has a name of letters"),
        ("speedup_meas", {"metod": "mtp"}, "v_choice has no column 'metod'"),
    ],
)
def test_what_is_no_metric_costs_one_line(home: Path, metric: str, where: dict[str, str], says: str) -> None:
    with pytest.raises(UserError) as refused:
        find_trend(home, metric, where, 50)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_the_command_prints_a_table_csv_json_and_draws_a_page(home: Path, capsys: Any, tmp_path: Path) -> None:
    assert main(["trend", "speedup_meas", "--picture", str(tmp_path / "trend.html")]) == 0
    assert "▁▃█" in capsys.readouterr().out
    page = (tmp_path / "trend.html").read_text()
    assert page.count("<title>") == 1 + 4 and not re.search(r"https?:|<script|<link", page)
    assert main(["trend", "speedup_meas", "--over", "machines", "--format", "csv"]) == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 3
    assert main(["trend", "speedup_meas", "-w", "method=mtp", "--format", "json"]) == 0
    assert [row["value"] for row in json.loads(capsys.readouterr().out)] == [1.2, 1.3, 1.5]
    assert main(["trend", "tokens_per_s", "--picture", str(tmp_path / "x.html")]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_of_a_night_s_two_drafters_the_newest_counts_in_whatever_order_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    for key in ("b-old", "a-new"):
        store.open_staging(key)
        record_artifact(tmp_path, store.commit(key, "Draft", {"method": "mtp"}, {"run_id": key}).path)
    for night in range(2):
        out, _ = store.open_staging(f"night{night}")
        rows = [
            dataclasses.replace(CHOICE, draft_key=key, speedup_meas=speed)
            for key, speed in (("a-new", 1.5), ("b-old", 1.2))
        ]
        write_rows(out, rows if night else rows[::-1])
        record = {"pipeline": "p", "run_id": f"r{night}"}
        record_artifact(tmp_path, store.commit(f"night{night}", "DepthPolicy", {}, record).path)
    # both nights confirm one selection: of the view the newer stands
    assert [dot.value for dot in find_trend(tmp_path, "speedup_meas", {}, 50).dots] == [1.5]
    assert [dot.value for dot in find_trend(tmp_path, "depth_choice.speedup_meas", {}, 50).dots] == [1.5, 1.5]


def test_what_was_measured_again_is_a_value_for_each_time(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for number, speed in enumerate((1.2, 1.3, 1.1)):
        out, _ = store.open_staging("same")
        write_rows(out, [dataclasses.replace(CHOICE, speedup_meas=speed)])
        record = {"pipeline": "p", "run_id": f"r{number}", "machine": {"machine_id": f"m{number}"}}
        record_artifact(tmp_path, store.commit("same", "DepthPolicy", {"score": speed}, record).path)
    found = find_trend(tmp_path, "speedup_meas", {}, 50)
    assert [(dot.value, dot.run, dot.machine) for dot in found.dots] == [
        (1.2, "r0", "m0"),
        (1.3, "r1", "m1"),
        (1.1, "r2", "m2"),
    ]
    assert [dot.value for dot in find_trend(tmp_path, "info.score", {}, 50).dots] == [1.2, 1.3, 1.1]


def test_what_an_engine_counted_is_a_series_for_each_engine_load_and_source(tmp_path: Path) -> None:
    store = Store(tmp_path)
    out, _ = store.open_staging("k")
    write_rows(
        out,
        [
            EngineAcceptance("s", "t", "d", "mtp", 3, "all", load, engine, "1", source, 9, 10, 30, 12, [7, 4, 1], None)
            for engine, load, source in [
                ("vllm", 1, "prometheus"),
                ("vllm", 4, "prometheus"),
                ("sglang", 1, "responses"),
            ]
        ],
    )
    record_artifact(tmp_path, store.commit("k", "Measurements", {}, {"run_id": "r"}).path)
    found = find_trend(tmp_path, "v_engine_acceptance.al_with_overshoot", {}, 50)
    assert sorted(found.series()) == [
        "sglang, concurrency=1, responses",
        "vllm, concurrency=1, prometheus",
        "vllm, concurrency=4, prometheus",
    ]


def test_models_are_lines_of_their_own_by_name_whatever_key_they_were_loaded_under(tmp_path: Path) -> None:
    store = Store(tmp_path)
    loaded = {"uses": "targets.load_target", "run_id": "r"}
    for key, model, digest in (
        ("t0", "/models/mine/", "aaaaaaaaaa"),
        ("t1", "/models/mine/", "aaaaaaaaaa"),  # the same files, loaded by another version of the code
        ("t2", "/other/mine", "bbbbbbbbbb"),
        ("t3", "owner/name", None),  # from before models had a digest
    ):
        store.open_staging(key)
        info = {"model": model, **({"digest": digest} if digest else {})}
        record_artifact(tmp_path, store.commit(key, "Target", info, loaded).path)
    for number, target in enumerate(("t0", "t1", "t2", "t3", "elsewhere")):
        out, _ = store.open_staging(f"k{number}")
        write_rows(out, [dataclasses.replace(CHOICE, selection_id=f"s{number}", target_key=target, speedup_meas=1.5)])
        record = {"pipeline": "p", "run_id": f"r{number}", "inputs": {"target": target}}
        record_artifact(tmp_path, store.commit(f"k{number}", "DepthPolicy", {"score": 1.0}, record).path)
    lines = {"mine aaaaaaaa": 2, "mine bbbbbbbb": 1, "owner/name": 1, "elsewhere": 1}
    found = find_trend(tmp_path, "speedup_meas", {}, 50)
    assert {series: len(found.of(series)) for series in found.series()} == lines
    assert len(find_trend(tmp_path, "speedup_meas", {"model": "owner/name"}, 50).dots) == 1
    assert {"mine aaaaaaaa", "owner/name"} < {*find_trend(tmp_path, "info.score", {}, 50).series()}


def test_every_view_that_knows_a_target_has_the_name_of_its_model(tmp_path: Path) -> None:
    with open_history(tmp_path) as ask:
        sql = (
            "SELECT table_name, column_name FROM duckdb_columns() WHERE NOT internal AND starts_with(table_name, 'v_')"
        )
        columns: dict[str, set[str]] = {}
        for view, column in ask(sql, {})[1]:
            columns.setdefault(view, set()).add(column)
    assert len(columns) > 15
    assert [view for view, names in columns.items() if "target_key" in names and "model" not in names] == []


def test_runs_of_one_pipeline_over_two_models_are_two_lines(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key, model in (("t0", "one"), ("t1", "two")):
        store.open_staging(key)
        record_artifact(tmp_path, store.commit(key, "Target", {"model": model}, {"run_id": "r"}).path)
    now = datetime(2026, 1, 1)
    for number, target in enumerate(("t0", "t1", "t0")):
        run_id = f"r{number}"
        made_by = (run_id, "p", "target", "targets.load_target", "Target", target)
        step = StepRow(*made_by, False, "", "completed", 1.0, "{}", "{}", now)
        write_record(tmp_path, "step", f"step-{number}", [step])
        run = RunRow(
            run_id, "p", "{}", "direct", "completed", None, 1, 0, now, now + timedelta(minutes=number), None, "1"
        )
        write_record(tmp_path, "run", run_id, [run])
    found = find_trend(tmp_path, "v_run.seconds", {}, 50)
    assert {series: len(found.of(series)) for series in found.series()} == {"one": 2, "two": 1}
