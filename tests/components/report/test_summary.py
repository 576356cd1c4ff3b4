"""A summary never invents, and what a run says in one sentence is right for one token and for several."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.contract import Measurements, Page
from components.machine import describe_machine
from components.policy import verdict_in_words
from components.report.summary import origin_of, summarise
from storage.artifacts.store import Store


def test_summary_of_a_confirmed_policy(study: dict[str, Any]) -> None:
    info = study["policy"].info
    lines = summarise(info, {"formats": ["eagle3"]}, {"report": "somewhere"})
    assert lines["chosen depth"] == str(info["depth_k"])
    assert (
        f"{info['speedup_meas']:.2f}x, 95 % interval [{info['meas_lo']:.2f}, {info['meas_hi']:.2f}]"
        == lines["measured speedup"]
    )
    assert lines["token-identical"].startswith("yes (")
    slower = summarise({**info, "verdict": "do_not_speculate"})
    assert slower["chosen depth"] == f"{info['depth_k']}, not served"
    refused = summarise({**info, "gate_passed": False, "gate_failed": ["this", "that"]})
    assert refused["promotion gate"] == "not passed: this; that"
    assert list(lines)[-1] == "report"


def test_summary_does_not_claim_what_is_missing(study: dict[str, Any]) -> None:
    lines = summarise(study["chosen"].info)
    assert lines["measured speedup"] == "not measured" and "reasons" not in lines
    plain = summarise({"depth_k": 0, "verdict": "undecided", "reasons": ["depth 1 measured 1.31x", "on 3 prompts"]})
    assert plain["reasons"] == "depth 1 measured 1.31x; on 3 prompts"
    assert plain["measured speedup"] == "none: depth 0 is plain decoding"
    assert lines["token-identical"] == "not compared"
    assert lines["promotion gate"] == "not checked"
    different = summarise({**study["policy"].info, "identical": False})
    assert different["token-identical"].startswith("NO")
    assert all(isinstance(v, str) for v in summarise({}).values())


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"depth_k": 1, "speedup_meas": 1.2}, "Use mtp and draft 1 token a round: 1.20x the speed"),
        ({"depth_k": 3, "speedup_meas": 1.2}, "Use mtp and draft 3 tokens a round: 1.20x the speed"),
        ({"depth_k": 1, "speedup_pred": 1.1}, "Use mtp and draft 1 token a round; predicted 1.10x, not measured."),
        ({"depth_k": 0, "verdict": "do_not_speculate"}, "Do not speculate: no drafter is reliably faster"),
    ],
)
def test_the_sentence(facts: dict[str, object], said: str) -> None:
    assert verdict_in_words({"method": "mtp", "verdict": "use", **facts}).startswith(said)


def test_a_measurement_of_a_run_names_model_machine_time_and_code(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open_staging("k")
    machine = describe_machine()
    record = {
        "machine": dataclasses.asdict(machine),
        "git_commit": "1234567890abcdef",
        "git_changed": True,
        "versions": {"torch": "2.13.0"},
    }
    measured = store.commit("k", "Measurements", {}, record)
    facts = dict(origin_of("mine", "t" * 64, measured))
    assert facts["model"] == "mine" and facts["code"] == "commit 1234567890ab with changes, torch 2.13.0"
    assert f"{machine.num_cores} cores" in facts["machine"] and machine.os in facts["machine"]
    assert facts["measured"][:10] in (
        time.strftime("%Y-%m-%d", time.gmtime(at)) for at in (time.time(), time.time() - 60)
    )


def test_what_was_not_recorded_is_not_told(tmp_path: Path) -> None:
    assert origin_of("", "t" * 64, Measurements("k", tmp_path)) == [("model", "target tttttttttttt")]


def test_the_page_begins_with_the_model(page: Callable[..., Page]) -> None:
    source = (page().path / "index.html").read_text()
    assert re.search(r"<h1>A report</h1>\s*<p class=\"origin\"><span><small>model</small> builtin</span>", source)
