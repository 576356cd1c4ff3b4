"""The question before `champion` moves: new version and champion side by side, and what silence means."""

from __future__ import annotations

from components.promotion import Check
from flows.orchestration.approval import Question, by_hand, comparison
from storage.registry.promotion_gate import Decision


def test_both_sides_and_every_check_are_shown() -> None:
    checks = (Check("speed", True, 1.02, 1.0, 1.04, "at least 0.98"), Check("parity", False, None, None, None, "equal"))
    question = Question(
        name="garden",
        version=3,
        decision=Decision(checks, against=2),
        tags={"draftsmith.depth_k": "4", "draftsmith.draft_key": "a" * 64},
        champion_tags={"draftsmith.depth_k": "3", "draftsmith.draft_key": "b" * 64},
    )
    text = comparison(question, minutes=30)
    assert text.startswith("## Promote garden version 3?") and "champion: version 2" in text
    assert "a" * 12 in text and "a" * 13 not in text, "keys are shown by their start"
    assert "- passed: " in text and "- FAILED: " in text and "within 30 minutes it is not promoted" in text
    assert by_hand(question).startswith("`draftsmith promote garden --version 3 --why")
