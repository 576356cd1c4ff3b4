"""What the Prefect UI shows of a study: every depth, charts that stand alone, and nothing that breaks its Markdown."""

from __future__ import annotations

import base64
import dataclasses
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from collected_chats import collect, context, rows, write_lines
from report_study import make_report_study

from components.contract import Measurements, Prompts
from components.data import deduplicate, mix_chats
from components.data.formats.chats import dropped_examples
from components.policy import Gate, GateCheck, read_policy
from components.report.pages.drafter import prefill_table
from components.report.prefect_cards import (
    acceptance_table,
    chats_card,
    cost_table,
    decision_card,
    measurements_card,
    mix_card,
    speed_table,
    verdict_card,
)
from components.rows import AcceptanceMap, CostCell, DepthEval, Request, read_rows, write_rows
from components.speedup.policy_markdown import write_policy


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_report_study(tmp_path_factory.mktemp("study"))


def test_a_decision_shows_every_depth_each_measured_arm_and_charts_that_stand_alone(study: dict[str, Any]) -> None:
    card = decision_card(study["policy"])
    plain = card.replace("\\", "")
    for e in read_rows(study["policy"].path, DepthEval):
        if e.workload == "all" and e.depth_k:
            assert f"{e.al:.2f} [{e.al_lo:.2f}, {e.al_hi:.2f}]" in plain, f"{e.method} k={e.depth_k}"
    assert "promotion gate" in card and "measured end to end" in card
    pictures = re.findall(r"!\[[^\]]+\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", card)
    assert len(pictures) == 10, "five charts for each of two drafters"
    for picture in pictures:
        svg = ElementTree.fromstring(base64.b64decode(picture))
        assert svg.tag == "{http://www.w3.org/2000/svg}svg"
        colours = set(re.findall(r"var\((--\w+)\)", base64.b64decode(picture).decode()))
        defined = set(re.findall(r"(--\w+): #", base64.b64decode(picture).decode()))
        assert colours <= defined, "a chart in an image sees no style sheet but its own"


def test_the_card_of_a_run_says_verdict_links_chart_and_what_the_gate_measured_asked_and_wants(
    study: dict[str, Any], tmp_path: Path
) -> None:
    policy = read_policy(study["policy"].path)
    failed = GateCheck("prediction_gap", False, 0.31, "<= 0.15")
    (tmp_path / "refused").mkdir()
    write_policy(tmp_path / "refused", dataclasses.replace(policy, gate=Gate(False, [failed])))
    refused = dataclasses.replace(study["policy"], path=tmp_path / "refused")
    card = verdict_card(refused, ["registered m version 2"], [("the report", "http://here/reports/k/")])
    first, *_ = card.splitlines()
    assert first.startswith("## Use ") and "[the report](http://here/reports/k/)" in card
    assert "speedup by depth, predicted and measured](data:image/svg" in card
    row = next(line for line in card.splitlines() if "gap between predicted" in line).replace("\\", "")
    assert "| 0.31 | at most 0.15 | measure it again, best on a machine with nothing else to do |" in row
    assert card.endswith("- registered m version 2")
    assert verdict_card(None, [], []) == "", "a run without a decision has nothing to say here"


def test_a_policy_that_was_not_yet_confirmed_has_a_card_too(study: dict[str, Any]) -> None:
    card = decision_card(study["chosen"])
    assert "promotion gate" not in card and "data:image/svg+xml" in card


def test_each_kind_of_measurement_has_its_table_and_strange_names_stay_in_their_cell(
    study: dict[str, Any], tmp_path: Path
) -> None:
    assert "### acceptance" in measurements_card(study["acceptance"][0])
    assert "### cost of a step" in measurements_card(study["cost"][0])
    end_to_end = measurements_card(study["end_to_end"])
    assert "### speed end to end" in end_to_end and "### reasons to doubt" in end_to_end
    row = AcceptanceMap("t", "d", "a|b\n<script>", "p", "chat", 3, 3, 4, [0, 1, 3, 2], [0] * 4, 0.0, "float32")
    write_rows(tmp_path, [row])
    card = measurements_card(Measurements(key="k", path=tmp_path))
    lines = [line for line in card.splitlines() if line.startswith("|")]
    assert len(lines) == 4 and len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1
    empty = tmp_path / "empty"
    empty.mkdir()
    assert measurements_card(Measurements(key="k", path=empty)) == ""


def test_shares_and_speeds_are_those_of_the_rows() -> None:
    row = AcceptanceMap("t", "d", "mtp", "p", "chat", 3, 3, 5, [0, 1, 3, 2], [0] * 4, 0.0, "float32")
    assert acceptance_table([row]).rows[0] == ["mtp", "all", "1", "4", "1.50", "75%", "50%", "25%"]
    common: dict[str, Any] = dict.fromkeys(Request.__dataclass_fields__, 0)
    common |= {"method": "mtp", "kernel": "k", "dtype": "float32", "status": "ok", "is_warmup": False}
    timed = Request(**{**common, "tokens_kept": 11, "decode_ns": 2_000_000_000, "identical": True})
    failed = Request(**{**common, "status": "error", "identical": None})
    assert speed_table([timed, failed]).rows == [["mtp", "0", "k", "float32", "2", "5.0", "1 of 1", "1"]]


