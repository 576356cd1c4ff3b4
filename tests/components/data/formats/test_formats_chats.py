"""Unified rows come back as they were written, in order, in parts of the agreed size, the same bytes each time."""

from __future__ import annotations

import hashlib
import string
from pathlib import Path

import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.contract import Chats, UserError
from components.data.formats.chats import (
    COLUMNS,
    Chat,
    ChatWriter,
    DroppedWriter,
    chats_schema,
    iter_batches,
    read_chats,
    read_dropped,
    read_manifest,
)


def chat(number: int, source: str = "a") -> Chat:
    asked = {"role": "user", "content": f"How many is {number}?"}
    return Chat.of(source=source, where=f"rows.jsonl:{number}", messages=[asked], language="en", domain="general")


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_rows_come_back_in_order_from_parts_of_the_agreed_size(tmp_path: Path) -> None:
    rows = [chat(number, "ab"[number % 2]) for number in range(25)]
    with ChatWriter(tmp_path, rows_per_part=10) as writer:
        for row in rows:
            writer.write(row)
    manifest = read_manifest(tmp_path)
    assert manifest == {
        "parts": ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"],
        "num_rows": 25,
        "by_source": {"a": 13, "b": 12},
    }
    sizes = [pyarrow.parquet.read_metadata(tmp_path / part).num_rows for part in manifest["parts"]]
    assert sizes == [10, 10, 5]
    made = Chats(key="k", path=tmp_path)
    assert list(read_chats(made)) == rows
    assert [row.where for row in read_chats(made, ["where"])] == [row.where for row in rows]
    schema = pyarrow.parquet.read_schema(tmp_path / "part-00000.parquet")
    assert schema.names == list(COLUMNS) and schema.equals(chats_schema())
    assert not any(field.nullable for field in schema)


def test_the_bytes_depend_on_the_rows_alone(tmp_path: Path) -> None:
    rows = [chat(number) for number in range(30)]
    for name in ("one", "two"):
        with ChatWriter(tmp_path / name, rows_per_part=7) as writer:
            for row in rows:
                writer.write(row)
    assert digests(tmp_path / "one") == digests(tmp_path / "two")


def test_batches_are_passed_on_and_filtered_without_parsing(tmp_path: Path) -> None:
    with ChatWriter(tmp_path / "all") as writer:
        for number in range(20):
            writer.write(chat(number, "ab"[number % 2]))
    with ChatWriter(tmp_path / "some", rows_per_part=4) as writer:
        for batch in iter_batches(tmp_path / "all", batch_rows=6):
            writer.write_batch(batch.filter(pyarrow.compute.equal(batch.column("source"), "a")))
        writer.write(chat(99))
    found = list(read_chats(tmp_path / "some"))
    assert [row.where for row in found] == [f"rows.jsonl:{number}" for number in (*range(0, 20, 2), 99)]
    assert read_manifest(tmp_path / "some")["by_source"] == {"a": 11}


def test_a_killed_writer_leaves_nothing_behind_that_counts(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), ChatWriter(tmp_path, rows_per_part=2) as writer:
        for number in range(5):
            writer.write(chat(number))
        writer._flush()
        raise ZeroDivisionError
    with pytest.raises(UserError, match=r"not a Chats artifact"):
        list(read_chats(tmp_path))
    with ChatWriter(tmp_path) as writer:
        writer.write(chat(1))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["manifest.json", "part-00000.parquet"]


def test_equal_content_has_equal_ids_wherever_it_comes_from() -> None:
    one = Chat.of(source="a", where="x:1", messages=[{"role": "user", "content": "Why?", "name": "n"}], tools="[]")
    two = Chat.of(source="b", where="y:2", messages=[{"name": "n", "content": "Why?", "role": "user"}], language="en")
    assert one.row_id == two.row_id
    assert len(one.row_id) == 16 and set(one.row_id) <= set(string.hexdigits)
    assert Chat.of(source="a", where="x:1", text="Why?").row_id != one.row_id


def test_dropped_rows_are_counted_and_cut(tmp_path: Path) -> None:
    with DroppedWriter(tmp_path) as writer:
        writer.write("refusal", "a", "x:1", "s" * 900)
        writer.write("not_utf8", "a", "x:2", "half \ud800")
        writer.write("refusal", "b", "y:1", "")
        assert writer.close() == {"refusal": 2, "not_utf8": 1}
    found = list(read_dropped(tmp_path))
    assert [row["reason"] for row in found] == ["refusal", "not_utf8", "refusal"]
    assert len(found[0]["excerpt"]) == 500 and found[1]["excerpt"] == "half ?"


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": texts},
        optional={"reasoning_content": texts, "name": texts, "tool_calls": st.just([{"function": {"name": None}}])},
    ),
    min_size=1,
    max_size=4,
)  # fmt: skip


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(messages, texts) | texts.filter(bool), max_size=6), st.integers(1, 4))
def test_any_row_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[list[dict[str, str]], str] | str], size: int
) -> None:
    folder = tmp_path_factory.mktemp("chats")
    rows = [
        Chat.of(source="s", where=f"f:{number}", text=content)
        if isinstance(content, str)
        else Chat.of(source="s", where=f"f:{number}", messages=content[0], tools=content[1])
        for number, content in enumerate(contents)
    ]
    with ChatWriter(folder, rows_per_part=size) as writer:
        for row in rows:
            writer.write(row)
    assert list(read_chats(folder)) == rows
