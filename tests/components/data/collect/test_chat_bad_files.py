"""Bad input costs clear rows in the report or one clear error: never a crash, a hang, or a row that is lost unsaid."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from collected_chats import GOOD, LENIENT, collect
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from components.contract import Context, UserError
from components.data import collect_chats
from components.data.collect.chats import COUNTS, ChatShard, Counts, collect_shard
from components.data.formats.chats import read_chats, read_dropped
from components.data.settings import ChatSource
from components.data.sources.listing import SourceFile


def bad_folder(folder: Path) -> dict[str, str]:
    """A folder of everything that goes wrong; place -> the reason that is to be given for it."""
    inside = folder / "in"
    (inside / "folder.jsonl").mkdir(parents=True)
    good = GOOD.encode()
    deep = b"[" * 10_000 + b"]" * 10_000
    noisy = [good.replace(b"}", b', "noise": "%s"}' % os.urandom(500).hex().encode()) for _ in range(40)]
    files = {
        "good.jsonl": good * 3,
        "folder.jsonl/inside.jsonl": good,
        "cut.jsonl.gz": gzip.compress(b"".join(noisy))[:-9000],
        "no.jsonl.gz": b"this is not gzip",
        "latin.jsonl": good + b'{"prompt": "caf\xe9"}\n' + good,
        "nul.jsonl": good + b"\0" * 64 + b"\n" + b'{"prompt": "a\\u0000b"}\n',
        "deep.jsonl": deep + b"\n" + good + b'{"messages": [{"role": "user", "content": ' + deep + b"}]}\n",
        "long.jsonl": good + b'{"prompt": "' + b"x" * (100 << 20) + b'"}\n' + good,
        "types.jsonl": b'7\nnull\n"text"\n[1]\n{"prompt": 3}\n{"messages": {"role": "user"}}\n{"x": NaN}\n',
        "empty.jsonl": b"",
        "bom.jsonl": b"\xef\xbb\xbf" + good,
        "utf16.jsonl": GOOD.encode("utf-16"),
        "broken.json": b'[\n{"prompt": "a" "b"},\n' + good + b",\n" + deep + b",\n" + good + b"]",
        "latin.json": b'[{"prompt": "caf\xe9"},\n' + good + b"]",
        "number.json": b"3",
        "no.parquet": b"PAR1 and nothing else",
        "no.arrow": b"ARROW1 and nothing else",
        "ragged.csv": b"prompt,response\nWhat is here?,Peas.\nWhat,is,there?\n",
        "README.md": b"no rows",
    }
    for name, content in files.items():
        (inside / name).write_bytes(content)
    table = pyarrow.table({"id": [1, 2], "score": [0.5, 0.25]})
    pyarrow.parquet.write_table(table, inside / "columns.parquet")
    (folder / "outside.jsonl").write_bytes(good)
    (inside / "out.jsonl").symlink_to(folder / "outside.jsonl")
    (inside / "gone.jsonl").symlink_to(inside / "never.jsonl")
    (inside / "out").symlink_to(folder)
    os.mkfifo(inside / "pipe.jsonl")
    expected = {
        "cut.jsonl.gz": "unreadable_file",
        "no.jsonl.gz": "unreadable_file",
        "latin.jsonl:2": "not_utf8",
        "nul.jsonl:2": "not_json",
        "nul.jsonl:3": "nul_characters",
        "deep.jsonl:1": "nested_too_deeply",
        "deep.jsonl:3": "nested_too_deeply",
        "long.jsonl:2": "too_long_a_row",
        **{f"types.jsonl:{line}": "wrong_type" for line in range(1, 7)},
        "types.jsonl:7": "not_json",
        "empty.jsonl": "empty_file",
        "utf16.jsonl": "not_utf8",
        "broken.json:2": "not_json",
        "broken.json:5": "nested_too_deeply",
        "latin.json:1": "not_utf8",
        "number.json": "unreadable_file",
        "no.parquet": "unreadable_file",
        "no.arrow": "unreadable_file",
        "columns.parquet:1": "unknown_shape",
        "columns.parquet:2": "unknown_shape",
        "ragged.csv:3": "not_csv",
        "out.jsonl": "link_out_of_folder",
        "gone.jsonl": "broken_link",
        "out": "link_out_of_folder",
        "pipe.jsonl": "not_a_file",
    }
    if os.geteuid() != 0:  # root may read everything
        (inside / "secret.jsonl").write_bytes(good)
        (inside / "secret.jsonl").chmod(0)
        expected["secret.jsonl"] = "unreadable"
    return expected


def test_one_row_that_cannot_be_kept_stops_nothing(tmp_path: Path) -> None:
    call = [{"from": "human", "value": "Add."}, {"from": "function_call", "value": '{"name": "add", "arguments": NaN}'}]
    bad = [{"text": "\u0001\u0002"}, {"conversations": call}]
    half = [{**turn, "value": turn["value"].replace("NaN", '"\\ud800"')} for turn in call]
    lines = "".join(json.dumps(row) + "\n" for row in [*bad, {"conversations": half}])
    (tmp_path / "a.jsonl").write_text(lines + GOOD, encoding="utf-8")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").mkdir()
    ctx = Context(key="k", out=tmp_path / "out", scratch=tmp_path / "scratch")
    made = collect_chats(
        sources=[ChatSource(path=str(tmp_path / "a.jsonl"))], clean=LENIENT.model_copy(update={"repair": True}), ctx=ctx
    )
    assert made.info["num_rows"] == 1
    assert {row["where"]: row["reason"] for row in read_dropped(made.path)} == {
        "a.jsonl:1": "empty_text",
        "a.jsonl:2": "wrong_type",
        "a.jsonl:3": "wrong_type",
    }


@pytest.mark.timeout(120)
def test_a_folder_of_bad_files_costs_clear_rows_and_nothing_else(tmp_path: Path) -> None:
    expected = bad_folder(tmp_path)
    notes: list[str] = []
    made = collect(tmp_path / "work", {"path": str(tmp_path / "in"), "name": "n"}, clean=LENIENT, notes=notes)
    dropped = list(read_dropped(made.path))
    assert {row["where"]: row["reason"] for row in dropped} == expected
    assert len(dropped) == len(expected) and all(row["excerpt"] for row in dropped)
    assert made.info["dropped"] == dict(
        sorted(Counter(expected.values()).items(), key=lambda entry: (-entry[1], entry[0]))
    )
    kept = Counter(chat.where.split(":")[0] for chat in read_chats(made))
    cut = kept.pop("cut.jsonl.gz")  # what stood before the break
    assert 10 < cut < 40
    assert kept == {
        "good.jsonl": 3, "folder.jsonl/inside.jsonl": 1, "latin.jsonl": 2, "nul.jsonl": 1, "deep.jsonl": 1,
        "long.jsonl": 2, "bom.jsonl": 1, "broken.json": 2, "latin.json": 1, "ragged.csv": 1,
    }  # fmt: skip
    assert made.info["num_rows"] == sum(kept.values()) + cut
    assert made.info["num_rows"] + made.info["num_dropped"] == made.info["num_read"]
    num_broken = sum(":" not in where for where in expected)
    assert any(f"n: {num_broken} files could not be read, or not to their end" in note for note in notes)
    assert "n: 1 files of other kinds left alone" in notes


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", b"", "empty"),
        ("blank.jsonl", b"\n \n", "there are no rows in it"),
        ("bad.jsonl", b"{\n[]\n", "no usable row in 2"),
        ("rows.xlsx", b"PK", "unknown kind of file"),
        ("rows.parquet", b"not parquet", "not readable as Parquet"),
        ("rows.jsonl.zst", b"not zstd", "cannot be read"),
        ("utf16.csv", "prompt,response\na,b\n".encode("utf-16"), "UTF-16"),
    ],
)
def test_a_source_without_a_usable_row_is_one_error_in_one_line(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        collect(tmp_path / "work", str(tmp_path / name), clean=LENIENT)
    assert said in str(refused.value) and "\n" not in str(refused.value)


lines = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            GOOD.encode().strip(),
            *(b"", b"  ", b"NaN", b"{}", b"[", b"\0", b"\xff\xfe", b"1" * 5000, b"[" * 3000, b'{"text": "\xe9"}'),
            *(b'{"text": "\\ud800"}', b'{"messages": []}', b'{"data": ["a", 1]}', b'{"a": 1e999}', b"\xef\xbb\xbf{}"),
        ]
    ),
)
SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".jsonl.gz", ".json.bz2", ".jsonl.xz", ".csv.zst", ".parquet", ".arrow")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(SUFFIXES), st.lists(lines, max_size=5), st.sampled_from([b"\n", b"\r\n", b",\n"]), st.booleans())
@example(".jsonl.gz", [b"a", b"b"], b"\n", True)
@example(".json", [b"[{}", b"]"], b",\n", False)
def test_no_bytes_crash_a_reader_and_every_row_is_accounted_for(
    suffix: str, parts: list[bytes], end: bytes, packed: bool
) -> None:
    raw = end.join(parts)
    if packed and suffix.endswith(".gz"):
        raw = gzip.compress(raw)[: -len(parts) or None]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        file = folder / f"rows{suffix}"
        file.write_bytes(raw)
        found = SourceFile(str(file), file.name, len(raw))
        source = ChatSource(path=str(file), name="n")
        collect_shard(ChatShard(folder / "shard", source, (found,), (), LENIENT, False), lambda share: None)
        counts = Counts.read(folder / "shard" / COUNTS)
        dropped = list(read_dropped(folder / "shard"))
        kept = list(read_chats(folder / "shard"))
    assert counts.numbers["kept"] == len(kept) and counts.dropped.total() == len(dropped)
    assert counts.numbers["read"] == len(kept) + len(dropped)
    assert all(row["where"].startswith("rows") and row["reason"].isidentifier() for row in dropped)
    if suffix == ".jsonl" and not raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        filled = [number for number, line in enumerate(raw.split(b"\n"), start=1) if line.strip()]
        places = sorted(
            int(where.rsplit(":", 1)[1]) for where in [*(r["where"] for r in dropped), *(c.where for c in kept)]
        )
        assert places == filled
