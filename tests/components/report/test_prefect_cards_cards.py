"""The cards of a dataset account for every row, show why rows went, and break nothing, whatever a source is called."""

from __future__ import annotations

import re
from pathlib import Path

from collected_chats import collect, context, rows, write_lines

from components.contract import Prompts
from components.data import deduplicate, mix_chats
from components.data.formats.chats import dropped_examples
from components.report.prefect_cards import chats_card, mix_card

STRANGE = "a|b`<script>_"


def cells(card: str, first: str) -> list[str]:
    """The cells of the table row that begins so."""
    line = next(line for line in card.splitlines() if line.startswith(f"| {first}"))
    return [cell.strip().replace("\\", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_what_was_read_kept_dropped_and_mixed_is_shown_by_source(tmp_path: Path) -> None:
    bad = [{"prompt": "Who <b>is</b> | there?", "response": ""}, {"score": 3}]
    town = write_lines(tmp_path / "in" / "town.jsonl", [*rows(60), *bad])
    more = write_lines(tmp_path / "more.jsonl", rows(50, 30))
    (tmp_path / "in" / "empty.jsonl").touch()
    chats = collect(tmp_path / "chats", {"path": str(town.parent), "name": STRANGE}, str(more))
    card = chats_card(chats, dropped_examples(chats.path))
    found = cells(card, "a\\|b")
    assert found == [STRANGE, "63", "60", "empty file 1, empty turn 1, unknown shape 1", "1"]
    assert cells(card, "more")[:3] == ["more", "50", "50"]
    assert card.startswith("110 of 113 rows kept.") and "<script>" not in card.replace("\\<", "")
    assert {line.count("|") - line.count("\\|") for line in card.splitlines() if line.startswith("| a\\|b")} == {6}
    assert cells(card, "empty")[0] in ("empty_turn", "empty_file") and "town.jsonl:61" in card

    kept = deduplicate([chats], ctx=context(tmp_path / "kept"))
    told = chats_card(kept, [])
    assert told.startswith("80 of 110 rows kept.") and "Dropped: exact duplicate 30." in told

    few = {"num_validation": 4, "num_test": 2, "num_warm_up": 0, "evaluation_percent": 20}
    mix = mix_chats([kept], weights={STRANGE: 1, "more": 1}, by="rows", **few, ctx=context(tmp_path / "mix"))  # type: ignore[arg-type]
    card = mix_card(mix)
    name, asked, got, num_rows, *_, read = cells(card, "a\\|b")
    assert (name, asked) == (STRANGE, "50.0%") and abs(float(got[:-1]) - 50) < 5
    entry = next(entry for entry in mix.info["mix"] if entry["name"] == STRANGE)
    assert (num_rows, read) == (str(entry["rows"]), str(entry["rows_read"]))
    assert "Left out: " in card and "<script>" not in card.replace("\\<", "")


def test_prompts_that_are_no_mix_have_no_card(tmp_path: Path) -> None:
    assert mix_card(Prompts("p", tmp_path, {"num_train": 3})) == ""
