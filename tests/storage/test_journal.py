"""The promotion log: a line that was cut short or scribbled over hides no other, and no new line goes on in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from storage import journal
from storage.history.records import PromotionRow, new_promotion


def moved(version: int) -> PromotionRow:
    return new_promotion("model", "champion", "promote", version - 1, version, "me", "better", {"al": "2.0"})


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_torn_line_hides_no_other_and_the_next_one_stands_alone(home: Path, cut: int) -> None:
    rows = [moved(version) for version in (1, 2, 3)]
    journal.log_promotion(home, rows[0])
    whole = journal.promotions_file(home).read_bytes()
    journal.log_promotion(home, rows[1])
    torn = journal.promotions_file(home).read_bytes()[len(whole) :].rstrip(b"\n")[:cut]
    journal.promotions_file(home).write_bytes(whole + torn)
    assert (journal.promotions(home), journal.damaged_promotions(home)) == ([rows[0]], [2])
    journal.add_promotions(home, rows)
    assert (journal.promotions(home), journal.damaged_promotions(home)) == (rows, [2])


@pytest.mark.parametrize("line", ["", "null", "[]", "{}", '"moved"', "\x00\x00", '{"promoted_at": 3}', "\ufffd"])
def test_lines_that_are_no_moves_are_named_and_left_out(home: Path, line: str) -> None:
    journal.log_promotion(home, moved(1))
    with journal.promotions_file(home).open("a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert journal.promotions(home)[0].to_version == 1
    assert journal.damaged_promotions(home) == ([2] if line else [])
    journal.log_promotion(home, moved(2))
    assert [row.to_version for row in journal.promotions(home)] == [1, 2]


def test_nothing_was_ever_logged(home: Path) -> None:
    assert (journal.promotions(home), journal.damaged_promotions(home)) == ([], [])
