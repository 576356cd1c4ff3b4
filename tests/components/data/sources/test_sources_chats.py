"""Every way to name a source of chats gives its rows whole and in order, or says in one line what is wrong with it."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from collected_chats import collect, rows, write_lines

from components.contract import Chats, UserError
from components.data.cleaning.rules import Cleaning
from components.data.formats.chats import read_chats, read_dropped
from components.data.sources import tables as row_tables
from components.data.sources.chats import CHAT_PRESETS, ChatSource
from components.data.sources.listing import list_files
from flows.planning.step_signature import resolve


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


def test_text_files_are_documents_by_file_line_or_paragraph(tmp_path: Path) -> None:
    text = "The first paragraph speaks of rivers and their bridges.\nTwo lines.\n\n\nThe second one speaks of clocks.\n"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "page.txt").write_text(text)
    (tmp_path / "in" / "README.md").write_text("No document of ours, and long enough to be one.")
    found = {}
    for documents in ("file", "paragraph", "line"):
        source = {"path": str(tmp_path / "in" / "page.txt"), "documents": documents}
        made = collect(tmp_path / documents, source, clean=Cleaning(min_text_characters=1))
        found[documents] = [(chat.where, chat.text) for chat in read_chats(made)]
        assert made.info["shapes"] == {"text": len(found[documents])}
    assert found["file"] == [("page.txt:1", text.strip("\n"))]
    assert [where for where, _ in found["paragraph"]] == ["page.txt:1", "page.txt:5"]
    assert [where for where, _ in found["line"]] == ["page.txt:1", "page.txt:2", "page.txt:5"]


def test_a_line_longer_than_a_row_may_be_is_set_aside_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tables, "MAX_ROW_BYTES", 64)
    (tmp_path / "a.txt").write_text("x" * 100 + "\nThe second line, which is short.\n")
    source = {"path": str(tmp_path / "a.txt"), "documents": "line"}
    made = collect(tmp_path / "out", source, clean=Cleaning(min_text_characters=1))
    assert [(chat.where, chat.text) for chat in read_chats(made)] == [("a.txt:2", "The second line, which is short.")]
    assert [(row["where"], row["reason"]) for row in read_dropped(made.path)] == [("a.txt:1", "too_long_a_row")]


def test_a_named_format_takes_files_of_that_kind_alone(tmp_path: Path) -> None:
    for name in ("a.arrow", "b.feather", "c.ipc", "d.jsonl", "e.ndjson"):
        (tmp_path / name).write_bytes(b"x")
    found = {kind: [file.name for file in list_files(ChatSource(path=str(tmp_path), format=kind)).files]
             for kind in ("arrow", "jsonl")}  # fmt: skip
    assert found == {"arrow": ["a.arrow", "b.feather", "c.ipc"], "jsonl": ["d.jsonl", "e.ndjson"]}


def test_folders_are_walked_and_patterns_matched_in_the_order_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for start, name in enumerate(["b/two.jsonl", "a/deep/one.jsonl", "zz.jsonl", "b.jsonl/odd.jsonl"]):
        write_lines(folder / name, rows(2, start * 2))
    write_lines(folder / ".hidden.jsonl", rows(1, 90))
    (folder / "notes.txt").write_text("Left alone, since nobody asked for text.")
    notes: list[str] = []
    made = collect(tmp_path / "whole", {"path": str(folder), "name": "n"}, notes=notes)
    wheres = [chat.where for chat in read_chats(made)]
    assert wheres == [
        f"{name}:{line}"
        for name in ("a/deep/one.jsonl", "b.jsonl/odd.jsonl", "b/two.jsonl", "zz.jsonl")
        for line in (1, 2)
    ]
    assert "n: 1 files of other kinds left alone" in notes
    made = collect(tmp_path / "some", {"path": str(folder / "**" / "*o*.jsonl"), "name": "n"})
    assert {chat.where.split(":")[0] for chat in read_chats(made)} == {
        "a/deep/one.jsonl",
        "b.jsonl/odd.jsonl",
        "b/two.jsonl",
    }


PRESET_ROWS: dict[str, Callable[[dict[str, str]], dict[str, Any]]] = {
    "eaglechat": lambda row: {
        "id": "1",
        "conversations": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ],
    },
    "sharegpt": lambda row: {
        "id": "x_0",
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["response"]}],
    },
    "ultrachat": lambda row: {
        "prompt": row["prompt"],
        "prompt_id": "f",
        "messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["response"]}],
    },
    "smoltalk-chinese": lambda row: {
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["response"]}],
    },
    "perfectblend": lambda row: {
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["response"]}],
        "source": "meta-math/MetaMathQA",
    },
    "magpie": lambda row: {
        "uuid": "u",
        "instruction": row["prompt"],
        "response": row["response"],
        "conversations": [{"from": "human", "value": row["prompt"]}, {"from": "gpt", "value": row["response"]}],
        "task_category": "Planning",
    },
}  # fmt: skip
"""One row in the fields of each collection, as its card describes them."""


@pytest.mark.parametrize("name", sorted(CHAT_PRESETS))
def test_a_preset_reads_a_copy_of_its_files(tmp_path: Path, name: str) -> None:
    made_of = PRESET_ROWS[name]
    folder = tmp_path / "copy" / "data"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([made_of(row) for row in rows(4)]), folder / "a.parquet")
    write_lines(folder / "b.jsonl", [made_of(row) for row in rows(2, 10)] + [{"unrelated": 1}])
    made = collect(tmp_path / "out", {"preset": name, "path": str(tmp_path / "copy")})
    assert [chat.messages[1]["content"] for chat in read_chats(made)] == [
        row["response"] for row in (*rows(4), *rows(2, 10))
    ]
    assert made.info["dropped"] == {"unknown_shape": 1}
    assert made.info["by_source"][name]["licence"] == CHAT_PRESETS[name].licence
    assert {chat.source for chat in read_chats(made)} == {name}
    if name == "magpie":
        assert {chat.domain for chat in read_chats(made)} == {"Planning"}


@pytest.mark.parametrize("name", ["eaglechat", "ultrachat"])
def test_a_preset_is_streamed_from_its_repository(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loader on a repository of the same layout that lies here; only the address differs."""
    preset = CHAT_PRESETS[name]
    copy = tmp_path / "repository"
    write_lines(copy / "data" / "a.jsonl", [PRESET_ROWS[name](row) for row in rows(3)])
    files = f"  data_files:\n  - split: {preset.split}\n    path: data/*.jsonl\n"
    (copy / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n{files}---\n")
    here = preset.model_copy(update={"repository": str(copy)})
    monkeypatch.setitem(CHAT_PRESETS, name, here)
    made = collect(tmp_path / "out", {"preset": name})
    assert [chat.where for chat in read_chats(made)] == [f"{name}:{line}" for line in (1, 2, 3)]


def test_a_hub_id_is_refused_in_one_line_where_there_is_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("eaglechat", "hf:owner/name:train", "hf://owner/name:train", "hf://datasets/owner/name/a.jsonl"):
        with pytest.raises(UserError, match=r"--online") as refused:
            collect(tmp_path, source)
        assert "\n" not in str(refused.value)


def test_objects_of_a_store_are_read_like_files(tmp_path: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    store.store.clear()
    lines = write_lines(tmp_path / "rows.jsonl", rows(4)).read_bytes()
    store.pipe("/bucket/chats/a.jsonl.gz", gzip.compress(lines))
    store.pipe("/bucket/chats/b/c.jsonl", lines.replace(b"town", b"city"))
    store.pipe("/bucket/chats/notes.md", b"left alone")
    made = collect(tmp_path / "prefix", {"path": "memory://bucket/chats", "name": "n"})
    assert [chat.where for chat in read_chats(made)] == [
        f"{n}:{i}" for n in ("a.jsonl.gz", "b/c.jsonl") for i in (1, 2, 3, 4)
    ]
    made = collect(tmp_path / "pattern", {"path": "memory://bucket/chats/*.gz", "name": "n"})
    assert made.info["num_rows"] == 4
    assert content(collect(tmp_path / "file", f"file://{tmp_path}/rows.jsonl")) == content(
        collect(tmp_path / "path", str(tmp_path / "rows.jsonl"))
    )
    made = collect(tmp_path / "object", "memory://bucket/chats/b/c.jsonl")
    assert (made.info["num_rows"], next(iter(read_chats(made))).source) == (4, "c")
    with pytest.raises(UserError, match="no such file"):
        collect(tmp_path / "none", "memory://bucket/absent")
    with pytest.raises(UserError, match="credentials"):
        collect(tmp_path / "secret", "s3://ada:password@bucket/chats")
    store.store.clear()


def test_max_rows_looks_at_the_first_rows_only(tmp_path: Path) -> None:
    for number in range(3):
        write_lines(tmp_path / "in" / f"{number}.jsonl", rows(4, number * 4))
    notes: list[str] = []
    made = collect(tmp_path / "out", {"path": str(tmp_path / "in"), "name": "n", "max_rows": 6}, notes=notes)
    assert [chat.where for chat in read_chats(made)] == [f"0.jsonl:{n}" for n in (1, 2, 3, 4)] + [
        "1.jsonl:1",
        "1.jsonl:2",
    ]
    assert "n: stopped after 6 rows (max_rows)" in notes
    bad = tmp_path / "bad.jsonl"  # the row that reaches the limit is a bad one, which its reader counts
    good = [json.dumps(row) + "\n" for row in rows(5)]
    bad.write_text("".join([good[0], "not JSON\n" * 3, *good[1:]]))
    made = collect(tmp_path / "some", {"path": str(bad), "max_rows": 2})
    assert made.info["num_rows"] == 1


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"path": "absent/rows.jsonl"}, "no such file"),
        ({"path": "absent/*.jsonl"}, "no such file"),
        ({"path": "~no-such-user/rows.jsonl"}, "usable path"),
        ({"path": "x" * 300 + ".jsonl"}, "usable path"),
        ({"path": "a\0b.jsonl"}, "usable path"),
        ({"path": "hf:owner/name"}, "names no split"),
        ({"path": "nosuch://bucket/x"}, "nothing here opens nosuch://"),
    ],
)
def test_an_unusable_path_costs_one_line(tmp_path: Path, source: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        collect(tmp_path, {"name": "n", **source})
    assert said in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("eaglechatt", "no preset (did you mean 'eaglechat'?), and no path"),
        ({"pth": "a.jsonl"}, "unknown field 'pth' of a source (did you mean 'path'?)"),
        ({}, "name a preset or a path"),
        ({"preset": "sharegpt", "fields": {"text": "t"}}, "a preset knows its fields"),
        ({"path": "a.jsonl", "fields": {"mesages": "m"}}, "must be one of 'messages'"),
        ({"path": "a.jsonl", "language": "english"}, "two letters"),
        ({"path": "a.jsonl", "revision": "main"}, "count by their content"),
        ({"path": "a.jsonl", "max_rows": 0}, "greater than or equal to 1"),
        ({"path": "**"}, "add `name`"),
        (3, "must be an object"),
    ],
)
def test_a_mistyped_source_costs_one_line_before_anything_runs(source: Any, said: str) -> None:
    settings, faults = resolve("data.collect_chats").settings({"sources": [source]})
    assert settings == {} and len(faults) == 1
    assert said in faults[0][1] and "\n" not in faults[0][1]


def test_names_and_patterns_are_checked_before_anything_runs() -> None:
    step = resolve("data.collect_chats")
    given = {"sources": ["eaglechat", "a/x.jsonl"]}
    settings, faults = step.settings(given)
    assert not faults
    assert [source.label for source in step.arguments(settings)["sources"]] == ["eaglechat", "x"]
    _, faults = step.settings({"sources": ["a/x.jsonl", "b/x.json"], "clean": {"also_refusals": ["("]}})
    assert [place for place, _ in faults] == [("clean",), ("sources",)]
    assert "regular expression" in faults[0][1] and "two are called 'x'" in faults[1][1]
