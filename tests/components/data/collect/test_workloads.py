"""Benchmark prompts: every preset in its own shape, bad rows set aside, nothing both timed and warmed up on.

Its tables are CSV, zips of CSV and whatever other steps read; what cannot be read is named.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import make_tiny_target, make_tiny_tokenizer
from workload_files import (
    collected,
    context,
    lines,
    published_rows,
    speed_bench,
    table,
    withheld,
    write_rows,
    zipped,
)

from components.contract import Prompts, Target, UserError
from components.data import collect_prompts, collect_workloads
from components.data.formats.prompts import encode_prompt, read_prompts
from components.data.settings import WorkloadSource
from components.data.sources.listing import local_files
from components.data.sources.presets import WORKLOAD_PRESETS

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CHAT_TEMPLATE = TURNS + "{% if add_generation_prompt %}<assistant>{% endif %}"


def asked(prompts: Prompts, split: str = "test") -> list[str]:
    return [p.text or (p.messages or ())[-1]["content"] for p in read_prompts(prompts, split)]


@pytest.mark.parametrize(
    ("name", "workloads"),
    [
        ("mt-bench", {"chat": 4, "code": 4, "maths": 4}),
        (
            "spec-bench",
            {
                "chat": 4,
                "code": 4,
                "maths": 8,
                "translation": 4,
                "summarisation": 4,
                "question-answering": 4,
                "retrieval": 4,
            },
        ),
        ("gsm8k", {"maths": 5}),
        ("math-500", {"maths": 5}),
        (
            "speed-bench",
            {
                "chat": 20,
                "code": 4,
                "maths": 4,
                "multilingual": 4,
                "question-answering": 4,
                "retrieval": 4,
                "summarisation": 4,
            },
        ),
        *((f"speed-bench-{length}", {f"input-{length}": 12}) for length in ("1k", "2k", "8k", "16k", "32k")),
        ("aime-2025", {"maths": 4}),
        ("humaneval", {"code": 5}),
        ("mbpp", {"code": 4}),
        ("livecodebench", {"code": 4}),
        ("alpaca", {"chat": 4}),
        ("arena-hard", {"chat": 4}),
        ("bfcl", {"tool-calling": 4}),
        ("longbench-v2", {"long-context-short": 4, "long-context-medium": 4, "long-context-long": 4}),
        ("ceval", {"maths": 4, "question-answering": 4}),
        ("cmmlu", {"maths": 4, "question-answering": 4}),
    ],
)
def test_every_preset_reads_a_copy_of_its_files(
    copies: dict[str, str], tmp_path: Path, name: str, workloads: dict[str, int]
) -> None:
    made = collected(tmp_path / "out", {"preset": name, "path": copies[name]}, num_warm_up=0)
    assert made.info["workloads"] == workloads and made.info["set_aside"] == 0
    assert made.info["licences"] == {name: WORKLOAD_PRESETS[name].licence}
    for prompt in read_prompts(made, "test"):
        language = "" if prompt.workload == "multilingual" else WORKLOAD_PRESETS[name].language
        assert (prompt.language, prompt.source) == (language, name)
        assert (prompt.messages is None) == (name == "humaneval")
        assert (prompt.tools is not None) == (name == "bfcl")


@pytest.mark.parametrize("name", WORKLOAD_PRESETS)
def test_a_wrong_file_is_one_line_and_a_row_without_its_question_is_set_aside(name: str, tmp_path: Path) -> None:
    wrong = lines(tmp_path / "wrong.jsonl", [{"unrelated": n} for n in range(3)])
    said = f"^sources: {name}: no prompt in it \\(no usable row; the first: [^\n]*wrong.jsonl, line 1, [^\n]+\\)[^\n]*$"
    with pytest.raises(UserError, match=said):
        collected(tmp_path / "w", {"preset": name, "path": str(wrong)}, num_warm_up=0)
    preset, rows = WORKLOAD_PRESETS[name], published_rows(name)
    asked_in = [field for field in (*preset.turns, preset.messages, preset.tools, *preset.fields) if field]
    needed = [field for field in rows[0] if field.lower() in asked_in and field.lower() not in preset.optional]
    assert needed
    for number, field in enumerate(needed):
        lacking = [dict(row) for row in rows]
        del lacking[-1][field]
        made = collected(
            tmp_path / f"out{number}",
            {"preset": name, "path": str(write_rows(tmp_path / f"in{number}", name, lacking))},
            num_prompts=100,
            num_warm_up=0,
        )
        assert (made.info["set_aside"], made.info["num_test"]) == (1, len(rows) - 1), field


@pytest.mark.parametrize("name", [name for name in WORKLOAD_PRESETS if name.startswith("speed-bench")])
def test_text_that_the_publisher_leaves_out_is_never_asked(name: str, tmp_path: Path) -> None:
    rows = [speed_bench(0, "rag"), withheld(1, "rag"), speed_bench(2, "rag"), withheld(3, "rag")]
    made = collected(
        tmp_path / "out", {"preset": name, "path": str(table(tmp_path / "a.parquet", rows))}, num_warm_up=0
    )
    assert set(asked(made)) == {"ask rag 0", "ask rag 2"} and made.info["set_aside"] == 2
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text().splitlines()]
    assert all("give `path:`" in row["why"] for row in aside) and [row["line"] for row in aside] == [2, 4]


def test_functions_become_tools_with_the_types_of_json_schema(copies: dict[str, str], tmp_path: Path) -> None:
    made = collected(tmp_path / "out", {"preset": "bfcl", "path": copies["bfcl"]}, num_warm_up=0)
    prompts = read_prompts(made, "test")
    assert sorted(len(prompt.messages or ()) for prompt in prompts) == [1, 1, 2, 2]
    for prompt in prompts:
        (tool,) = prompt.tools or ()
        assert tool["type"] == "function" and tool["function"]["name"] == "area"
        assert tool["function"]["parameters"] == {
            "type": "object",
            "properties": {
                "base": {"type": "number", "description": "metres"},
                "at": {"type": "array", "items": {"type": "number"}},
                "type": {"description": "of triangle"},
                "unit": {"type": "string", "default": "m"},
            },
            "required": ["base"],
        }
    folder = make_tiny_target("llama", tmp_path / "target")
    offer = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    tokenizer = make_tiny_tokenizer(folder, chat_template=offer + CHAT_TEMPLATE)
    assert all(tokenizer.decode(encode_prompt(tokenizer, prompt)).startswith("[area]<") for prompt in prompts)


@pytest.mark.parametrize("name", ["aime-2025", "mbpp", "arena-hard", "alpaca", "speed-bench-1k"])
def test_a_preset_is_streamed_from_its_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real loader on a repository of the same layout that lies here; only the address differs."""
    preset, copy = WORKLOAD_PRESETS[name], tmp_path / "repository"
    subsets = ""
    for config in preset.configs or ("default",):
        file = write_rows(copy / config, name, published_rows(name))
        path = file.relative_to(copy).as_posix()
        files = f"  data_files:\n  - split: {preset.split}\n    path: {path}\n"
        subsets += f"- config_name: {config}\n{files}"
    (copy / "README.md").write_text(f"---\nconfigs:\n{subsets}---\n")
    monkeypatch.setitem(WORKLOAD_PRESETS, name, dataclasses.replace(preset, repository=str(copy)))
    made = collected(tmp_path / "out", {"preset": name}, num_warm_up=0)
    there = collected(
        tmp_path / "there",
        {"preset": name, "path": str(write_rows(tmp_path, name, published_rows(name)))},
        num_warm_up=0,
    )
    assert asked(made) == asked(there) and made.info["rows"] == len(published_rows(name)) * len(preset.configs or ("",))


