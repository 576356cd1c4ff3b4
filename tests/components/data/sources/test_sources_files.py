"""Rows of files of every kind: each line is read or set aside, and pieces of a file give the rows of the whole."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from collected_chats import LENIENT, collect, rows, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Chats
from components.data.formats.chats import read_chats, read_dropped
from components.data.sources import files as json_files
from components.data.sources.files import cut_lines, json_rows, read_rows

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def test_too_long_a_line_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_ROW_BYTES", 50)
    file = write_lines(tmp_path / "rows.jsonl", [{"a": 1}, {"a": "x" * 500}, {"a": 2}])
    aside: list[int] = []
    assert list(read_rows(file, lambda source, line, why, row: aside.append(line))) == [(1, {"a": 1}), (3, {"a": 2})]
    assert aside == [2]


lines = st.one_of(
    st.binary(max_size=30),
    json_values.map(lambda value: json.dumps(value).encode()),
    json_values.map(lambda value: json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    st.sampled_from(
        [b"", b"  ", b"NaN", b"Infinity", b'{"a": 1e999}', b"1" * 5000, b"[" * 3000, b"\xef\xbb\xbf{}", b'{"a": "\r"}']
    ),
).map(lambda line: line.replace(b"\n", b" "))


@settings(deadline=None)
@given(st.lists(lines, max_size=6), st.sampled_from([b"\n", b"\r\n"]))
def test_every_line_is_read_or_set_aside(
    tmp_path_factory: pytest.TempPathFactory, rows: list[bytes], end: bytes
) -> None:
    file = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    file.write_bytes(end.join(rows))
    aside: list[tuple[int, str]] = []
    read = [line for line, _ in read_rows(file, lambda source, line, why, row: aside.append((line, str(why))))]
    filled = [number for number, row in enumerate(rows, start=1) if row.strip()]
    assert sorted([*read, *(line for line, _ in aside)]) == filled
    assert all(why and "\n" not in why for _, why in aside)


@pytest.mark.parametrize("size", [1, 7, 20, 1000])
def test_cut_lines_cover_a_file_once_with_the_right_line_numbers(tmp_path: Path, size: int) -> None:
    file = tmp_path / "rows.jsonl"
    lines = [json.dumps({"n": n, "pad": "x" * (n * 7 % 23)}) for n in range(30)]
    file.write_text("\n".join(lines[:10]) + "\n\n" + "\n".join(lines[10:]))
    spans = cut_lines(file, size)
    assert [span.start for span in spans[1:]] == [span.stop for span in spans[:-1]]
    assert (spans[0].start, spans[-1].stop) == (0, file.stat().st_size)
    assert all(span.stop - span.start >= size for span in spans[:-1])
    whole = list(read_rows(file, lambda *_: pytest.fail("nothing is wrong with it")))
    assert [row for span in spans for row in read_rows(file, lambda *_: None, span=span)] == whole
    assert whole[10][0] == 12


def content(made: Chats) -> list[tuple[Any, ...]]:
    return [chat.messages for chat in read_chats(made)]


def written(folder: Path) -> dict[str, Path]:
    """The same rows in every kind of file."""
    table = pyarrow.Table.from_pylist(rows(20))
    lines = write_lines(folder / "rows.jsonl", rows(20)).read_bytes()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "rows.jsonl.bz2").write_bytes(bz2.compress(lines))
    (folder / "rows.jsonl.xz").write_bytes(lzma.compress(lines))
    (folder / "rows.ndjson.zst").write_bytes(pyarrow.compress(lines, codec="zstd", asbytes=True))
    (folder / "rows.json").write_text(json.dumps(rows(20), indent=1))
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "rows": rows(20)}))
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=7)
    with pyarrow.ipc.new_file(str(folder / "rows.feather"), table.schema) as file:
        file.write_table(table, max_chunksize=6)
    with pyarrow.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=6)
    pyarrow.csv.write_csv(table, folder / "rows.csv")
    tabs = pyarrow.csv.WriteOptions(delimiter="\t")
    pyarrow.csv.write_csv(table, folder / "rows.tsv", tabs)
    (folder / "odd.dat").write_bytes(lines)
    return {file.name: file for file in folder.iterdir()}


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    files = written(tmp_path / "in") if (tmp_path / "in").mkdir() is None else {}
    expected = [(("user", row["prompt"]), ("assistant", row["response"])) for row in rows(20)]
    for name, file in files.items():
        source = {"path": str(file), "name": "n"} | ({"format": "jsonl"} if name == "odd.dat" else {})
        made = collect(tmp_path / name, source)
        found = [tuple((turn["role"], turn["content"]) for turn in messages) for messages in content(made)]
        assert found == expected, name
        assert made.info["num_dropped"] == 0
        assert next(iter(read_chats(made))).where.startswith(f"{name}:")


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
        read = [row for _, row in read_rows(file, lambda source, line, why, row: aside.append(str(why)))]
        assert bool(aside) == harmed
        assert harmed or read == rows


def test_memory_follows_a_window_and_not_the_file(tmp_path: Path) -> None:
    """An array far larger than the window is never in memory as a whole."""
    from components.data.sources.files import _Window, json_rows

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
