"""A preset reads the rows of its collection, from a copy of its files or from its repository."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from collected_chats import collect, rows, write_lines

from components.data.formats.chats import read_chats
from components.data.sources.presets import CHAT_PRESETS, WORKLOAD_PRESETS, Workload, WorkloadPreset, WorkloadPresetName

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
    here = dataclasses.replace(preset, repository=str(copy))
    monkeypatch.setitem(CHAT_PRESETS, name, here)
    made = collect(tmp_path / "out", {"preset": name})
    assert [chat.where for chat in read_chats(made)] == [f"{name}:{line}" for line in (1, 2, 3)]


def test_the_presets_are_those_that_settings_may_name() -> None:
    assert set(WORKLOAD_PRESETS) == set(get_args(WorkloadPresetName))
    assert len(WORKLOAD_PRESETS["ceval"].configs) == len(set(WORKLOAD_PRESETS["ceval"].configs)) == 52
    covered = {preset.workload for preset in WORKLOAD_PRESETS.values()}
    covered |= {workload for preset in WORKLOAD_PRESETS.values() for workload in preset.workloads.values()}
    assert covered == set(get_args(Workload))
    assert all(preset.licence and preset.repository.count("/") == 1 for preset in WORKLOAD_PRESETS.values())


@pytest.mark.parametrize("preset", WORKLOAD_PRESETS.values(), ids=lambda preset: preset.name)
def test_a_preset_asks_something_of_subsets_or_of_files(preset: WorkloadPreset) -> None:
    assert [bool(preset.turns), bool(preset.fields), bool(preset.messages)].count(True) == 1
    assert not (preset.configs and preset.files)
    assert preset.template.endswith("".join(f"{{{field}}}" for field in preset.optional))
    assert set(preset.languages) <= set(preset.workloads) or not preset.category


@pytest.mark.parametrize("preset", WORKLOAD_PRESETS.values(), ids=lambda preset: preset.name)
def test_the_guide_lists_a_preset_with_its_repository_and_licence(preset: WorkloadPreset) -> None:
    guide = Path(__file__).parents[4] / "docs" / "my-data.md"
    rows = [line for line in guide.read_text().splitlines() if f"`{preset.name}`" in line and line.startswith("|")]
    assert len(rows) == 1 and f"`{preset.repository}`" in rows[0] and f"| {preset.licence} |" in rows[0]