def test_templates_are_filled_and_references_kept(copies: dict[str, str], tmp_path: Path) -> None:
    gsm = collected(tmp_path / "g", {"preset": "gsm8k", "path": copies["gsm8k"]}, num_warm_up=0)
    assert "3 + 1?\n\nThink step by step, then give the final answer as one number." in asked(gsm)
    assert {p.reference for p in read_prompts(gsm, "test")} == {f"#### {n + 1}" for n in range(5)}
    maths = collected(tmp_path / "m", {"preset": "math-500", "path": copies["math-500"]}, num_warm_up=0)
    assert all(re.fullmatch(r"Let \$x_\{\d\}\$\n\n.*\\boxed\{\}\.", text) for text in asked(maths))
    code = read_prompts(collected(tmp_path / "h", {"preset": "humaneval", "path": copies["humaneval"]}), "test")
    assert code[0].text is not None and code[0].text.endswith("():") and code[0].reference == "\n    return 1\n"
    mbpp = collected(tmp_path / "b", {"preset": "mbpp", "path": copies["mbpp"]}, num_warm_up=0)
    assert any("tests:\n\nassert add(0) == 3\nassert add(1) == 4\n\n" in text for text in asked(mbpp))
    contest = asked(
        collected(tmp_path / "l", {"preset": "livecodebench", "path": copies["livecodebench"]}, num_warm_up=0)
    )
    assert sorted(text.rpartition("\n\n")[2].partition(":")[0] for text in contest)[2:] == ["class Solution"] * 2
    assert all(text == text.rstrip() and "{" not in text for text in contest)
    alpaca = collected(tmp_path / "a", {"preset": "alpaca", "path": copies["alpaca"]}, num_warm_up=0)
    assert set(asked(alpaca)) == {"Sort 0", "Sort 1\n\napples, pears", "Sort 2", "Sort 3\n\nstones"}
    long = collected(tmp_path / "x", {"preset": "longbench-v2", "path": copies["longbench-v2"]}, num_warm_up=0)
    assert any(text.startswith("long text 1\n\n") and "\nD. d1\n" in text for text in asked(long))
    chinese = collected(tmp_path / "c", {"preset": "cmmlu", "path": copies["cmmlu"]}, num_warm_up=0)
    assert all("A. 甲\nB. 乙\nC. 丙\nD. 丁" in text for text in asked(chinese)) and "第90题" not in "".join(
        asked(chinese)
    )


