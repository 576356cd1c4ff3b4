"""A summary never invents, and what a run says in one sentence is right for one token and for several."""

from __future__ import annotations

from typing import Any

import pytest

from components.report.summary import summarise, verdict_in_words


def test_summary_of_a_confirmed_policy(study: dict[str, Any]) -> None:
    info = study["policy"].info
    lines = summarise(info, {"formats": ["eagle3"]}, {"report": "somewhere"})
    assert lines["chosen depth"] == str(info["depth_k"])
    assert (
        f"{info['speedup_meas']:.2f}x, 95 % interval [{info['meas_lo']:.2f}, {info['meas_hi']:.2f}]"
        == lines["measured speedup"]
    )
    assert lines["token-identical"].startswith("yes (")
    refused = summarise({**info, "gate_passed": False, "gate_failed": ["no_faults", "differs_from_champion"]})
    assert refused["promotion gate"] == "not passed: no_faults, differs_from_champion"
    assert list(lines)[-1] == "report"


def test_summary_does_not_claim_what_is_missing(study: dict[str, Any]) -> None:
    lines = summarise(study["chosen"].info)
    assert lines["measured speedup"] == "not measured"
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
