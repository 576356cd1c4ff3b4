"""The elements of a JSON array are read one by one; a broken one costs itself alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from collected_chats import LENIENT, collect
from hypothesis import given, settings
from hypothesis import strategies as st

from components.data.formats.chats import read_chats, read_dropped
from components.data.sources.files import read_rows
from components.data.sources.json_array import json_rows

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_a_broken_element_of_an_array_costs_itself_only(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[\n{"prompt": "a"},\n{"prompt": "b" "c"},\n{"prompt": "d"}\n]\n')
    aside: list[int] = []
    rows = list(read_rows(file, lambda source, line, why, row: aside.append(line)))
    assert rows == [(2, {"prompt": "a"}), (4, {"prompt": "d"})]
    assert aside == [3]


@settings(deadline=None)
@given(st.lists(json_values, max_size=4), st.data())
def test_no_damage_to_an_array_passes_unnoticed(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Any], data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("array") / "rows.json"
    whole = json.dumps(rows, indent=data.draw(st.sampled_from([None, 1])))
    cut = data.draw(st.integers(1, len(whole)))
    aside: list[str] = []
    for text, harmed in ((whole, False), (whole[:cut], cut < len(whole)), (whole + " []", True)):
        file.write_text(text)
        aside.clear()
        read = [row for _, row in read_rows(file, lambda source, line, why, row: aside.append(why))]
        assert bool(aside) == harmed
        assert harmed or read == rows


def test_memory_follows_a_window_and_not_the_file(tmp_path: Path) -> None:
    """An array far larger than the window is never in memory as a whole."""
    from components.data.sources.json_array import _Window, json_rows

    file = tmp_path / "rows.json"
    with file.open("w") as out:
        out.write("[\n")
        out.write(",\n".join(json.dumps({"prompt": "x" * 1000, "n": n}) for n in range(6000)))
        out.write("\n]")
    longest = 0
    more = _Window.refill

    def watched(window: _Window) -> bool:
        nonlocal longest
        found = more(window)
        longest = max(longest, len(window.text))
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_Window, "refill", watched)
        found = [row["n"] for _, row in json_rows(file, lambda *_: pytest.fail("nothing is wrong with it"))]
    assert found == list(range(6000))
    assert longest < file.stat().st_size / 2


def test_a_list_without_commas_loses_nothing(tmp_path: Path) -> None:
    aside: list[int] = []
    file = tmp_path / "rows.json"
    file.write_text('[{"n": 1}\n {"n": 2} {"n": 3}, {"n": 4}]')
    rows = list(json_rows(file, lambda where, line, why, shown: aside.append(line)))
    assert [row["n"] for _, row in rows] == [1, 2, 3, 4] and not aside


@pytest.mark.parametrize("line", ["garbage", "{", '{"n" ', "}", "null null"])
def test_a_line_of_garbage_in_a_list_costs_no_row_with_or_without_a_comma(line: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    for comma in ("", ","):
        aside: list[int] = []
        file.write_text('[\n{"n": 1},\n' + line + comma + '\n{"n": 2},\n{"n": 3}\n]')
        rows = list(json_rows(file, lambda where, line, why, shown, aside=aside: aside.append(line)))
        assert [row["n"] for _, row in rows if row] == [1, 2, 3] and aside == [3]


@pytest.mark.parametrize("indent", [1, 4])
def test_a_broken_element_of_a_pretty_printed_array_costs_itself_alone(tmp_path: Path, indent: int) -> None:
    said = [{"role": "user", "content": "Who grows peas?"}, {"role": "assistant", "content": "They do."}] * 2
    text = json.dumps([{"id": n, "messages": said} for n in range(4)], indent=indent)
    (tmp_path / "a.json").write_text(text.replace("peas?", "peas\\q", 1), encoding="utf-8")
    made = collect(tmp_path, str(tmp_path / "a.json"), clean=LENIENT)
    assert [len(chat.messages) for chat in read_chats(made)] == [4, 4, 4]
    assert [row["reason"] for row in read_dropped(made.path)] == ["not_json"]