def test_bad_rows_are_set_aside_with_their_line(tmp_path: Path) -> None:
    rows: list[Any] = [{"question": "1?", "answer": "1"}, {"answer": "2"}, {"question": " ", "answer": "3"}, ["x"]]
    file = lines(tmp_path / "gsm.jsonl", [*rows, {"question": "5?", "answer": "5"}])
    file.write_text(file.read_text() + "{not json\n", encoding="utf-8")
    made = collected(tmp_path / "out", {"preset": "gsm8k", "path": str(file)}, num_warm_up=0)
    assert (made.info["num_test"], made.info["set_aside"], made.info["rows"]) == (2, 4, 5)
    aside = [json.loads(line) for line in (made.path / "set_aside.jsonl").read_text().splitlines()]
    assert [(row["line"], row["why"].split(" (")[0]) for row in aside] == [
        (2, "no field question"),
        (3, "question is empty"),
        (4, "a row must be an object with fields"),
        (6, "not valid JSON: Expecting property name enclosed in double quotes"),
    ]


def test_a_ragged_csv_row_is_set_aside(tmp_path: Path) -> None:
    file = tmp_path / "physician_val.csv"
    file.write_text("id,question,A,B,C,D,answer\n0,问,1,2,3,4,A\n1,逗号,多,了,1,2,3,4,A\n2,再问,1,2,3,4,B\n", "utf-8")
    made = collected(tmp_path / "out", {"preset": "ceval", "path": str(file)}, num_warm_up=0)
    assert (made.info["num_test"], made.info["set_aside"]) == (2, 1)


def test_no_question_is_both_timed_and_warmed_up_on(copies: dict[str, str], tmp_path: Path) -> None:
    source = {"preset": "spec-bench", "path": copies["spec-bench"]}
    made = collected(tmp_path / "out", source, num_prompts=2, num_warm_up=1)
    assert set(made.info["workloads"].values()) == {2} and len(made.info["workloads"]) == 7
    assert made.info["num_warm_up"] == 7
    assert not set(asked(made)) & set(asked(made, "warm_up"))
    assert read_prompts(made, "train") == [] and read_prompts(made, "validation") == []


