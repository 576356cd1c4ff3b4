"""Files behind a source are listed in the order of their names; what cannot be read is named and never opened.

A step's key follows the content of its sources.
"""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest
from collected_chats import GOOD, collect, rows, write_lines, write_repository

from components.contract import Chats, Context, UserError
from components.data import collect_prompts
from components.data.formats.chats import read_chats
from components.data.settings import ChatSource
from components.data.sources.listing import (
    collect_chats_fingerprint,
    collect_prompts_fingerprint,
    collect_workloads_fingerprint,
    list_files,
)


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder)


def questions(number: int) -> list[dict[str, str]]:
    return [{"question": f"What is {index} plus {index}?", "answer": str(2 * index)} for index in range(number)]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("absent.jsonl", None, "no such file"),
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n\n", "no rows"),
        ("all_bad.jsonl", b"{\n[]\n", "no usable row, 2 set aside; the first: line 1"),
        ("lines.json", b'{"prompt": "a"}\n{"prompt": "b"}\n', ".jsonl"),
        ("rows.csv", b"a,b\n", "unknown kind of file"),
        ("rows.parquet", b"not parquet", "not readable as Parquet"),
        ("rows.jsonl.gz", b"not gzip", "cannot be read"),
        ("scalar.json", b"3", "expected a list"),
        ("empty_list.json", b"[]", "no rows"),
        ("cut.jsonl.gz", gzip.compress(b'{"prompt": "a"}\n' * 99, mtime=0)[:-12], "cannot be read"),
        ("cut.json.gz", gzip.compress(b'[{"prompt": "a"}]', mtime=0)[:-3], "cannot be read"),
        ("spoilt.jsonl.gz", gzip.compress(bytes(range(99)), mtime=0)[:30] + b"\xff" * 99, "cannot be read"),
        ("latin1.json", b'[{"prompt": "\xe9"}]', "not UTF-8"),
        ("utf16.jsonl", '{"prompt": "a"}\n'.encode("utf-16"), "UTF-16"),
        ("~no-such-user/rows.jsonl", None, "usable path"),
        ("x" * 300 + ".jsonl", None, "usable path"),
    ],
)
def test_unusable_files_cost_one_line(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    file = tmp_path / name if not name.startswith("~") else Path(name)
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as refused:
        collect_prompts(source=str(file), ctx=context(tmp_path / "out"))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_named_like_a_file_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "rows" / "odd.jsonl").mkdir(parents=True)
    write_lines(tmp_path / "rows" / "rows.jsonl", questions(60))
    assert collect_prompts(source=str(tmp_path / "rows"), ctx=context(tmp_path / "out")).info["found"] == 60


def content(made: Chats) -> list[tuple[Any, ...]]:
    return [chat.messages for chat in read_chats(made)]


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


def test_a_pipe_or_a_folder_without_files_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="no regular file"):
        list_files(ChatSource(path=str(tmp_path / "pipe.jsonl")))
    with pytest.raises(UserError, match=r"none of its 1 files can be read; pipe\.jsonl: no regular file"):
        list_files(ChatSource(path=str(tmp_path)))


def test_links_out_of_the_folder_are_followed_where_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "outside.jsonl").write_text(GOOD)
    (tmp_path / "in" / "out.jsonl").symlink_to(tmp_path / "outside.jsonl")
    (tmp_path / "in" / "loop").symlink_to(tmp_path)
    followed = list_files(ChatSource(path=str(tmp_path / "in"), name="n", follow_links=True))
    assert [file.name for file in followed.files] == ["loop/outside.jsonl", "out.jsonl"]  # in/loop/in/... ends
    with pytest.raises(UserError, match="follow_links: true"):
        list_files(ChatSource(path=str(tmp_path / "in"), name="n"))


def test_a_link_to_itself_costs_itself_alone(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    listing = list_files(ChatSource(path=str(tmp_path), name="n"))
    assert [file.name for file in listing.files] == ["good.jsonl"]
    assert [(one.name, one.reason) for one in listing.unusable] == [("loop.jsonl", "broken_link")]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "rows.jsonl", questions(3))
    before = collect_prompts_fingerprint({"source": str(file)})
    file.touch()
    assert collect_prompts_fingerprint({"source": str(file)}) == before
    write_lines(file, questions(4))
    assert collect_prompts_fingerprint({"source": str(file)}) != before


def test_the_fingerprint_follows_content_and_what_cannot_be_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", rows(2))
    settings = {"sources": [{"path": str(tmp_path / "in"), "name": "n"}]}
    before = collect_chats_fingerprint(settings)
    (tmp_path / "in" / "a.jsonl").touch()
    assert collect_chats_fingerprint(settings) == before
    write_lines(tmp_path / "in" / "a.jsonl", rows(3))
    changed = collect_chats_fingerprint(settings)
    assert changed != before
    os.mkfifo(tmp_path / "in" / "b.jsonl")
    assert collect_chats_fingerprint(settings) == {**changed, "n: b.jsonl": "not_a_file"}
    assert collect_chats_fingerprint({"sources": ["eaglechat", "s3://bucket/chats/x.jsonl"]}) == {}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "sums", questions(60))


def test_a_local_data_set_counts_by_content_and_a_hub_id_by_name(repository: Path) -> None:
    source = {"source": f"hf:{repository}:train"}
    before = collect_prompts_fingerprint(source)
    assert len(before) == 3
    write_lines(repository / "other" / "rows.jsonl", questions(1))
    assert collect_prompts_fingerprint(source) != before
    assert collect_prompts_fingerprint({"source": "hf:owner/name@v1:train"}) == {}


def test_the_key_follows_the_files(copies: dict[str, str]) -> None:
    settings = {"sources": ["mt-bench", {"preset": "ceval", "path": copies["ceval"]}]}
    before = collect_workloads_fingerprint(settings)
    assert len(before) == 2 and all(name.endswith("_val.csv") for name in before)
    file = Path(copies["ceval"]) / "physician_val.csv"
    file.write_text(file.read_text("utf-8") + "9,新,1,2,3,4,A\n", "utf-8")
    assert collect_workloads_fingerprint(settings) != before
    assert collect_workloads_fingerprint({"sources": ["gsm8k"]}) == {}
