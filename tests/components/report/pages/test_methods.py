"""Methods side by side: every drafter has its line, nothing unknown is claimed, trees stand beside their chains."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from report_study import make_ctx, make_methods_study

from components.contract import DepthPolicy, UserError
from components.policy import RoundCost
from components.report import compare_methods
from components.report.pages.methods import row_price
from components.report.prefect_cards import page_card
from components.rows import DepthEval, QualityFlag, read_rows, write_rows


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
    assert said == ["Acceptance by depth", "Cost by depth", "Speedup by depth", "Speedup at the depth shown"]
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


def test_at_the_slope_at_which_a_row_breaks_even_the_speedup_is_one(tmp_path: Path) -> None:
    _, policy = make_methods_study(tmp_path, 1)
    chain = [e for e in read_rows(policy.path, DepthEval) if e.tree_budget is None]
    host = {e.depth_k: 0.3 + 0.1 * e.depth_k for e in chain}
    rounds = [RoundCost("0" * 64, "eagle3", 1, depth, rest, 1.0, 4) for depth, rest in host.items()]
    price = row_price(chain, rounds)
    assert price is not None and price.break_even_lo < price.break_even < price.break_even_hi

    def speedup(e: DepthEval, slope: float) -> float:
        verify = e.t_target_ms * (1.0 + slope * e.depth_k)
        return e.al * (e.t_target_ms + host[0]) / (verify + e.t_draft_ms + host[e.depth_k])

    assert speedup(price.depth, price.break_even) == pytest.approx(1.0)
    assert all(speedup(e, price.break_even) <= 1.0 + 1e-9 for e in chain if e.depth_k), "no other depth bears more"
    assert price.measured == pytest.approx(
        (price.depth.t_verify_ms / price.depth.t_target_ms - 1) / price.depth.depth_k
    )
    assert row_price([e for e in chain if not e.depth_k], rounds) is None


def test_where_depth_0_is_best_for_all_the_page_says_how_near_drafting_comes(tmp_path: Path) -> None:
    drafts, policy = make_methods_study(tmp_path, 2)
    lines = [json.loads(line) for line in (policy.path / "depth_choice.jsonl").read_text().splitlines()]
    plain = {"depth_k": 0, "verdict": "do_not_speculate", "speedup_pred": 1.0, "speedup_meas": None}
    (policy.path / "depth_choice.jsonl").write_text("".join(json.dumps(line | plain) + "\n" for line in lines))
    content = json.loads((policy.path / "policy.json").read_text())
    (policy.path / "policy.json").write_text(json.dumps(content | {"verdict": "do_not_speculate", "winner": None}))
    page = compare_methods(drafts, policy, ctx=make_ctx(tmp_path / "out", "m" * 64))
    assert "No depth of any method was shown to beat depth 0" in (page.path / "index.html").read_text()
    with (page.path / "tables" / "methods.csv").open() as file:
        rows = list(csv.DictReader(file))[:2]
    assert [row["depth"] for row in rows] == ["0", "0"] and all(int(row["shown"]) > 0 for row in rows)
    assert all(float(row["AL"].split()[0]) > 1.0 for row in rows), "the line of a depth that drafts"


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
