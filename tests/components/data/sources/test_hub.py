"""Data sets in Hugging Face format: streamed through the same row checks, from folders without any network."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from collected_chats import collect, write_lines

from components.contract import Context, UserError
from components.data import collect_prompts
from components.data.formats.prompts import SPLITS, read_prompts
from components.data.sources.addresses import parse_hub_source
from components.data.sources.hub import hub_rows


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
    """A repository with two configurations: `main` in Parquet with one bad row of 61, `other` in JSONL."""
    import pyarrow.parquet

    folder = tmp_path / "sums"
    write_lines(folder / "other" / "rows.jsonl", [{"prompt": f"case {index}"} for index in range(60)])
    (folder / "main").mkdir()
    rows: list[Any] = [*questions(30), {"question": None, "answer": "1"}, *questions(60)[30:]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "main" / "train.parquet")
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  default: true\n  data_files: main/train.parquet\n"
        "- config_name: other\n  data_files: other/rows.jsonl\n---\n"
    )
    return folder


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
