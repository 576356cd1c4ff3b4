"""Published tables: every committed file is read whole; measurements stand beside rows by the rows' own convention."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import report_study  # noqa: F401 (simulated_rows lies beside the tests that it points to)
from hypothesis import given
from hypothesis import strategies as st
from setuptools import find_namespace_packages
from simulated_rows import make_request

from components.contract import UserError
from components.rows import write_rows
from flows.cli import main
from flows.commands.published import (
    COLUMNS,
    FOLDER,
    OWN_LOOP,
    Measured,
    PublishedRow,
    differences,
    hold_beside,
    list_tables,
    read_table,
    same_target,
)
from storage.artifacts.store import Store
from storage.history.write import record_artifact

ROOT = Path(__file__).resolve().parents[3]
DRAFT, TARGET = "a" * 64, "t" * 64
NAMES = sorted(file.stem for file in FOLDER.iterdir())
CONDITIONS: dict[str, Any] = {
    "target": "meta-llama/Llama-3.1-8B-Instruct",
    "drafter": "theirs",
    "method": "mtp",
    "workload": "gsm8k",
    "depth": 3,
    "tree": None,
    "temperature": 0.0,
    "batch_size": 1,
    "engine": "SGLang",
    "hardware": None,
    "dtype": None,
    "averaged": "pooled",
    "bonus": True,
    "overshoot": False,
    "timed": "decode",
}
SOURCE = {"work": "a paper", "table": "Table 2", "url": "https://example.org/paper", "read": "2026-11-23"}


def published(**changes: Any) -> PublishedRow:
    return PublishedRow.model_validate({**CONDITIONS, "al": 2.0, **changes})


def arm(**changes: Any) -> Measured:
    one = Measured(
        "Llama-3.1-8B-Instruct", "mtp", "gsm8k", 3, None, 0.0, 1, OWN_LOOP, "a CPU", "float32", DRAFT,
        datetime(2026, 11, 1), {"al": 2.5, "al_macro": 2.75, "al_with_overshoot": 3.0, "accepted_per_round": 2.0,
        "accepted_per_round_macro": 2.25}, {"speedup": 1.5, "speedup_e2e": 1.25, "tokens_per_s": 10.0},
    )  # fmt: skip
    return dataclasses.replace(one, **changes)


def write_table(folder: Path, rows: Any, **changes: Any) -> Path:
    content = {"source": SOURCE, "licence": "figures", "note": "n", "conditions": CONDITIONS, "rows": rows, **changes}
    (folder / "own.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_every_committed_table_is_read_and_has_source_conditions_and_numbers(name: str) -> None:
    table = read_table(name)
    assert len(table.rows) >= 15 and table.licence and table.note
    content = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for told, row in zip(content["rows"], table.rows, strict=True):
        assert {"al", "speedup", "tokens_per_s"} & told.keys()
        shown = row.model_dump(exclude_unset=True)
        assert shown == content["conditions"] | told, "nothing is changed on the way"
    assert len(set(table.rows)) == len(table.rows), "no row stands twice"
    assert [shown.name for shown in list_tables()] == NAMES


def test_an_installation_brings_the_tables_to_where_they_are_looked_for() -> None:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    packages = find_namespace_packages(str(ROOT), include=found["packages"]["find"]["include"])
    folder = FOLDER.relative_to(ROOT)
    assert (
        ".".join(folder.parts) in packages and "flows.commands" in packages and "*.json" in found["package-data"]["*"]
    )
    assert "benchmarks" not in packages
    assert f"COPY {folder} {folder}\n" in (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("rows", "changes", "says"),
    [
        ([{"al": 5.5}], {}, "row 1: Value error, with its bonus tokens"),
        ([{"al": 2.0}, {}], {}, "row 2: Value error, a row has al, speedup or tokens_per_s"),
        ([{"al": 2.0, "depht": 3}], {}, "row 1.depht: Extra inputs"),
        ([{"al": float("nan")}], {}, "row 1.al: Input should be a finite number"),
        ([2.0], {}, "row 1: is not an object"),
        ([], {}, "rows: is not a list with something in it"),
        ([{"al": 2.0}], {"source": {**SOURCE, "url": "a book"}}, "source.url: "),
        ([{"al": 2.0}], {"source": {"work": "w"}}, "source.table: Field required"),
        ([{"al": 2.0}], {"conditions": {"target": "t"}}, "row 1.drafter: Field required"),
        ([{"al": 2.0}], {"remark": "x"}, "remark: expected source, "),
    ],
)
def test_a_table_that_is_not_as_it_must_be_is_refused_in_one_line(
    tmp_path: Path, rows: Any, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        read_table("own", write_table(tmp_path, rows, **changes))
    assert says in str(refused.value) and "\n" not in str(refused.value) and "own.json" in str(refused.value)


@given(theirs=st.sampled_from(["Llama-3.1-8B-Instruct", "x/Llama-3.2-1B", "Qwen/Qwen3-8B"]), depth=st.integers(1, 9))
def test_a_ratio_stands_only_beside_the_same_target_and_what_differs_is_named(theirs: str, depth: int) -> None:
    row = published(target=theirs, depth=depth)
    told = differences(row, arm())
    [cells] = hold_beside(dataclasses.replace(read_table(NAMES[0]), rows=(row,)), [arm()])
    assert (
        (1.25 in cells) == same_target(theirs, "meta-llama/Llama-3.1-8B-Instruct@main") == ("so no ratio" not in told)
    )
    assert (f"depth 3 [{depth}]" in told) == (depth != 3)
    assert f"engine {OWN_LOOP} [SGLang]" in told and told.endswith("not stated: hardware, dtype")


@pytest.mark.parametrize(
    ("changes", "al", "says"),
    [
        ({}, 2.5, ""),
        ({"averaged": "macro"}, 2.75, ""),
        ({"overshoot": True}, 3.0, ""),
        ({"bonus": False, "overshoot": True}, 2.0, ""),
        ({"bonus": False, "averaged": "macro"}, 2.25, "with overshoot [without]"),
        ({"averaged": "macro", "overshoot": True}, 2.75, "without overshoot [with]"),
        ({"averaged": None, "bonus": None}, 2.5, "bonus tokens, pooled or macro"),
    ],
)
def test_acceptance_length_is_taken_by_the_rows_own_convention(changes: dict[str, Any], al: float, says: str) -> None:
    row = published(**changes)
    assert arm().lengths[row.al_column] == al and says in differences(row, arm())


def test_the_newest_measurement_on_the_same_target_is_taken_and_its_nearest_arm() -> None:
    newer = datetime(2026, 11, 2)
    arms = [
        arm(target="other", measured_at=newer, lengths={"al": 9.0}),
        arm(depth=7, lengths={"al": 4.0}),
        arm(workload="all", lengths={"al": 1.5}),
        arm(depth=4, lengths={"al": 1.75}),
        arm(tree="12 tokens", lengths={"al": 1.9}),
    ]
    table = dataclasses.replace(read_table(NAMES[0]), rows=(published(), published(target="other")))
    assert [cells[COLUMNS.index("al")] for cells in hold_beside(table, arms)] == [1.75, 9.0]


def test_the_command_lists_tables_and_holds_the_newest_measurement_beside_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DRAFTSMITH_HOME", str(tmp_path / "home"))
    assert main(["compare", "--published", "--format", "json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == NAMES
    assert main(["compare", "--published", "eagle3-paper", "--format", "json"]) == 3, "nothing was measured"
    rows = json.loads(capsys.readouterr().out)
    assert {row["differs"] for row in rows} == {"nothing measured with eagle3"} and {row["al"] for row in rows} == {
        None
    }

    store = Store(tmp_path / "home")

    def add(key: str, kind: str, info: Any, measured: list[Any]) -> None:
        out, _ = store.open_staging(key)
        write_rows(out, measured)
        facts = {"pipeline": "p", "step": "s", "run_id": "r", "seconds": 1.0}
        facts["machine"] = {"machine_id": "m", "device_name": "A small CPU"}  # type: ignore[assignment]
        record_artifact(store.home, store.commit(key, kind, info, facts).path)

    ours = {"workload": "gsm8k", "draft_key": DRAFT}
    add(TARGET, "Target", {"model": "hub/llama-3.1-8b-instruct"}, [])
    add(DRAFT, "Draft", {"method": "eagle3", "target_key": TARGET}, [])
    fast = [make_request("eagle3", 7, n, 101, 0.5, **ours) for n in range(4)]  # type: ignore[arg-type]
    plain = [make_request("none", 0, n, 101, 1.0, workload="gsm8k") for n in range(4)]
    add("e1", "Measurements", {}, [*fast, *plain])
    for reference in ([], [DRAFT[:8]]):
        assert main(["compare", "--published", "eagle3-paper", *reference, "--format", "json"]) == 0
        told = capsys.readouterr()
        rows = {(r["target"], r["workload"], r["temperature"]): r for r in json.loads(told.out)}
        same = rows["Llama-3.1-8B-Instruct", "gsm8k", 0.0]
        assert (same["al_published"], same["al"], same["al_ratio"]) == (6.23, 2.0, pytest.approx(2 / 6.23))
        assert same["speedup"] == pytest.approx(2.0) and same["draft_key"] == DRAFT[:12]
        assert same["differs"].startswith("tree none: a chain [dynamic, about 60 tokens")
        assert "not stated: hardware, dtype" in same["differs"]
        other = rows["Vicuna-13B", "gsm8k", 0.0]
        assert other["al_ratio"] is None and "[Vicuna-13B], so no ratio" in other["differs"]
        assert "arxiv.org/abs/2503.01840" in told.err
    for arguments, says in (
        (["eagle3-papers"], "did you mean 'eagle3-paper'"),
        (["eagle3-paper", "e1"], "e1 is a Measurements"),
        (["eagle3-paper", "--depth-a", "3"], "takes no depth"),
    ):
        assert main(["compare", "--published", *arguments]) == 2
        assert says in capsys.readouterr().err
    assert main(["compare"]) == 2 and "name a run" in capsys.readouterr().err
