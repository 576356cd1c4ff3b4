"""The page by language: both with intervals, what a mix loses in a sentence, nothing claimed that was not seen."""

from __future__ import annotations

import csv
import dataclasses
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from history_rows import choice
from report_study import make_ctx

from components.contract import DepthPolicy, Measurements, UserError
from components.report import compare_languages
from components.report.prefect_cards import measurements_card, page_card
from components.rows import AcceptanceByLanguage, QualityFlag, write_rows

BOTH, ENGLISH = "b" * 64, "e" * 64


def row(key: str, language: str, al: float, change: float | None = None, **other: Any) -> AcceptanceByLanguage:
    interval = (None, None) if change is None else (change - 0.1, change + 0.1)
    trained = ["zh", "en"] if key == BOTH else ["en"]
    verdict = "baseline" if change is None else "lower" if change < -0.1 else "undecided"
    made = AcceptanceByLanguage(
        session_id="s",
        target_key="t" * 64,
        draft_key=key,
        method="eagle3",
        language=language,
        depth_k=5,
        num_prompts=64,
        trained_on=trained,
        num_trained_on=320,
        al=al,
        al_lo=al - 0.2,
        al_hi=al + 0.2,
        coverage=0.9,
        baseline_key=BOTH,
        change=change,
        change_lo=interval[0],
        change_hi=interval[1],
        verdict=verdict,
    )
    return dataclasses.replace(made, **other)


ROWS = [
    row(BOTH, "all", 2.0),
    row(ENGLISH, "all", 1.8, -0.2),
    row(BOTH, "en", 2.1),
    row(ENGLISH, "en", 2.12, 0.02),
    row(BOTH, "zh", 1.9),
    row(ENGLISH, "zh", 1.3, -0.6, coverage=0.41),
]


def measured(folder: Path, rows: list[Any]) -> Measurements:
    folder.mkdir()
    write_rows(folder, rows)
    return Measurements(key="m" * 64, path=folder)


def test_the_page_says_what_a_mix_without_a_language_loses(tmp_path: Path) -> None:
    page = compare_languages(measured(tmp_path / "m", ROWS), ctx=make_ctx(tmp_path / "out", "p" * 64))
    text = (page.path / "index.html").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    said = "Without Chinese in the training mix, acceptance length on Chinese falls from 1.90 to 1.30: -0.60 [-0.70, "
    assert said in page.info["verdict"] and said in text
    assert text.count("<svg") == 3 and "None" not in text and "http" not in text
    for name in ("English", "Chinese"):
        assert name in text
    assert "1.30 [1.10, 1.50]" in text and "41" in text


def test_table_chart_and_card_hold_the_same_numbers(tmp_path: Path) -> None:
    found = measured(tmp_path / "m", ROWS)
    page = compare_languages(found, ctx=make_ctx(tmp_path / "out", "p" * 64))
    with (page.path / "tables" / "languages.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["language"], r["trained on"]) for r in rows] == [
        (language, mix)
        for language in ("English", "Chinese", "all languages")
        for mix in ("English + Chinese", "English")
    ]
    assert rows[3]["change"] == "-0.60 [-0.70, -0.50]" and rows[2]["change"] == "-"
    chart = ElementTree.parse(page.path / "charts" / "languages.svg").getroot()
    titles = [title.text or "" for title in chart.iter("{http://www.w3.org/2000/svg}title")]
    assert any("1.30 [1.10, 1.50]" in title for title in titles)
    assert "data:image/svg+xml" in page_card(page) and "| Chinese |" in page_card(page)
    assert "### acceptance by language" in measurements_card(found)


def test_a_difference_that_is_not_shown_is_not_claimed(tmp_path: Path) -> None:
    rows = [*ROWS[:4], ROWS[4], row(ENGLISH, "zh", 1.85, -0.05)]
    page = compare_languages(measured(tmp_path / "m", rows), ctx=make_ctx(tmp_path / "out", "p" * 64))
    assert "moves from 1.90 to 1.85" in page.info["verdict"] and "not shown to be a difference" in page.info["verdict"]


def test_one_mix_alone_has_no_differences_and_what_was_not_counted_has_no_chart(tmp_path: Path) -> None:
    rows = [dataclasses.replace(r, coverage=None) for r in ROWS if r.draft_key == BOTH]
    flag = QualityFlag("s", BOTH, "eagle3", "few_prompts", "warning", 5.0, "language zh: fewer than 64 prompts")
    page = compare_languages(measured(tmp_path / "m", [*rows, flag]), ctx=make_ctx(tmp_path / "out", "p" * 64))
    text = (page.path / "index.html").read_text(encoding="utf-8")
    assert "nothing to compare it with" in text and text.count("<svg") == 1 and "fewer than 64 prompts" in text


def test_two_mixes_of_the_same_languages_are_told_apart(tmp_path: Path) -> None:
    rows = [dataclasses.replace(r, trained_on=["en", "zh"]) for r in ROWS]
    page = compare_languages(measured(tmp_path / "m", rows), ctx=make_ctx(tmp_path / "out", "p" * 64))
    text = (page.path / "index.html").read_text(encoding="utf-8")
    assert "English + Chinese (bbbbbb)" in text and "English + Chinese (eeeeee)" in text


def test_depths_chosen_by_language_stand_beside_it(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    choices = [
        choice(draft_key=key, workload=name, speedup_pred=speed, pred_lo=speed - 0.1, pred_hi=speed + 0.1)
        for key in (BOTH, ENGLISH)
        for name, speed in (("zh", 1.4), ("all", 1.5), ("code", 9.0))
    ]
    write_rows(tmp_path / "policy", choices)
    policy = DepthPolicy(key="q" * 64, path=tmp_path / "policy")
    page = compare_languages(measured(tmp_path / "m", ROWS), policy, ctx=make_ctx(tmp_path / "out", "p" * 64))
    with (page.path / "tables" / "speedups.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["language"], r["predicted"]) for r in rows] == [
        ("Chinese", "1.40x [1.30, 1.50]"),
        ("Chinese", "1.40x [1.30, 1.50]"),
        ("all languages", "1.50x [1.40, 1.60]"),
        ("all languages", "1.50x [1.40, 1.60]"),
    ]


def test_no_rows_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no rows by language"):
        compare_languages(measured(tmp_path / "m", []), ctx=make_ctx(tmp_path / "out", "p" * 64))
