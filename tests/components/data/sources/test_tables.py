"""Tables from outside: a damaged row costs itself, every other is there, and no file ends the process that reads it.

Data sets in Hugging Face format are streamed through the same row checks, from folders without any network.
"""

from __future__ import annotations

import io
import json
import random
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from collected_chats import collect, write_lines, write_repository
from hypothesis import given
from hypothesis import strategies as st

from components.contract import Context, UserError
from components.data import collect_prompts
from components.data.formats.chats import read_chats, read_dropped
from components.data.formats.prompts import SPLITS, read_prompts
from components.data.settings import Cleaning
from components.data.sources import tables
from components.data.sources.addresses import parse_hub_source
from components.data.sources.bad_rows import MAX_ROW_BYTES
from components.data.sources.tables import arrow_rows, csv_rows, hub_rows

plain = st.text("abcé ;'\t", min_size=1, max_size=8).map(str.strip).filter(bool)


def read(text: str) -> tuple[list[tuple[int, dict[str, str]]], list[int]]:
    """(rows with their lines, the lines that were set aside) of a CSV text."""
    aside: list[int] = []
    rows = list(csv_rows("t.csv", io.BytesIO(text.encode()), lambda where, line, why, shown: aside.append(line)))
    return [(line, dict(row)) for line, row in rows], aside


def test_a_quote_that_nothing_closes_costs_its_own_row() -> None:
    lines = ["id,text", *(f"{n},row {n}" for n in range(1, 2000))]
    lines[9] = '9,"row 9'
    rows, aside = read("\n".join(lines) + "\n")
    assert aside == [10] and len(rows) == 1998
    assert [line for line, _ in rows] == [n for n in range(2, 2001) if n != 10]


@given(st.lists(st.tuples(plain, plain), min_size=2, max_size=30), st.data())
def test_damage_to_one_row_costs_no_other(table: list[tuple[str, str]], data: st.DataObject) -> None:
    lines = [",".join(row) for row in table]
    damaged = data.draw(st.integers(0, len(lines) - 1))
    lines[damaged] = data.draw(st.sampled_from(['"', '"a"b,c', "a", "a,b,c", '"a,b', 'a,"b', '"a,""b']))
    rows, aside = read("x,y\n" + "\n".join(lines) + "\n")
    assert aside == [damaged + 2]
    assert [(line - 2, row["x"], row["y"]) for line, row in rows] == [
        (number, *row) for number, row in enumerate(table) if number != damaged
    ]


@given(st.lists(st.tuples(*[st.text('a,"\n\r é', max_size=6)] * 2), max_size=20))
def test_what_csv_can_hold_is_read_as_it_was_written(table: list[tuple[str, str]]) -> None:
    def cell(text: str) -> str:
        return '"' + text.replace('"', '""') + '"'

    rows, aside = read("x,y\n" + "".join(f"{cell(a)},{cell(b)}\n" for a, b in table))
    assert not aside and [(row["x"], row["y"]) for _, row in rows] == table


def test_a_csv_line_longer_than_a_row_may_be_costs_itself() -> None:
    rows, aside = read("x,y\n1," + "a" * (MAX_ROW_BYTES + 5) + '\n2,"b\n' + "c" * (MAX_ROW_BYTES + 5) + "\n3,d\n")
    assert aside == [2, 3, 4] and rows == [(5, {"x": "3", "y": "d"})]


@pytest.mark.parametrize("damage", ["zeroed", "cut", "more"])
def test_an_arrow_stream_that_is_not_whole_says_so(damage: str, tmp_path: Path) -> None:
    table = pa.table({"n": list(range(60))})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table, max_chunksize=20)
    whole = sink.getvalue()
    heads = [at for at in range(0, len(whole), 8) if whole[at : at + 4] == b"\xff\xff\xff\xff"]
    assert len(heads) == 5  # the schema, three batches, the end mark
    zeroed = whole[: heads[2]] + bytes(16) + whole[heads[2] + 16 :]
    file = tmp_path / "rows.arrow"
    file.write_bytes({"zeroed": zeroed, "cut": whole[: heads[3]], "more": whole + whole[heads[1] : heads[2]]}[damage])
    aside: list[tuple[int, str]] = []
    rows = list(arrow_rows(file, lambda where, line, why, shown: aside.append((line, str(why)))))
    kept = {"zeroed": 20, "cut": 40, "more": 60}[damage]
    assert len(rows) == kept and [line for line, _ in aside] == [kept + 1]
    assert "breaks off" in aside[0][1]