def test_a_further_source_changes_no_choice_of_the_others(copies: dict[str, str], tmp_path: Path) -> None:
    gsm = WorkloadSource(preset="gsm8k", path=copies["gsm8k"], num_prompts=2)
    own = WorkloadSource(path=copies["gsm8k"], workload="maths", language="en")
    alone = collect_workloads(sources=[gsm], ctx=context(tmp_path / "a"))
    both = collect_workloads(sources=[gsm, own], num_prompts=1, ctx=context(tmp_path / "b"))
    assert asked(both)[:2] == asked(alone) and both.info["sources"] == {"gsm8k": 2, "gsm.jsonl": 1}
    twice = collect_workloads(sources=[gsm, gsm], ctx=context(tmp_path / "c"))
    assert asked(twice) == asked(alone) and twice.info["duplicates"] == 3


def test_rows_of_ones_own_keep_their_labels(tmp_path: Path) -> None:
    file = lines(
        tmp_path / "zh.json.jsonl", [{"instruction": f"写第{n}首诗", "output": "好", "kind": "chat"} for n in range(4)]
    )
    source = {"path": str(file), "workload_field": "kind", "language": "zh"}
    for prompt in read_prompts(collected(tmp_path / "out", source), "test"):
        assert (prompt.workload, prompt.language, prompt.reference) == ("chat", "zh", "好")
    filled = {"path": str(file), "workload": "translation", "language": "zh", "template": "译成英文：{instruction}"}
    assert all(text.startswith("译成英文：写第") for text in asked(collected(tmp_path / "filled", filled)))


def test_a_second_turn_follows_the_targets_own_answer(copies: dict[str, str], tmp_path: Path) -> None:
    folder = make_tiny_target("llama", tmp_path / "target")
    tokenizer = make_tiny_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    source = WorkloadSource(preset="mt-bench", path=copies["mt-bench"], num_prompts=2)
    target = Target(key="t", path=folder)
    made = collect_workloads(target, sources=[source], max_answer_tokens=8, ctx=context(tmp_path / "out"))
    prompts = read_prompts(made, "test")
    firsts, seconds = (
        [p for p in prompts if len(p.messages or ()) == 1],
        [p for p in prompts if len(p.messages or ()) == 3],
    )
    assert len(firsts) == len(seconds) == 6
    for first, second in zip(firsts, seconds, strict=True):
        assert first.messages and second.messages and second.messages[0] == first.messages[0]
        assert second.messages[2]["content"].startswith("and then") and second.workload == first.workload
        assert second.messages[1]["role"] == "assistant" and second.messages[1]["content"]
        rendered = tokenizer.decode(encode_prompt(tokenizer, second))
        assert rendered.startswith("<user>ask") and rendered.endswith("<assistant>")
    again = collect_workloads(target, sources=[source], max_answer_tokens=8, ctx=context(tmp_path / "again"))
    assert (again.path / "prompts.jsonl").read_bytes() == (made.path / "prompts.jsonl").read_bytes()


def test_without_a_target_the_left_out_turns_are_told(copies: dict[str, str], tmp_path: Path) -> None:
    told: list[str] = []
    ctx = context(tmp_path / "out")
    ctx.send = lambda event: told.append(str(event.get("message", "")))
    collect_workloads(sources=[WorkloadSource(preset="mt-bench", path=copies["mt-bench"])], ctx=ctx)
    assert any("go on in a second turn, left out" in message for message in told)


@pytest.mark.parametrize("name", WORKLOAD_PRESETS)
def test_a_preset_that_is_not_here_says_so_in_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    with pytest.raises(UserError) as told:
        collect_workloads(sources=[name], ctx=context(tmp_path / "out"))
    assert "\n" not in str(told.value) and "draftsmith run --online" in str(told.value)
    assert WORKLOAD_PRESETS[name].repository in str(told.value)


