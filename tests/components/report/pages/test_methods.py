"""Methods side by side: every drafter has its line, nothing unknown is claimed, trees stand beside their chains."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from report_study import make_ctx, make_methods_study

from components.contract import DepthPolicy, UserError
from components.report import compare_methods
from components.report.prefect_cards import page_card
from components.rows import QualityFlag, write_rows


def test_ten_methods_have_a_line_each_and_a_series_in_every_chart(tmp_path: Path) -> None:
    drafts, policy = make_methods_study(tmp_path, 10)
    page = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "out", "m" * 64))
    with (page.path / "tables" / "methods.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [d.info["method"] for d in drafts]
    assert rows[0]["parameters"] == "1,000,000" and rows[0]["training minutes"] == "1.5"
    assert rows[-1]["parameters"] == "0" and rows[-1]["training minutes"] == "-", "prompt lookup is not trained"
    source = (page.path / "index.html").read_text()
    assert source.count("<svg") == 4 and "None" not in source and "http" not in source
    chart = ElementTree.parse(page.path / "charts" / "methods.svg").getroot()
    legends = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text") if text.get("class") == "legend"]
    said = [text.text for text in chart.iter("{http://www.w3.org/2000/svg}text") if text.get("style")]
    assert said == ["Acceptance by depth", "Cost by depth", "Speedup by depth", "Speedup at the chosen depth"]
    card = page_card(page)
    assert "| eagle3 | 1,000,000 |" in card.replace("\\*", "*").replace("**", "") and "data:image/svg+xml" in card
    assert all(legends.count(str(d.info["method"])) == 3 for d in drafts), "a series in each of the charts by depth"


def test_trees_stand_beside_the_chain_of_their_depth_and_are_left_out_where_there_are_none(tmp_path: Path) -> None:
    drafts, policy = make_methods_study(tmp_path, 2)
    page = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "out", "m" * 64))
    assert (page.path / "tables" / "trees.csv").read_text().count("\n") == 3
    lines = (policy.path / "depth_eval.jsonl").read_text().splitlines()
    chains = [line for line in lines if json.loads(line)["tree_budget"] is None]
    (policy.path / "depth_eval.jsonl").write_text("\n".join(chains) + "\n")
    without = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "again", "m" * 64))
    assert not (without.path / "tables" / "trees.csv").exists()
    assert "Trees against chains" not in (without.path / "index.html").read_text()


def test_what_is_doubted_about_the_measurements_is_said(tmp_path: Path) -> None:
    drafts, policy = make_methods_study(tmp_path, 2)
    silent = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "out", "m" * 64))
    assert "Reasons to doubt" not in (silent.path / "index.html").read_text()
    write_rows(
        policy.path, [QualityFlag("s", "0" * 64, "eagle3", "prediction_gap", "warning", 0.18, "1.46x against 1.23x")]
    )
    doubted = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "again", "m" * 64))
    source = (doubted.path / "index.html").read_text()
    assert "Reasons to doubt" in source and "1.46x against 1.23x" in source


def test_two_drafters_of_one_method_are_told_apart_and_an_unknown_one_has_no_facts(tmp_path: Path) -> None:
    drafts, policy = make_methods_study(tmp_path, 2)
    for table in ("depth_eval", "depth_choice"):
        file = policy.path / f"{table}.jsonl"
        file.write_text(file.read_text().replace('"mtp"', '"eagle3"'))
    page = compare_methods(drafts[:1], policy, ctx=make_ctx(tmp_path / "out", "m" * 64))
    with (page.path / "tables" / "methods.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["eagle3 000000", "eagle3 111111", "ngram"], "prompt lookup was measured"
    assert rows[1]["parameters"] == "-"


def test_a_missing_policy_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no policy\.json"):
        compare_methods([], DepthPolicy(key="x", path=tmp_path), ctx=make_ctx(tmp_path / "out", "m" * 64))