READS = """
import sys
from pathlib import Path
from components.contract import UserError
from components.data.sources.tables import arrow_rows
for file in sorted(Path(sys.argv[1]).iterdir()):
    try:
        list(arrow_rows(file, lambda *aside: None))
    except UserError:
        pass
print("read")
"""


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_no_mutant_of_an_arrow_file_ends_the_process(kind: str, tmp_path: Path) -> None:
    """In a process of its own, since a bad offset ends one without an exception."""
    table = pa.table({"text": [f"row {n}" * 5 for n in range(60)], "tags": [["a", "bc"] * (n % 3) for n in range(60)]})
    sink = io.BytesIO()
    writer = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with writer(sink, table.schema) as out:
        out.write_table(table)
    whole, dice = sink.getvalue(), random.Random(0)
    for number in range(80):
        mutant = bytearray(whole)
        for _ in range(dice.randint(1, 8)):
            mutant[dice.randrange(len(mutant))] = dice.randrange(256)
        (tmp_path / f"{number:02d}.arrow").write_bytes(bytes(mutant))
    done = subprocess.run([sys.executable, "-c", READS, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "read"), done.stderr[-2000:]


def test_a_file_of_something_else_is_one_line() -> None:
    with pytest.raises(UserError, match="UTF-16"):
        list(csv_rows("t.csv", io.BytesIO("x,y".encode("utf-16")), lambda *aside: None))


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
    monkeypatch.setattr(tables, "MAX_ROW_BYTES", 64)
    (tmp_path / "a.txt").write_text("x" * 100 + "\nThe second line, which is short.\n")
    source = {"path": str(tmp_path / "a.txt"), "documents": "line"}
    made = collect(tmp_path / "out", source, clean=Cleaning(min_text_characters=1))
    assert [(chat.where, chat.text) for chat in read_chats(made)] == [("a.txt:2", "The second line, which is short.")]
    assert [(row["where"], row["reason"]) for row in read_dropped(made.path)] == [("a.txt:1", "too_long_a_row")]


def context(folder: Path) -> Context:
    folder.mkdir(parents=True, exist_ok=True)
    return Context(key="k", out=folder, scratch=folder)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the engine sets for every step; set in the modules too, since they read it when they are imported."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def questions(number: int) -> list[dict[str, str]]:
    return [{"question": f"{index} 加 {index} 等于多少？", "answer": str(2 * index)} for index in range(number)]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_repository(tmp_path / "sums", questions(60))


def test_a_data_set_gives_the_prompts_of_its_rows_and_bad_rows_are_set_aside(repository: Path, tmp_path: Path) -> None:
    source = f"hf:{repository}:train"
    made = collect_prompts(source=source, num_train=20, ctx=context(tmp_path / "hub"))
    plain = collect_prompts(
        source=str(write_lines(tmp_path / "sums.jsonl", questions(60))), num_train=20, ctx=context(tmp_path / "plain")
    )
    for split in SPLITS:
        ids = [[prompt.prompt_id for prompt in read_prompts(prompts, split)] for prompts in (made, plain)]
        assert ids[0] == ids[1]
    assert set(made.info["workloads"]) == {"sums"} and made.info["set_aside"] == 1
    aside = json.loads((made.path / "set_aside.jsonl").read_text())
    assert (aside["source"], aside["line"]) == (source, 31) and "no field" in aside["why"]


def test_a_configuration_and_a_relative_folder_can_be_named(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(repository.parent)
    for place in (f"{repository}/other", "./sums/other"):
        assert [row["prompt"] for _, row in hub_rows(parse_hub_source(f"hf:{place}:train"))][:2] == ["case 0", "case 1"]
    assert parse_hub_source("hf:sums:train").folder == Path("sums")


def test_what_save_to_disk_wrote_can_be_read(tmp_path: Path) -> None:
    import datasets

    table = datasets.Dataset.from_list(questions(5))
    table.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"easy": table}).save_to_disk(str(tmp_path / "many"))
    for source in (f"hf:{tmp_path}/one:train", f"hf:{tmp_path}/many:easy"):
        assert [row for _, row in hub_rows(parse_hub_source(source))] == questions(5)
    with pytest.raises(UserError, match="no split train; it has easy"):
        list(hub_rows(parse_hub_source(f"hf:{tmp_path}/many:train")))


