"""What a run says in one sentence is right for one token and for several, measured or only predicted."""

from __future__ import annotations

import pytest

from components.report.summary import verdict_in_words


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
