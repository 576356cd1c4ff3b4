"""The page: self-contained, complete, and honest when something is missing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report_study import make_ctx

from components.contract import DepthPolicy, Measurements, Page, UserError
from components.policy import read_policy
from components.report import write_page
from components.report.tables import arm_table
from components.rows import AcceptanceMap, CostCell, DepthChoice, DepthEval, QualityFlag, read_rows, write_rows
from components.speedup import choose_stop, measure_tuning
from components.speedup.policy_markdown import write_policy

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Reader(HTMLParser):
    """Checks that tags nest, and keeps text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: Page) -> tuple[str, str]:
    """The source, and the text that a reader sees."""
    source = (page.path / "index.html").read_text()
    reader = Reader()
    reader.feed(source)
    assert reader.open == []
    return source, " ".join(" ".join(reader.text).split())


def test_nothing_is_loaded_from_elsewhere(page: Callable[..., Page]) -> None:
    source, _ = read(page())
    assert "http:" not in source and "https:" not in source and "//" not in source.replace("*/", "")
    assert not re.search(r"<(script|link|iframe|img|object)\b|@import|url\(|\bsrc=|\bhref=", source)


def test_every_number_of_the_rows_is_on_the_page(page: Callable[..., Page], study: dict[str, Any]) -> None:
    _, text = read(page())
    for e in read_rows(study["policy"].path, DepthEval):
        if e.workload != "all":
            continue
        for value in (e.t_target_ms, e.t_verify_ms, e.t_draft_ms, e.cost_ratio):
            assert f"{value:.2f}" in text
        if e.depth_k:
            assert f"{e.al:.2f} [{e.al_lo:.2f}, {e.al_hi:.2f}]" in text
            assert f"{e.speedup_pred:.2f}x [{e.pred_lo:.2f}, {e.pred_hi:.2f}]" in text
            assert e.marginal_gain is not None and f"{100 * e.marginal_gain:.1f} %" in text
            assert e.marginal_cost is not None and f"{100 * e.marginal_cost:.1f} %" in text
        if e.speedup_meas is not None:
            assert f"{e.speedup_meas:.2f}x [{e.meas_lo:.2f}, {e.meas_hi:.2f}]" in text
    for c in read_rows(study["policy"].path, DepthChoice):
        assert f"{c.method} {c.workload} {c.depth_k} " in text
    for f in read_rows(study["policy"].path, QualityFlag):
        assert f.detail in text
    policy = read_policy(study["policy"].path)
    shown = {c.draft_key: c.depth_k for c in policy.choices if c.workload == "all"}
    for b in (b for b in policy.acceptance_by_context if shown[b.draft_key] == b.depth_k):
        context = {0: "up to 1k", 1024: "1k to 4k", 4096: "4k to 16k"}[b.context_from]
        al = f"{b.al:.2f} [{b.al_lo:.2f}, {b.al_hi:.2f}]"
        assert f"{b.depth_k} {context} {al} {b.num_prompts} {b.num_rounds:,} {b.num_tokens:,}" in text
    assert {b.context_to for b in policy.acceptance_by_context} == {1024, 4096, 16384}
    for a in policy.arms:
        assert f"{a.tokens_per_s:.1f}" in text
    assert policy.gate is not None
    for check in policy.gate.checks:
        assert check.name.replace("_", " ") in text
    for artifact in (*study["acceptance"], *study["cost"], study["end_to_end"], study["policy"], study["release"]):
        assert artifact.key in text


def test_engines_are_told_what_the_release_tells_them(page: Callable[..., Page], study: dict[str, Any]) -> None:
    told = json.loads((study["release"].path / "release.json").read_text())["engines"]
    _, text = read(page())
    assert "What the engines are told" in text and f"llama_cpp: {' '.join(told['llama_cpp']['flags'])}" in text
    assert "mnn" not in told and "draft_predict_length" not in text, "it cannot load this one"


def test_measured_and_replayed_lengths_are_of_the_same_prompts(
    page: Callable[..., Page], study: dict[str, Any]
) -> None:
    arms = read_policy(study["policy"].path).arms
    table = arm_table(arms)
    at = [table.header.index(name) for name in ("AL", "AL replayed", "prompts")]
    shown = {tuple(row[place] for place in at) for row in table.rows}
    replayed = [a for a in arms if a.al_replayed is not None]
    assert replayed and {(f"{a.al:.2f}", f"{a.al_replayed:.2f}", str(a.num_prompts)) for a in replayed} <= shown
    info, (_, text) = study["policy"].info, read(page())
    said = (
        f"{info['al_meas']:.2f} while decoding {info['num_prompts_timed']} prompts, {info['al_replayed']:.2f} replayed"
    )
    assert said in text


def test_the_verdict_comes_first(page: Callable[..., Page], study: dict[str, Any]) -> None:
    _, text = read(page())
    depth = study["policy"].info["depth_k"]
    speed = study["policy"].info["speedup_meas"]
    assert text.index(f"draft {depth} tokens a round: {speed:.2f}x") < text.index("What was chosen")
    assert "measured speedup" in text[: text.index("What was chosen")]


def test_titles_and_details_cannot_break_the_page(page: Callable[..., Page]) -> None:
    source, text = read(page(title='A <b>"title"</b> & more'))
    assert 'A <b>"title"</b> & more' in text
    assert "<b>" not in source
    assert "drifted <by> 3.1 % & more" in text