def test_an_offset_that_leads_out_of_its_buffer_is_one_line(tmp_path: Path) -> None:
    """`datasets` would follow it, which ends the process."""
    import datasets

    texts = ["Who grows peas?", "Where do beans grow?", "Is there water?"]
    datasets.Dataset.from_dict({"prompt": texts}).save_to_disk(str(tmp_path / "saved"))
    (file,) = (tmp_path / "saved").glob("*.arrow")
    raw, offsets = file.read_bytes(), [0, *(len("".join(texts[: n + 1])) for n in range(3))]
    at = raw.find(struct.pack("<4i", *offsets))
    assert at > 0
    file.write_bytes(raw[: at + 4] + struct.pack("<i", 0x7FFFFF00) + raw[at + 8 :])
    with pytest.raises(UserError, match=rf"cannot read it \({file.name}: .*ffset"):
        list(hub_rows(parse_hub_source(f"hf:{tmp_path / 'saved'}:train")))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hf:", "names no split"),
        ("hf:openai/gsm8k", "names no split"),
        ("hf:openai/gsm8k:", "names no split"),
        ("hf:openai/gsm8k:train[:10]", "names no split"),
        ("hf:gsm8k:train", "not a hub id"),
        ("hf:a/b/c/d:train", "not a hub id"),
        ("hf:./absent/absent:train", "no such folder"),
        ("hf:~nobody-at-all/x:train", "not a usable path"),
        ("hf:openai/gsm8k/main:train", "draftsmith run --online"),
        ("hf:{repository}:absent", "Available splits"),
        ("hf:{repository}/absent:train", "not found"),
        ("hf:{empty}:train", "cannot read it"),
    ],
)
def test_what_cannot_be_had_costs_one_line(repository: Path, tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as refused:
        collect_prompts(
            source=source.format(repository=repository, empty=tmp_path / "empty"), ctx=context(tmp_path / "out")
        )
    assert said in str(refused.value)
    assert str(refused.value).startswith("source: hf:") and "\n" not in str(refused.value)


def test_malformed_json_in_a_data_set_is_an_error_that_says_the_way_round(repository: Path, tmp_path: Path) -> None:
    file = repository / "other" / "rows.jsonl"
    file.write_text(file.read_text() + "{bad\n")
    with pytest.raises(UserError, match=r"give .* path") as refused:
        collect_prompts(source=f"hf:{repository}/other:train", ctx=context(tmp_path / "out"))
    assert "\n" not in str(refused.value)
    assert collect_prompts(source=str(file), ctx=context(tmp_path / "out")).info["set_aside"] == 1


def test_code_that_comes_with_a_data_set_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "scripted"
    folder.mkdir()
    (folder / "scripted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n")
    with pytest.raises(UserError):
        collect_prompts(source=f"hf:{folder}:train", ctx=context(tmp_path / "out"))
    assert not (tmp_path / "ran").exists()


def test_a_hub_id_is_refused_in_one_line_where_there_is_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("eaglechat", "hf:owner/name:train", "hf://owner/name:train", "hf://datasets/owner/name/a.jsonl"):
        with pytest.raises(UserError, match=r"--online") as refused:
            collect(tmp_path, source)
        assert "\n" not in str(refused.value)