def development_prompts() -> Path | None:
    """Public data sets for trying things out, not part of the project: the test skips without them."""
    named = os.environ.get("DRAFTSMITH_DEV_DATA")
    folder = (Path(named) if named else Path(__file__).parents[5] / "shared" / "data") / "prompts"
    return folder if folder.is_dir() else None


@pytest.mark.skipif(development_prompts() is None, reason="no development data (set DRAFTSMITH_DEV_DATA)")
def test_the_real_files_are_read_whole(tmp_path: Path) -> None:
    folder = development_prompts()
    assert folder is not None
    names = {
        "mt-bench": "mt_bench.jsonl",
        "spec-bench": "spec_bench.jsonl",
        "gsm8k": "gsm8k_test.jsonl",
        "humaneval": "HumanEval.jsonl.gz",
        "alpaca": "../chat/alpaca_en.json",
    }
    found: Counter[str] = Counter()
    for preset, name in names.items():
        source = {"preset": preset, "path": str(folder / name)}
        made = collected(tmp_path / preset, source, num_prompts=10_000, num_warm_up=0, max_prompt_characters=10**6)
        assert made.info["set_aside"] == 0
        found[preset] = made.info["num_test"] + made.info["duplicates"]
        if preset == "spec-bench":
            assert made.info["workloads"] == {
                "chat": 60,
                "code": 10,
                "maths": 90,
                "question-answering": 80,
                "retrieval": 80,
                "summarisation": 80,
                "translation": 80,
            }
    assert found == {"mt-bench": 80, "spec-bench": 480, "gsm8k": 1319, "humaneval": 164, "alpaca": 999}


def test_training_can_keep_out_what_a_benchmark_asks(copies: dict[str, str], tmp_path: Path) -> None:
    made = collect_prompts(
        source=copies["gsm8k"], keep_out=copies["gsm8k"], num_train=0, num_validation=0, num_test=0, num_warm_up=0,
        ctx=context(tmp_path / "train"),
    )  # fmt: skip
    assert made.info["kept_out"] == 5


def test_a_damaged_zip_is_one_line(tmp_path: Path) -> None:
    rows = [{"question": f"What is {n} in words?", "answer": f"{n}"} for n in range(200)]
    whole = zipped(tmp_path / "a.zip", {"a.csv": rows}).read_bytes()
    said: Counter[str] = Counter()
    for at in range(0, len(whole), 29):
        (tmp_path / "a.zip").write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
        source = {"path": str(tmp_path / "a.zip"), "workload": "w", "language": "en"}
        try:
            made = collected(tmp_path / f"out{at}", source, num_prompts=1000)
        except UserError as error:
            assert "a.zip" in str(error) and "\n" not in str(error)
            said["refused"] += 1
        else:
            said[f"{made.info['num_test'] + made.info['num_warm_up']} rows"] += 1
    assert said["refused"] > 10 and set(said) <= {"refused", "200 rows"}


def test_a_table_in_a_folder_that_leads_out_of_it_or_is_empty_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out.csv").write_text("prompt\nWhat is not for everybody?\n")
    (tmp_path / "in" / "a.csv").symlink_to(tmp_path / "out.csv")
    source = WorkloadSource(path=str(tmp_path / "in"), workload="w", language="en")
    with pytest.raises(UserError, match="a link that leads out"):
        local_files(source)
    with pytest.raises(UserError, match="a link that leads out"):
        local_files(source.model_copy(update={"path": str(tmp_path / "in" / "*.csv")}))
    (tmp_path / "in" / "a.csv").unlink()
    (tmp_path / "in" / "a.csv").touch()
    with pytest.raises(UserError, match="the file is empty"):
        local_files(source)


def test_a_folder_is_no_table_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    table = tmp_path / "table.csv"
    table.write_text("question\nWhy?\n")
    source = {"path": str(tmp_path / "*.csv"), "workload": "chat", "language": "en"}
    assert local_files(WorkloadSource.model_validate(source)) == [table]
