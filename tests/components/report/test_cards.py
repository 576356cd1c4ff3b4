"""What the Prefect UI shows of a study: every depth, charts that stand alone, and nothing that breaks its Markdown."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from report_study import make_report_study

from components.contract import Measurements
from components.report.cards import acceptance_table, decision_card, measurements_card, speed_table
from components.rows import AcceptanceMap, DepthEval, Request, read_rows, write_rows


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
        defined = set(re.findall(r"(--\w+):#", base64.b64decode(picture).decode()))
        assert colours <= defined, "a chart in an image sees no style sheet but its own"


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
    row = AcceptanceMap("t", "d", "mtp", "p", "chat", 3, 3, 4, [0, 1, 3, 2], [0] * 4, 0.0, "float32")
    assert acceptance_table([row]).rows[0] == ["mtp", "all", "1", "4", "1.50", "75%", "50%", "25%"]
    common: dict[str, Any] = dict.fromkeys(Request.__dataclass_fields__, 0)
    common |= {"method": "mtp", "kernel": "k", "dtype": "float32", "status": "ok", "is_warmup": False}
    timed = Request(**{**common, "tokens_kept": 11, "decode_ns": 2_000_000_000, "identical": True})
    failed = Request(**{**common, "status": "error", "identical": None})
    assert speed_table([timed, failed]).rows == [["mtp", "0", "k", "float32", "2", "5.0", "1 of 1", "1"]]