def test_a_rule_that_ends_chains_is_told_with_its_reliability(
    page: Callable[..., Page], study: dict[str, Any], tmp_path: Path
) -> None:
    def confident(m: AcceptanceMap) -> AcceptanceMap:
        positions = m.accepted[: m.num_tokens - 1]
        return replace(m, confidence=[[0.9 if a > j else 0.4 for j in range(m.k_max)] for a in positions])

    write_rows(tmp_path, [confident(m) for m in read_rows(study["acceptance"][0].path, AcceptanceMap)])
    acceptance = [Measurements(key="m" * 64, path=tmp_path)]
    (tmp_path / "cost").mkdir()
    cells = [cell for cost in study["cost"] for cell in read_rows(cost.path, CostCell) if cell.tree_budget is None]
    write_rows(tmp_path / "cost", [*cells, *(replace(c, phase="draft_read") for c in cells if c.phase == "draft")])
    cost = [Measurements(key="c" * 64, path=tmp_path / "cost")]
    ruled = choose_stop(study["policy"], acceptance, cost, ctx=make_ctx(tmp_path / "ruled", "s" * 64))
    source, text = read(page(policy=ruled))
    (stop,) = read_policy(ruled.path).stops
    assert stop.chosen, "such a confidence tells everything"
    assert "Depth decided while drafting" in text and "by confidence" in text
    assert f"{stop.gain:.2f}x [{stop.gain_lo:.2f}, {stop.gain_hi:.2f}]" in text
    assert f"{stop.p_min:.2f} ({stop.p_min_depth})" in text and source.count("Is the confidence right?") == 1


def tuned_by(path: Path, study: dict[str, Any], older: bool) -> Measurements:
    """What speedup.measure_tuning says of the study's EAGLE-3 drafter, which stands for all its states."""
    (path / "older").mkdir(parents=True)
    came = study["acceptance"][0]
    rows = read_rows(came.path, AcceptanceMap)
    write_rows(
        path / "older", [replace(row, target_key="older", accepted=[row.k_max] * len(row.accepted)) for row in rows]
    )
    before = Measurements(key="older", path=path / "older") if older else None
    return measure_tuning(came, came, before, ctx=make_ctx(path / "tuning", "g" * 64))


@pytest.mark.parametrize("older", [False, True])
def test_what_tuning_brought_stands_on_the_page(
    older: bool, page: Callable[..., Page], study: dict[str, Any], tmp_path: Path
) -> None:
    made = page(tuning=tuned_by(tmp_path / "states", study, older))
    _, text = read(made)
    assert ("What the changed target cost" in text) is older and "hat tuning brought" in text
    assert "no difference shown" in text and ("lost with the changed target" in text) is older
    table = (made.path / "tables" / "tuning.csv").read_text(encoding="utf-8").splitlines()
    workloads = len({row.workload for row in read_rows(study["acceptance"][0].path, AcceptanceMap)})
    assert len(table) == 1 + (1 + workloads) * (3 if older else 1)


def test_what_was_not_measured_is_not_claimed(page: Callable[..., Page], study: dict[str, Any]) -> None:
    _, text = read(page(policy=study["chosen"]))
    assert "not measured" in text
    assert "Promotion gate" not in text
    assert "Measured end to end" not in text
    assert "None" not in text


def test_do_not_speculate_is_a_verdict(page: Callable[..., Page], study: dict[str, Any], tmp_path: Path) -> None:
    folder = tmp_path / "none"
    folder.mkdir()
    policy = read_policy(study["chosen"].path)
    choices = [replace(choice, depth_k=0, verdict="do_not_speculate") for choice in policy.choices]
    refusal = {"winner": None, "verdict": "do_not_speculate", "reasons": ["nothing is faster"]}
    write_policy(folder, replace(policy, choices=choices, **refusal))
    info = {"verdict": "do_not_speculate", "depth_k": 0, "method": "eagle3", "reasons": refusal["reasons"]}
    _, text = read(page(policy=DepthPolicy(key="n" * 64, path=folder, info=info)))
    assert "Do not speculate: no drafter is reliably faster" in text
    assert text.count("nothing is faster") == 1


def test_a_method_whose_maps_know_no_training_metric_has_a_page(
    page: Callable[..., Page], study: dict[str, Any], tmp_path: Path
) -> None:
    """Methods that only a live run can map (lookahead) propose nothing at every position."""
    folder = tmp_path / "unknown"
    folder.mkdir()
    policy = read_policy(study["chosen"].path)
    write_policy(folder, replace(policy, acceptance=[replace(each, al_proxy=None) for each in policy.acceptance]))
    _, text = read(page(policy=DepthPolicy(key="n" * 64, path=folder, info=study["chosen"].info)))
    assert "as a mean over prompts." in text and "by the training metric" not in text and "None" not in text


def test_a_missing_policy_is_one_line(page: Callable[..., Page], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no policy\.json"):
        page(policy=DepthPolicy(key="x", path=tmp_path))


def test_what_was_left_out_and_what_the_targets_files_ask_stand_on_the_page(
    study: dict[str, Any], tmp_path: Path
) -> None:
    remark = "generation_config.json asks for repetition_penalty 1.1, which is not done here"
    info = {**study["end_to_end"].info, "num_prompts_left_out": 19, "generation_remark": remark}
    parts = [study[name] for name in ("policy", "acceptance", "cost")]
    written = write_page(*parts, replace(study["end_to_end"], info=info), ctx=make_ctx(tmp_path / "page", "g" * 64))
    _, text = read(written)
    assert "Left out: 19 test prompts of the timed comparison" in text and f"{remark}." in text