def test_a_tree_and_a_chain_two_batches_and_two_drafters_are_told_apart() -> None:
    chain = AcceptanceMap("t", "d", "mtp", "p", "chat", 3, 3, 4, [0, 1, 3, 2], [0] * 4, 0.0, "float32")
    tree = dataclasses.replace(chain, accepted=[3] * 4, tree_budget=12)
    assert acceptance_table([chain, tree]).rows == acceptance_table([chain]).rows

    cell = CostCell("t", "d", "mtp", "verify", 3, 1, 4, 64, 0, 9, 1e6, 0.0, "float32", "plain", 1)
    costs = cost_table([cell, dataclasses.replace(cell, tree_budget=12, median_ns=3e6)])
    assert [row[3:6] for row in costs.rows] == [["chain", "3", "1.00"], ["tree of 12", "3", "3.00"]]
    assert "shape" not in cost_table([cell]).header

    prefill = dataclasses.replace(cell, phase="draft_prefill", num_rows=48)
    table = prefill_table([prefill, dataclasses.replace(prefill, draft_key="e", median_ns=3e6)])
    assert table is not None
    assert [(row[0], row[3], row[4]) for row in table.rows] == [("mtp d", "48", "1"), ("mtp e", "48", "3")]

    common: dict[str, Any] = dict.fromkeys(Request.__dataclass_fields__, None)
    common |= {"method": "mtp", "draft_key": "d", "depth_k": 3, "kernel": "k", "dtype": "float32", "batch_size": 1}
    common |= {"status": "ok", "tokens_kept": 11, "decode_ns": 10**9}
    requests = [Request(**{**common, **changes}) for changes in ({}, {"tree_budget": 12}, {"batch_size": 4})]
    shown = speed_table([*requests, Request(**{**common, "first_chunk_tokens": 6, "batch_size": 8})])
    assert shown.header[:4] == ["arm", "shape", "batch", "depth"]
    assert [(*row[1:3], row[7]) for row in shown.rows] == [
        ("chain", "1", "10.0"),
        ("chain", "4", "10.0"),
        ("chain", "8", "5.0"),
        ("tree of 12", "1", "10.0"),
    ]


STRANGE = "a|b`<script>_"


def cells(card: str, first: str) -> list[str]:
    """The cells of the table row that begins so."""
    line = next(line for line in card.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip().replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_what_was_read_kept_dropped_and_mixed_is_shown_by_source(tmp_path: Path) -> None:
    bad = [{"prompt": "Who <b>is</b> | there?", "response": ""}, {"score": 3}]
    town = write_lines(tmp_path / "in" / "town.jsonl", [*rows(60), *bad])
    more = write_lines(tmp_path / "more.jsonl", rows(50, 30))
    (tmp_path / "in" / "empty.jsonl").touch()
    chats = collect(tmp_path / "chats", {"path": str(town.parent), "name": STRANGE}, str(more))
    card = chats_card(chats, dropped_examples(chats.path))
    found = cells(card, "a\\|b")
    assert found == [STRANGE, "63", "60", "empty file 1, empty turn 1, unknown shape 1", "1"]
    assert cells(card, "more")[:3] == ["more", "50", "50"]
    assert card.startswith("110 of 113 rows kept.") and "<script>" not in card.replace("\\<", "")
    assert {line.count("|") - line.count("\\|") for line in card.splitlines() if line.startswith("| a\\|b")} == {6}
    assert cells(card, "empty")[0] in ("empty_turn", "empty_file") and "town.jsonl:61" in card

    kept = deduplicate([chats], ctx=context(tmp_path / "kept"))
    told = chats_card(kept, [])
    assert told.startswith("80 of 110 rows kept.") and "Dropped: exact duplicate 30." in told

    few = {"num_validation": 4, "num_test": 2, "num_warm_up": 0, "evaluation_percent": 20}
    mix = mix_chats([kept], weights={STRANGE: 1, "more": 1}, by="rows", **few, ctx=context(tmp_path / "mix"))  # type: ignore[arg-type]
    card = mix_card(mix)
    name, asked, got, num_rows, *_, read = cells(card, "a\\|b")
    assert (name, asked) == (STRANGE, "50.0%") and abs(float(got[:-1]) - 50) < 5
    entry = next(entry for entry in mix.info["mix"] if entry["name"] == STRANGE)
    assert (num_rows, read) == (str(entry["rows"]), str(entry["rows_read"]))
    assert "Left out: " in card and "<script>" not in card.replace("\\<", "")


def test_prompts_that_are_no_mix_have_no_card(tmp_path: Path) -> None:
    assert mix_card(Prompts("p", tmp_path, {"num_train": 3})) == ""
